"""The policies, which choose a plan under a memory limit: `auto`, the paper's algorithms, and the baselines."""
