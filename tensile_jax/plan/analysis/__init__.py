"""Facts about a step that planners need: latencies, lifetimes, the residency of tensors, fusion, and the order of operators."""
