"""Finds the plan that keeps a step within its memory budget, and stores what is known of steps."""
