"""Computes lower bounds on the memory and on the time of every plan of a step."""
