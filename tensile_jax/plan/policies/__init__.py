"""The policies: each chooses a plan under a memory limit. They are `auto`, the paper's algorithms, and baselines to compare
with."""
