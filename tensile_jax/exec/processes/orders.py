"""Defines the orders by which the process that plans tells the other processes of a step what to compile, and then what to run.

    process that plans    plans, orders, compiles, takes the largest size that any process reports, and plans again if need be
    other processes       compile what is ordered, and report the sizes, until they are ordered to run a plan

A *size* comes from XLA's report about an executable: the peak of the whole step, or the workspace of a segment or a program
(what it needs beside its inputs and outputs).

The process that plans gives an order wherever it compiles something (`exec/fitting/fitting.py`, `exec/compiling/plain_jit.py`).
The other processes follow the orders in `exec/fitting/common_plan.py`.
"""

import msgspec

from tensile_jax.plan_format import Plan


class CompileWhole(msgspec.Struct, frozen=True, tag="whole"):
    """Compile plain jit's step, to run it or for its sizes only, and give its peak."""

    to_run: bool


class CompileSegments(msgspec.Struct, frozen=True, tag="segments"):
    """Compile the segments of a plan, to run them or for their sizes only, and give their workspaces."""

    plan: Plan
    to_run: bool


class CompilePrograms(msgspec.Struct, frozen=True, tag="programs"):
    """Compile the programs into which the segments of a plan are joined, and give their workspaces."""

    plan: Plan


class Run(msgspec.Struct, frozen=True, tag="run"):
    """Run this plan from now on. If its segments are joined into programs, `joined` is the plan of these."""

    plan: Plan
    joined: Plan | None


Order = CompileWhole | CompileSegments | CompilePrograms | Run
