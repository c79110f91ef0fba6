"""Builds the plan of a choice, decodes it into instructions, counts its memory, simulates it, and checks it."""
