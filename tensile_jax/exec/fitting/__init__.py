"""Finds the plan that keeps a step within its memory budget, and stores what compiling has shown of steps."""
