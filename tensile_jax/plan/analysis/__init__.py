"""Facts about a step that planners need: latencies, copy times, lifetimes of tensors, fusion, and the order of operators."""
