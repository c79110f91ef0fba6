"""Runs one job in this process: its user code, its state, its compiled plan, and the launches and copies of its iterations."""
