"""Runs a model or several jobs for the command line: session, run folder, control socket, live view and report."""
