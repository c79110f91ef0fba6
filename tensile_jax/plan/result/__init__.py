"""What a search ends with: a plan is built, simulated, checked, and compared with other plans."""
