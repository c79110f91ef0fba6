"""Runs one job in a process of its own: what the process is sent, how the two processes talk, and how either one may end."""
