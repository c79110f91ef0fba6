"""Runs plans: compiles the parts into which a plan cuts a step, and executes them, for one step or for several jobs."""
