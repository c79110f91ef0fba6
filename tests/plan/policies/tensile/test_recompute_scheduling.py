"""Recomputation scheduling of TENSILE (section IV-D) on sequences that fit on paper."""

from collections.abc import Collection

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.access import AccessSequence
from tensile_jax.plan.policies.tensile.footprint import Recomputation
from tensile_jax.plan.policies.tensile.recompute_scheduling import msps, recompute_scheduling
from tests.plan.policies.tensile.algorithm_1 import find_peak
from tests.plan.sequences import sequence_of

X, A, B, C = (TensorId(t) for t in range(4))

# Forward a, b, c, then backward c, b, a: the peak is at 60, when l is generated.
#             0            1            2            3            4            5            6
LINES = ["a = x @ 10", "b = a @ 20", "c = b @ 30", "l = c @ 10", "d = l b @ 10", "e = d a @ 10", "y = e x @ 10"]
SIZES = {"x": 5, "a": 40, "b": 60, "c": 10, "l": 10, "d": 1, "e": 1, "y": 1}


def sequence(**sizes: int) -> AccessSequence:
    return sequence_of(LINES, {**SIZES, **sizes}, initial="x", results="y")


def choose(
    some: AccessSequence, swapped: Collection[TensorId] = (), recomputed: Collection[Recomputation] = ()
) -> Recomputation | None:
    return recompute_scheduling(some, find_peak(some, (), [*recomputed]), swapped=swapped, recomputed=[*recomputed])


def test_msps_is_memory_saving_over_recomputation_time() -> None:
    assert [msps(sequence(), t) for t in (A, B, C)] == [4.0, 3.0, 10 / 30]


def test_the_largest_recomputation_value_first() -> None:
    assert find_peak(sequence()).time_us == 60.0
    assert choose(sequence()) == Recomputation(A, 1, 5)
    assert choose(sequence(b=90)) == Recomputation(B, 2, 4)


def test_of_equal_values_the_larger_tensor_first() -> None:
    assert choose(sequence(b=80)) == Recomputation(B, 2, 4)


def test_a_tensor_that_was_swapped_or_recomputed_is_not_recomputed() -> None:
    assert choose(sequence(), swapped=[A]) is None, "and what is made from it cannot be either"
    assert choose(sequence(), recomputed=[Recomputation(A, 1, 5)]) is None


def test_what_others_are_recomputed_from_is_not_recomputed() -> None:
    assert choose(sequence(b=90), recomputed=[Recomputation(B, 2, 4)]) is None


def test_a_tensor_whose_inputs_are_released_before_is_not_recomputed() -> None:
    # Without the last use of x, a cannot be made again; b can, from a.
    some = sequence_of([*LINES[:-1], "y = e @ 10"], SIZES, initial="x", results="y")
    assert choose(some) == Recomputation(B, 2, 4)
    used_just_then = sequence_of([*LINES[:-2], "e = d a x @ 10", "y = e @ 10"], SIZES, initial="x", results="y")
    assert choose(used_just_then) == Recomputation(A, 1, 5)


def test_an_old_parameter_is_there_until_its_update_begins() -> None:
    lines = ["a = p @ 10", "b = a @ 10", "c = b @ 10", "y = a c @ 10", "v = p y @ 10"]
    sizes = {"p": 5, "a": 9, "b": 1, "c": 9, "y": 1, "v": 5}
    assert choose(sequence_of(lines, sizes, initial="p", updates={"v": "p"})) == Recomputation(A, 1, 3)
    early = ["a = p @ 10", "v = p a @ 10", "c = v @ 10", "y = a c @ 10"]
    assert choose(sequence_of(early, sizes, initial="p", updates={"v": "p"})) is None


def test_what_does_not_lower_the_peak_saves_nothing() -> None:
    assert find_peak(sequence(e=500)).time_us == 80.0
    assert choose(sequence(e=500)) is None, "a is in use then, and the others are gone"


def test_inputs_of_the_iteration_and_fixed_tensors_are_not_recomputed() -> None:
    assert choose(sequence_of(LINES, SIZES, initial="x", results="y", fixed="a b")) is None
    assert X in find_peak(sequence()).tensors
