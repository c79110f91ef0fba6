"""Makes the schedules that the search starts from."""
