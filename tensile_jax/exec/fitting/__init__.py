"""Finds the plan that keeps a step within its memory budget.

For later plans of a step, it also stores the memory that XLA reported for compiled executables, and the planner's choices that
kept a budget (`knowledge.py`).
"""
