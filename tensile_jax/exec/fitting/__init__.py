"""Finds the plan with which a step stays within its budget, and keeps what is known of steps."""
