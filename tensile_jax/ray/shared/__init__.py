"""Where the checkpoints of a cluster's jobs are, so that a job can go on on another device: see `place.py`."""
