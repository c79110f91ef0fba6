"""Changes a schedule (a plan while it is searched) by one move at a time, to make it fit under a limit and then faster."""
