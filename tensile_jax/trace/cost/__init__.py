"""Estimates what an equation costs: its kind, its operations, its traffic, and the memory that it needs inside."""
