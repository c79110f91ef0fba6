"""Saves the state of a job in a folder and reads it back, whole and unchanged or not at all."""
