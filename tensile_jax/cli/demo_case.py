"""Run one case of the demo: train plain, plan, train under the budget. Both begin with the same state and batches."""

import time
from pathlib import Path

import jax

from tensile_jax.api import jit
from tensile_jax.cli.demo_table import Case, Comparison, Side
from tensile_jax.cli.progress import Live
from tensile_jax.cli.session import refused_early, show_steps
from tensile_jax.cli.train import Training, train
from tensile_jax.cli.units import format_us
from tensile_jax.exec.compile import peak_of
from tensile_jax.exec.transfer import to_device
from tensile_jax.models import load
from tensile_jax.models.model import Model


def compare(case: Case, *, folder: Path, live: Live) -> Comparison:
    """The comparison; the plan is written to `folder`.

    The budget is given in bytes, from the plain step compiled here, so that plain jit is compiled once and not twice.
    """
    model = load(case.model)(batch_size=case.batch_size, image_size=case.image_size)
    plain = _plain(case, model, live)
    budget_bytes = int(case.share * plain.peak_bytes)
    step = jit(
        model.step,
        budget=budget_bytes,
        donate_argnums=0,
        progress=lambda what, done, of: live.tell(f"{case.name}: {what}", done, of),
    )
    live.wait_for(f"{case.name}: tracing, planning, compiling")
    watch = show_steps(step, model, case.steps, live, what=f"{case.name}: training under {case.share:.0%}")
    training = train(step, model.init(), model.batches(), steps=case.steps, watch=watch)
    plan, report = step.plan(model.state_shape, model.batch_shape), step.report()
    plan_file = folder / f"{case.model}.plan.json"
    plan.save(plan_file)
    return Comparison(
        case=case,
        budget_bytes=budget_bytes,
        plain=plain,
        planned=_side(model, training, report.peak_bytes, plan.peak_bytes, report.compile_s),
        segments=report.segments,
        swapped_bytes=report.swapped_bytes,
        plan_file=str(plan_file),
    )


def _plain(case: Case, model: Model, live: Live) -> Side:
    batches = refused_early(model)
    live.wait_for(f"{case.name}: compiling plain jit")
    began = time.perf_counter()
    compiled = jax.jit(model.step, donate_argnums=0).lower(model.state_shape, model.batch_shape).compile()
    compile_s = time.perf_counter() - began

    def watch(done: int, loss: float, us: float) -> None:
        live.tell(f"{case.name}: training with plain jit", done, case.steps, f"loss {loss:.4f}, {format_us(us)}")

    training = train(compiled, model.init(), batches, steps=case.steps, watch=watch)
    return _side(model, training, peak_of(compiled), None, compile_s)


def _side(model: Model, training: Training, peak_bytes: int, predicted_bytes: int | None, compile_s: float) -> Side:
    return Side(
        peak_bytes=peak_bytes,
        predicted_peak_bytes=predicted_bytes,
        step_us=training.step_us,
        compile_s=compile_s,
        loss_first=training.losses[0],
        loss_last=training.losses[-1],
        test_accuracy=None if model.evaluate is None else model.evaluate(to_device(training.state)),
    )
