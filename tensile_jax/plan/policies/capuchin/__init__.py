"""Policy `capuchin`: the planner of Capuchin (Peng et al., ASPLOS 2020), and its measuring first iteration."""
