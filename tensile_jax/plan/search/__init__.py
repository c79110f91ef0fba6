"""The search for the fastest plan under a limit: candidates, their segmentation and swaps, and local improvements."""
