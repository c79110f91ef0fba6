"""Estimates what an equation costs: its fusion by XLA, operations, memory traffic, and memory beside inputs and outputs."""
