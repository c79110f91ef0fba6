"""Runs one job in a process of its own: what is sent to the process, how both processes communicate, and how each may end."""
