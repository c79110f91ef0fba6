"""What `jax.jit` does with a call, done for a planned step: signature, placement, donation, results and interrupts."""
