"""Policy `tensile`: the paper's Algorithms 1 to 3."""
