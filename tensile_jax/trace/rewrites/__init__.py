"""Rewrites a program so that plans of the program need less memory."""
