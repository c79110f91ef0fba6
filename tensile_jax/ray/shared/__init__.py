"""Keeps the checkpoints of a cluster's jobs where every device can read them, so that any device can continue a job."""
