"""Computes the facts about a step that planners need: latencies, copy times, lifetimes of tensors, fusion, operator order."""
