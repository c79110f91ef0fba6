"""Computes the time and memory of segments (executables), and of schedules, the plans that the search is working on."""
