"""Searches for the fastest plan under a limit: candidates, segmentation, swaps, and improvements of a plan."""
