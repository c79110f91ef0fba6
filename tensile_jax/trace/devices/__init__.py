"""Plans a step for several devices: how values are divided among them, what one device sees, and what they exchange."""
