"""Reduces a step to what the search decides about: its large tensors, and the places where a segment (executable) may begin."""
