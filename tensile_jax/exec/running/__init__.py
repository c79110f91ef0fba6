"""Carries out a compiled plan, iteration after iteration."""
