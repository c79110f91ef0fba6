"""Processes: what lets the processes of a step that runs on devices of several of them agree on what they launch."""
