"""The order in which operators run."""

from tensile_jax.plan.analysis.operator_order import order
from tests.builders import graph_of


def test_what_only_a_delayed_gradient_is_added_to_waits_with_it() -> None:
    """The decayed moment stands first in the program, and would be stored beside all activations."""
    graph = order(
        graph_of(
            [
                "decayed = light(m)",
                "h = heavy(x, w)",
                "y = heavy(h, v)",
                "dy = heavy(y)",
                "large = heavy(small, dy)",
                "dv = heavy(h, y)",
                "new_v = light(v, dv)",
                "new_m = light(decayed, large)",
            ],
            sizes={"m": 4000, "decayed": 4000, "large": 4000, "new_m": 4000, "h": 3000, "y": 1000},
            inputs="x w v m small",
            outputs="new_v new_m",
            carried={"m": "new_m", "v": "new_v"},
            donated="m v",
        )
    )
    names = [graph.tensors[op.outputs[0]].name for op in graph.operators]
    assert names.index("large") > names.index("dv"), "the large gradient waits until the activations are gone"
    assert names.index("decayed") > names.index("dv")
