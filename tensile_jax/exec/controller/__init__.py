"""Decides which move of which job comes next under one memory budget. Pure: it imports no JAX and acts on nothing."""
