"""Saves the state of a job in a folder and reads it back, complete and unchanged or not at all."""
