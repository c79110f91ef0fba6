"""Defines the commands. Each module has one command, or several related ones, and imports JAX only when a command runs."""
