"""Reads a step's jaxpr, and flattens it into a program: one list of equations, without calls."""
