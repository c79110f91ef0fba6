"""The commands: a module each, or one for commands that belong together. None of them imports JAX before it runs."""
