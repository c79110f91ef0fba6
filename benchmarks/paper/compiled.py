"""Experiments 3 and 8 with programs compiled for an H200: `python -m benchmarks.paper compile`. Nothing runs.

Memory is what XLA's GPU compiler says of plain jit's step and of every segment. Without a GPU it does not tune its kernels, so
the workspaces of cuDNN and cuBLAS are missing from both. Times are predicted for the device profile, as in `single.py`. Needs
the CUDA plugin of JAX, which `make paper-compiled` installs.
"""

from benchmarks.h200_device import H200Compiler, h200, traced_for
from benchmarks.paper.metrics import metrics
from benchmarks.paper.steps import BATCH_SIZE, Figures
from tensile_jax.budget import Budget
from tensile_jax.device_profiles import load_profile
from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.compiling.compiler import peak_of
from tensile_jax.exec.compiling.step import Options, step_of
from tensile_jax.exec.fitting.find_plan import fit
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.exec.fitting.forms import fastest_form
from tensile_jax.exec.fitting.knowledge import Knowledge
from tensile_jax.installed_models import MODELS
from tensile_jax.plan import CompiledSizes, PolicyName
from tensile_jax.plan_format import Plan

_MOST_EOR = 1.6


class _Compiled:
    """A model's step, and its plans compiled for the H200."""

    def __init__(self, model: str) -> None:
        device = h200()
        built = MODELS[model](batch_size=BATCH_SIZE)
        self._traced = traced_for(built, device)
        self._compiler = H200Compiler(device)
        self.jit_peak = peak_of(self._compiler.compile_whole(self._traced.traced))

    def plan(self, policy: PolicyName, budget: int) -> Figures:
        """The figures of the plan under a budget in bytes.

        Raises:
            BudgetTooSmall: no plan of the policy keeps the budget.
        """
        options = Options(policy, load_profile("h200"), "any")
        step = step_of(self._traced, options, self._compiler)
        fitting = Fitting(step, Budget(budget, None), Knowledge(CompiledSizes(whole=self.jit_peak)))
        return self._figures(fit(fastest_form(fitting)).plan, step.planner.model.whole_us)

    def least(self, policy: PolicyName) -> Figures:
        """The figures of the policy's plan with the least memory."""
        budget = 1
        while True:
            try:
                return self.plan(policy, budget)
            except BudgetTooSmall as error:
                budget = max(error.floor_bytes, budget + 1)

    def at(self, policy: PolicyName, budget: int) -> Figures:
        """The figures under a budget; those with the least memory if the policy needs more."""
        try:
            return self.plan(policy, budget)
        except BudgetTooSmall:
            return {**self.least(policy), "at_its_least": True}

    def _figures(self, plan: Plan, whole_us: float) -> Figures:
        msr, eor = 1 - plan.peak_bytes / self.jit_peak, plan.step_us / whole_us
        return {
            **metrics(msr, eor),
            "peak_bytes": plan.peak_bytes,
            "jit_peak_bytes": self.jit_peak,
            "swapped_bytes": plan.swapped_out_bytes + plan.swapped_in_bytes,
            "segments": len(plan.segments),
        }


def single(model: str) -> dict[str, Figures]:
    """What `single.single` gives, with compiled memory."""
    step = _Compiled(model)
    tensile = step.least("tensile")
    return {
        "unplanned": step.plan("none", 2**60),
        "vdnn": step.least("vdnn"),
        "capuchin": step.at("capuchin", tensile["peak_bytes"]),
        "tensile": tensile,
        "checkpoint": step.least("checkpoint"),
        "auto at tensile's peak": step.at("auto", tensile["peak_bytes"]),
    }


def within(model: str) -> list[Figures]:
    """`auto` under less and less memory, as long as its predicted time is within a limit."""
    step = _Compiled(model)
    found: list[Figures] = []
    for twentieths in range(18, 0, -1):
        try:
            found.append(step.plan("auto", twentieths * step.jit_peak // 20))
        except BudgetTooSmall:
            break
        if found[-1]["eor"] > _MOST_EOR:
            break
    return found
