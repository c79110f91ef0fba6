"""Turns a step and a plan into executables."""
