"""Provides train steps of ten networks, as a user of JAX and Flax would write them, each with its first state and real input.

Each network has a file of its own. The TENSILE paper uses five of the networks: VGG-16, ResNet-50, InceptionV3, InceptionV4 and
DenseNet-121. One constructor makes these five (`classifier.py`). Nothing in this package imports `tensile_jax`. For each network,
a function makes a model of given sizes:

>>> from tensile_models.mlp import mlp
>>> model = mlp(batch_size=32)
>>> model.parameters
26122

The command line of `tensile_jax` finds the models through the entry points of this package (group `tensile_jax.models`).
"""
