"""Jobs under plain `jax.jit`, one after another: what a run under a budget is compared with.

Each is compiled, trained for all its steps and, where it has a test set, tested; everything of it is freed before the next.
"""

import gc
import time
from dataclasses import dataclass

import jax

from tensile_jax.cli.job_source import model_of, shapes_of
from tensile_jax.cli.jobs_file import JobEntry
from tensile_jax.cli.plain_jit import compile_plain
from tensile_jax.cli.progress import Live
from tensile_jax.cli.train import train
from tensile_jax.cli.units import format_us


@dataclass(frozen=True, slots=True)
class PlainJob:
    """One job. `peak_bytes` is XLA's figure; `time_s` is from its compiling to its last step, without the test."""

    name: str
    peak_bytes: int
    compile_s: float
    time_s: float
    loss_first: float
    loss_last: float
    test_accuracy: float | None


def run_plain(entry: JobEntry, live: Live) -> PlainJob:
    """Train the model of `entry`, which must have one.

    Raises:
        Refusal: it cannot be made.
    """
    model = model_of(entry)
    assert model is not None
    live.wait_for(f"{entry.name}: compiling plain jit")
    began = time.perf_counter()
    plain = compile_plain(shapes_of(entry))

    def watch(done: int, loss: float, us: float) -> None:
        live.tell(f"{entry.name}: training with plain jit", done, entry.steps, f"loss {loss:.4f}, {format_us(us)}")

    training = train(plain.compiled, model.init(), model.batches(), steps=entry.steps, watch=watch)
    time_s = time.perf_counter() - began
    accuracy = None if model.evaluate is None else model.evaluate(training.state)
    found = PlainJob(
        name=entry.name,
        peak_bytes=plain.peak_bytes,
        compile_s=plain.compile_s,
        time_s=time_s,
        loss_first=training.losses[0],
        loss_last=training.losses[-1],
        test_accuracy=accuracy,
    )
    del training, plain, model
    gc.collect()
    jax.clear_caches()
    return found
