"""Computes the time and memory of segments and of whole schedules."""
