"""Builds a plan from a policy's choice, decodes it into instructions, counts its memory, simulates its time, and checks it."""
