"""Estimates what an equation costs: how XLA fuses it, its operations, its memory traffic, and the memory that it needs inside."""
