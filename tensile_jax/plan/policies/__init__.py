"""The policies, which are ways to plan a step under a memory limit: `auto`, the paper's algorithms, and the baselines."""
