"""Compiles the segments of one planned step and runs them. It knows nothing of jobs."""
