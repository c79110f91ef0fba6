"""Windows of swaps, fitted to the segments. PROFILE: 100 bytes over the link take 10 us."""

from tensile_jax.ir import TensorId
from tensile_jax.plan.activity import find_activity
from tensile_jax.plan.retention import retain
from tensile_jax.plan.stays import Absence
from tensile_jax.plan.windows import fitted
from tests.builders import PROFILE, graph_of, tensor_named

GRAPH = graph_of(
    ["a = heavy(x)", "b = heavy(a)", "c = heavy(b)", "d = heavy(c)", "e = heavy(d)", "y = heavy(e, a)"],
    inputs="x", outputs="y",
)  # fmt: skip
"""`a` is needed at places 1 and 5."""
A = tensor_named(GRAPH, "a")
RETENTION = retain(find_activity(GRAPH), {})


def windows(absence: Absence, boundaries: tuple[int, ...], segment_us: tuple[float, ...]) -> list[tuple[int, int]]:
    """(leave, back) of the ways offered: both ends, the end only, the beginning only."""
    ways = fitted(RETENTION, {A: (absence,)}, boundaries, segment_us, PROFILE)
    return [(several[A][0].leave, several[A][0].back) for several in ways]


def test_a_tensor_leaves_when_its_copy_has_ended_and_returns_in_time_for_its_segment() -> None:
    exposed = Absence(A, 1, 4, 0.0)  # leaves at boundary 2, where its copy has only begun; is back at 4, as it is needed
    assert windows(exposed, (0, 2, 3, 4, 5, 6), (10.0, 10.0, 10.0, 10.0, 10.0)) == [(2, 4), (1, 4), (2, 4)]
    # With segments of 6 us the copy out, begun at 6, ends at 16: after boundary 3. The copy in must begin by 14: before it.
    assert windows(exposed, (0, 2, 3, 4, 5, 6), (6.0, 6.0, 6.0, 6.0, 6.0)) == [(1, 4), (1, 4), (1, 4)]
    assert windows(Absence(A, 1, 4, 0.0), (0, 2, 3, 4, 5, 6), (6.0, 6.0, 6.0, 20.0, 6.0)) == [(3, 4), (1, 4), (3, 4)]


def test_windows_never_get_shorter_on_the_device() -> None:
    early = Absence(A, 3, 4, 0.0)
    for leave, back in windows(early, (0, 2, 3, 4, 5, 6), (10.0,) * 5):
        assert leave >= 3 and back <= 4


def test_copies_share_a_lane() -> None:
    graph = graph_of(
        ["a, b = heavy(x)", "c = heavy(a, b)", *(f"{y} = heavy({x})" for x, y in ("cd", "de", "ef", "fg")), "y = heavy(g, a, b)"],
        inputs="x", outputs="y",
    )  # fmt: skip
    a, b = tensor_named(graph, "a"), tensor_named(graph, "b")
    absences = {t: (Absence(TensorId(t), 1, 5, 0.0),) for t in (a, b)}
    first = next(fitted(retain(find_activity(graph), {}), absences, (0, 2, 3, 4, 5, 6, 7), (10.0,) * 6, PROFILE))
    assert sorted((several[0].leave, several[0].back) for several in first.values()) == [(2, 5), (3, 4)]
