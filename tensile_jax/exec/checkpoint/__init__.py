"""Saves the state of a job in a folder and reads it back. What is read is complete and bit for bit what was saved."""
