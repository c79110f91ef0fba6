"""Policy `tensile`: the planning algorithms of the paper itself (TENSILE, Algorithms 1 to 3)."""
