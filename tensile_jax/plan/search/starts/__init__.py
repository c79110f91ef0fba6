"""Makes the schedules (plans while they are searched) that the search starts from."""
