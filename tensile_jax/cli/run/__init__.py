"""Runs a model or several jobs for the command line, with a run folder, a control socket, a live view and a report."""
