"""Runs one job in a process of its own: how the process starts, what it is sent, and what it answers."""
