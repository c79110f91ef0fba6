"""Searches for the fastest plan under a memory limit: candidates, their segments and swaps, and a local search."""
