"""Changes a schedule by one move at a time, to make it fit under a limit and then faster."""
