"""Decides which job does what next on the device, so that all jobs stay within one memory budget. It is pure: no JAX, no I/O."""
