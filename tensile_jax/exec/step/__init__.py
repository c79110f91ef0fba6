"""Compiles the segments of a planned step and runs them: one step of one user, without any other job."""
