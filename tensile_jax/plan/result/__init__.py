"""Builds the plan of a choice, simulates it, counts its memory, and checks it."""
