"""Running: what carries out a compiled plan, iteration after iteration."""
