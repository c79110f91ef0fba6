"""Decides for several jobs that share one device: whether they fit together, and which state is kept on the host."""
