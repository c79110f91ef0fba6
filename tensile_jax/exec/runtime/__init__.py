"""Runs several training jobs on one device under one memory budget: `Runtime`, its threads and the records of its jobs."""
