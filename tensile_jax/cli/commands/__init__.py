"""Defines the commands, one per module, or several that belong together. No module imports JAX before its command runs."""
