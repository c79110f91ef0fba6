"""Runs plans: compiles their segments and executes them, for one step or for several jobs on one device."""
