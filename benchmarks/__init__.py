"""Figures, measured. `make bench` runs on this machine, `make bench-h200` compiles for an H200 that need not be there."""
