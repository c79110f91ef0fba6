"""The steps that the simulated experiments plan: traced once for each model and size, never compiled."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
from tensile_models.bert import bert_base
from tensile_models.gpt import gpt2_small

from benchmarks.paper.metrics import metrics
from tensile_jax.budget import Budget
from tensile_jax.device_profiles import load_profile
from tensile_jax.exec.compiling.compiler import Compiler
from tensile_jax.exec.compiling.step import Options, Step, step_of
from tensile_jax.exec.fitting.find_plan import begin_to_predict
from tensile_jax.exec.fitting.forms import fastest_form
from tensile_jax.exec.fitting.rewritten_forms import always_rewritten
from tensile_jax.installed_models import MODELS
from tensile_jax.plan import CompiledSizes, PolicyName
from tensile_jax.plan.planner import Goal, Planner
from tensile_jax.plan_format import Plan
from tensile_jax.trace import trace_step

DEVICES = {"h200": "h200", "rtx_a6000": str(Path(__file__).with_name("rtx_a6000.toml"))}
BATCH_SIZE = 16
_LARGE = {"bert": bert_base, "gpt": gpt2_small}
NOTHING = CompiledSizes()


@dataclass(frozen=True, slots=True, eq=False)
class ModelStep:
    """A model's step on a device. State may be in host memory between two iterations, as the paper's method needs it."""

    model: str
    batch_size: int
    traced: Step

    @property
    def planner(self) -> Planner:
        """The planner of the step as it is, without other forms."""
        return self.traced.planner

    @property
    def jit_peak(self) -> int:
        """The predicted peak of plain `jax.jit`, in bytes."""
        return self.planner.whole_peak_bytes(NOTHING)

    @property
    def jit_us(self) -> float:
        """The predicted time of plain `jax.jit`."""
        return self.planner.model.whole_us

    def plan(self, policy: PolicyName, limit: float) -> Plan | None:
        """The plan of a policy under a limit in bytes; None if it has none."""
        found = self.planner.with_policy(policy).plan(Goal(limit), NOTHING)
        return None if found is None else found.plan

    def fastest(self, limit: float) -> Plan | None:
        """The plan of `auto` under a limit in bytes for the fastest form of the step, as users get it; None if it has none."""
        found = self._fastest_planner(limit).plan(Goal(limit), NOTHING)
        return None if found is None else found.plan

    def least(self, policy: PolicyName) -> Plan:
        """The plan of a policy with the least memory; of `auto`, for the form of the step that needs least."""
        planner = self._fastest_planner(1) if policy == "auto" else self.planner.with_policy(policy)
        return planner.least_plan(NOTHING)

    def bound(self, limit: float) -> float:
        """No plan under a limit in bytes takes less than so many times the time of plain `jax.jit`, if nothing is in chunks."""
        return always_rewritten(self.traced).planner.bound_us(limit, NOTHING) / self.jit_us

    def _fastest_planner(self, limit: float) -> Planner:
        return fastest_form(begin_to_predict(self.traced, Budget(int(limit), None))).planner


@cache
def _traced(model: str, batch_size: int, sizes: tuple[tuple[str, Any], ...]) -> Any:
    built = _LARGE.get(model, MODELS.get(model))(batch_size=batch_size, **dict(sizes))  # pyright: ignore[reportOptionalCall]
    return trace_step(jax.jit(built.step, donate_argnums=0), built.step, (built.state_shape, built.batch_shape), {})


@cache
def model_step(model: str, device: str, batch_size: int = BATCH_SIZE, **sizes: Any) -> ModelStep:
    """The step of a model at the sizes of the paper, on one of `DEVICES`; `bert` and `gpt` at their published sizes."""
    traced = _traced(model, batch_size, tuple(sorted(sizes.items())))
    options = Options("auto", load_profile(DEVICES[device]), "any")
    return ModelStep(model, batch_size, step_of(traced, options, Compiler(jax.devices()[0])))


Figures = dict[str, Any]


def figures_of(plan: Plan, step: ModelStep) -> Figures:
    """The paper's metrics of a plan against plain jit, and what it does."""
    msr, eor = 1 - plan.peak_bytes / step.jit_peak, plan.step_us / step.jit_us
    return {
        **metrics(msr, eor),
        "peak_bytes": plan.peak_bytes,
        "step_us": round(plan.step_us, 1),
        "stall_us": round(plan.stall_us, 1),
        "recomputed_us": round(plan.recomputed_us, 1),
        "swapped_bytes": plan.swapped_out_bytes + plan.swapped_in_bytes,
        "segments": len(plan.segments),
    }
