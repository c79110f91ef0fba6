"""Compiling: what turns a step and a plan into executables."""
