"""Traces a step for several devices: how values are divided among them, what one device sees, and what the devices exchange."""
