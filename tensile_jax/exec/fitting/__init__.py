"""Fitting: what finds the plan of a step that keeps its budget, and keeps what is known of steps."""
