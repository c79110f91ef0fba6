"""Train steps of five networks as a user of JAX and Flax would write them, each with its first state and real input.

Each network has a file of its own. Nothing in this package imports `tensile_jax`. A function makes a model of the given sizes:

>>> from tensile_models.mlp import mlp
>>> model = mlp(batch_size=32)
>>> model.parameters
26122

The command line of `tensile_jax` finds the models through the entry points of this package (group `tensile_jax.models`).
"""
