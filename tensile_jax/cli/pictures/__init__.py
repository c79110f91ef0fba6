"""Draws the pictures of the commands with matplotlib: the memory of a run, and the trade-off of policies."""
