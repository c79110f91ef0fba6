"""Five train steps as a user of JAX and Flax would write them, each with its first state and real input.

One network a file; nothing here knows the planner. A model is a function of its sizes:

>>> from tensile_models.mlp import mlp
>>> model = mlp(batch_size=32)
>>> model.parameters
26122

The package's entry points (group `tensile_jax.models`) tell the command line their names.
"""
