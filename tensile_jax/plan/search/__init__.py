"""Searches for the fastest plan under a memory limit: candidates, their segments and swaps, and a local search.

What is planned:

    step_model           what planning must know of a step on a device
    condensed_step       the step reduced to its large tensors;    bundles: the same for very large steps
    possible_boundaries  where segments may begin;                 swaps: what may be swapped, and when the link is free

What a plan is while it is searched, and what it costs:

    schedule             boundaries, and when each tensor is on the device;    choice: the same as the decision of a policy
    segment_account      time and memory of one segment;    workspace: the part of it that XLA decides
    segment_evaluator    the same, each segment once;       timing: the time of the step with its copies
    memory_bound, time_bound    what no plan can be below

How the search goes on:

    start_schedules, segment_boundaries, alike_iterations    the schedules that it starts from
    residency_moves, boundary_moves                          how one schedule becomes another
    local_search, search                                     which moves are made, and when the search ends
    state_on_host                                            a change to a finished plan
    latest_results                                           what is not computed twice
"""
