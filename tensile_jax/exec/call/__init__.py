"""Does for a call of a planned step what `jax.jit` does for a call: signature, placement, donation, results and interrupts."""
