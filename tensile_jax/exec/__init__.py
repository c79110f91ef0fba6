"""Takes a plan, compiles its segments and runs them."""
