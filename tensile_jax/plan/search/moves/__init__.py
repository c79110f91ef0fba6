"""Changes a schedule, the plan that the search is working on, move by move: first to fit under a limit, then to be faster."""
