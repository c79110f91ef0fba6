"""Searches for the fastest plan under a memory limit.

These are the files and folders, in the order in which they build on one another. A *segment* is a stretch of operators that is
compiled as one executable.

    condensed/        the step reduced to its large tensors, and the places where segments may begin
    swaps             what may be swapped, and when the link between host and device is free
    cost/             time and memory of segments, and the time of a step with its copies
    step_model        what planning must know of a step on a device
    schedule          a plan while it is searched: boundaries of segments, and when each tensor is on the device
    bounds/           lower bounds on the memory and the time of every plan
    starts/           the schedules that the search starts from
    moves/            how one schedule becomes another, and which move is made next
    choice            what a policy decides: a plan's cuts and tensors, without sizes and times
    search            the fastest schedule of a step, and the one that needs the least memory
    alike_iterations  the schedule that plans all iterations of a loop alike
    state_on_host     a change to a finished plan: state is on the host between iterations
"""
