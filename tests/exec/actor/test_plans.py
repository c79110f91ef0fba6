"""A job's plans as values: what is asked for and answered can be sent to another process, and old plans are forgotten."""

import pickle

import jax
import pytest

from tensile_jax.device_profiles import load_profile
from tensile_jax.exec.actor.local_actor import LocalActor
from tensile_jax.exec.actor.plans import OffloadState, PlanSummary, PlanWithin
from tensile_jax.exec.compiling.compiler import Compiler
from tensile_jax.exec.compiling.step import Options
from tensile_jax.exec.transfer import Transfer
from tensile_jax.plan.multi_job.admission import JobLimits
from tests.exec.small_jobs import wide

ROOMY = PlanWithin(JobLimits(2**30, 2**30))


@pytest.fixture
def actor() -> LocalActor:
    """Of a job that was traced, and has no plan yet."""
    work, device = wide(0, layers=4), jax.devices()[0]
    one = LocalActor(work.step, work.state(), Transfer(device))
    one.own()
    one.trace(next(iter(work.batches())), Options("none", load_profile("cpu"), "any"), Compiler(device))
    return one


def test_requests_and_summaries_are_the_same_after_a_journey(actor: LocalActor) -> None:
    request: PlanWithin = pickle.loads(pickle.dumps(ROOMY))
    assert request == ROOMY
    summary = actor.plan(request)
    arrived: PlanSummary = pickle.loads(pickle.dumps(summary))
    assert (arrived.id, arrived.plan, arrived.memory.holds) == (summary.id, summary.plan, summary.memory.holds)
    assert actor.plan(PlanWithin(ROOMY.limits, summary.id)).plan == summary.plan


def test_a_plan_is_kept_until_a_later_one_is_used_and_longer_if_others_are_based_on_it(actor: LocalActor) -> None:
    first, base = actor.plan(ROOMY), actor.plan(ROOMY)
    nothing = OffloadState(base.id, frozenset())
    second, third = actor.plan(nothing), actor.plan(nothing)
    assert [first.id, base.id, second.id, third.id] == [0, 1, 2, 3]
    actor.use(second.id)
    with pytest.raises(KeyError):
        actor.plan(PlanWithin(ROOMY.limits, first.id))
    actor.use(third.id)  # made before `second` was used
    with pytest.raises(KeyError):
        actor.use(second.id)
    assert actor.plan(nothing).plan == base.plan


def test_a_plan_that_is_only_predicted_compiles_nothing(actor: LocalActor, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something is compiled")

    monkeypatch.setattr(Compiler, "compile", refuse)
    monkeypatch.setattr(Compiler, "begin_whole", refuse)
    assert actor.plan(PlanWithin(ROOMY.limits, compiled=False)).plan.workspaces != "compiled"
