"""Policy `capuchin`: the baseline of Peng et al., with its first iteration in passive mode."""
