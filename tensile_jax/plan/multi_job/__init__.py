"""Arithmetic for several jobs that share one device: memory profiles, safe states, and state kept on the host."""
