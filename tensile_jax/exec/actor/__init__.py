"""Runs one job in this process: its user code, its state, its compiled plan, and the moves of its iterations."""
