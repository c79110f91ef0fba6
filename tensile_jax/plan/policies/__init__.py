"""The policies, which choose a plan under a limit: `auto`, the paper's algorithms, and the baselines to compare them with."""
