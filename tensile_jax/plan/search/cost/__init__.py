"""Computes the time and memory of segments (executables), and of whole schedules: plans while they are searched."""
