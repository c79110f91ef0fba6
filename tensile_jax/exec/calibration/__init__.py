"""Measures a device: its link, its memory, its launches and its arithmetic, for the profile with which steps are planned."""
