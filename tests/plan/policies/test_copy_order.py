"""When copies to the host end, if they are made in the order in which a plan issues them."""

from tensile_jax.plan.analysis.absence import Absence
from tensile_jax.plan.analysis.latency import StepCosts
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.analysis.retention import Retention, retain
from tensile_jax.plan.policies.copy_order import in_order_of_issue
from tests.builders import PROFILE, graph_of, tensor_named

LINES = ["a, c = heavy(x)", "b0 = heavy(x)", "b1 = heavy(c)", *(f"b{k} = heavy(x)" for k in range(2, 11)), "y = heavy(a, c)"]
"""Each takes 10 us. The copies of a, 300 bytes, take 30 us, those of c 10 us."""
COSTS = StepCosts(PROFILE, (10.0,) * len(LINES), (10.0,) * len(LINES))


def retained() -> Retention:
    return retain(find_liveness(graph_of(LINES, inputs="x", outputs="y", sizes={"a": 300})), {})


def test_a_copy_that_is_issued_first_ends_first_even_if_it_was_planned_last() -> None:
    """The last need of `a` is over at 10, that of c at 30. So a goes from 10 to 40, and then c until 50."""
    retention = retained()
    a, c = (tensor_named(retention.liveness.graph, name) for name in "ac")
    planned = {a: (Absence(a, 6, 9, 60.0),), c: (Absence(c, 3, 8, 20.0),)}
    assert in_order_of_issue(retention, planned, COSTS) == {a: (Absence(a, 3, 9, 60.0),), c: (Absence(c, 4, 8, 20.0),)}


def test_state_that_is_on_the_host_from_the_start_has_no_copy_there() -> None:
    retention = retained()
    a = tensor_named(retention.liveness.graph, "a")
    planned = {a: (Absence(a, -1, 9, 30.0),)}
    assert in_order_of_issue(retention, planned, COSTS) == planned


def test_an_absence_that_is_over_before_its_copy_is_left_out_and_the_next_one_copies() -> None:
    """The copy of c from 10 to 20 comes after that of a, from 10 to 40; the next can begin when place 2, which reads c, ends."""
    retention = retained()
    a, c = (tensor_named(retention.liveness.graph, name) for name in "ac")
    planned = {a: (Absence(a, 3, 9, 60.0),), c: (Absence(c, 0, 1, 20.0), Absence(c, 2, 8, 10.0))}
    assert in_order_of_issue(retention, planned, COSTS) == {a: (Absence(a, 3, 9, 60.0),), c: (Absence(c, 4, 8, 10.0),)}
    assert in_order_of_issue(retention, {c: (Absence(c, 0, 0, 20.0),)}, COSTS) == {}
