"""Policy `capuchin`: swaps or recomputes tensors by their accesses in a simulated first iteration (Peng et al., ASPLOS 2020)."""
