"""Rewrites a program so that a plan of it needs less memory."""
