"""Turns a step on Flax NNX objects into a pure function of pytrees, by Flax's own means.

paths.py      finds the path of each array in the user's objects, such as `model.linear1.kernel`
pure_step.py  has Flax make the pure function of a step, and the pytrees of the objects of a call

This package imports Flax, which is optional. So other modules import this package only when the user has imported `flax.nnx`, or
uses `tensile_jax.nnx`.
"""
