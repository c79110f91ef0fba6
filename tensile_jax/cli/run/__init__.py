"""What happens while a model or several jobs run: the session, the run folder, the control socket, the live view, the report."""
