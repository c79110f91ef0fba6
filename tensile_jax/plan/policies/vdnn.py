"""Policy `vdnn`: copies the input of every convolution to the host, and copies it back one layer before the gradient needs it.

This is vDNN_conv of Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design"
(MICRO 2016), the first baseline of TENSILE (section V). A *layer* is one feature map X with the convolutions that read it, its
*readers*:

    X         a tensor that a convolution reads in the forward pass, and that a second convolution reads in the backward pass
              to compute the gradient of the first one's kernel
    forward   the last reader of X that depends on no other reader of X
    backward  the first reader of X that depends on another reader of X: it computes the gradient of the kernel

Between `forward` and `backward`, X is away for the longest interval in which no operator needs it:

    swap-out  begins right after the last operator before that interval, and must end by the end of the next layer's convolution
    swap-in   begins when the layer before this one in the backward pass begins, and must end before X is needed

The last layer of the forward pass has no next layer. It is also the first layer of the backward pass, so no layer comes before it
there. *Heavy* operators (those that XLA does not fuse into others) take the place of the missing layers: the first one in the
interval for the swap-out, and the last one in the interval for the swap-in.

If the whole step fits the limit, it runs as one executable. Otherwise the feature maps of all layers are copied to the host,
whatever the limit, except those that the host cannot hold (`host_limit.py`). If no feature map can leave, the policy swaps
nothing, like the policy `none`. The plan's segments, stretches of operators that are each compiled as one executable, begin and
end where these copies are issued and awaited (`event_boundaries.py`).

Differences from the paper:

    - vDNN copies X out while the layer that reads X runs, and waits at the end of that layer. Here a copy begins only after the
      segment that needs X last, and runs beside the next layer. So X stays on the device for that much longer.
    - XLA chooses the algorithms of convolutions.
    - Tensors that are not stored, because XLA fuses them into their readers, cannot be copied to the host. Inputs that belong to
      the caller stay on the device as well.

Times in microseconds since the step began.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.analysis.absence import Absence, Absences
from tensile_jax.plan.analysis.copy_time import copy_in_us, copy_out_us
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.analysis.retention import Retention
from tensile_jax.plan.policies.event_boundaries import event_boundaries
from tensile_jax.plan.policies.host_limit import that_fit, within_host_limit
from tensile_jax.plan.policies.none import none
from tensile_jax.plan.policies.segments import Decision, first_that_fits
from tensile_jax.plan.search.choice import Choice
from tensile_jax.plan.search.cost.workspace import CompiledSizes
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan.search.swaps import Gap, may_leave

_CONVOLUTION = "conv_general_dilated"


@dataclass(frozen=True, slots=True)
class Layer:
    """The convolutions that read `feature_map`: the places of the last one forward and of the first one backward."""

    feature_map: TensorId
    forward: int
    backward: int


def vdnn(model: StepModel, limit: float, measured: CompiledSizes) -> Choice | None:
    """The cheapest cut with every feature map offloaded; the choice of policy `none` if there is none to offload."""
    return within_host_limit(model, limit, measured, lambda model: _offloaded(model, limit, measured))


def _offloaded(model: StepModel, limit: float, measured: CompiledSizes) -> Choice | None:
    layers = find_layers(model.graph)
    if not layers or not model.may_swap:
        return none(model, limit, measured)
    retention = model.base
    absences = that_fit(model, retention, offload(retention, layers, model.latencies, model.profile))
    if not absences:
        return none(model, limit, measured)
    own = event_boundaries(retention, absences, model.costs)
    return first_that_fits(model, [("vdnn", lambda: Decision(retention, absences, own))], limit, measured)


def find_layers(graph: Graph) -> tuple[Layer, ...]:
    """The layers in the order of their forward convolutions: one for each feature map that is read again in the backward pass."""
    depends: dict[TensorId, int] = {}  # the convolutions on which a tensor depends, as a set of bits
    before: dict[int, int] = {}  # the same for the convolution at a place
    readers: dict[TensorId, list[int]] = {}
    for place, operator in enumerate(graph.operators):
        seen = 0
        for t in operator.inputs:
            seen |= depends.get(t, 0)
        if operator.primitive == _CONVOLUTION:
            for t in operator.inputs:
                readers.setdefault(t, []).append(place)
            before[place] = seen
            seen |= 1 << place
        for t in operator.outputs:
            depends[t] = seen
    layers: list[Layer] = []
    for t, places in readers.items():
        mine = sum(1 << place for place in places)
        forward = [p for p in places if not before[p] & mine]
        backward = [p for p in places if before[p] & mine]
        if backward and any(graph.operators[p].inputs[0] == t for p in forward):  # not the kernel
            layers.append(Layer(t, max(forward), min(backward)))
    return tuple(sorted(layers, key=lambda layer: (layer.forward, layer.feature_map)))


def offload(retention: Retention, layers: Sequence[Layer], latencies: Sequence[float], profile: DeviceProfile) -> Absences:
    """An absence for every feature map that may leave and has time to leave between its forward and its backward convolution."""
    graph = retention.liveness.graph
    ends = (0.0, *accumulate(latencies))  # ends[p + 1]: when place p ends
    heavy = [place for place, operator in enumerate(graph.operators) if operator.kind == "heavy"]
    gaps = {layer: _gap(retention, layer, ends) for layer in layers if may_leave(retention, layer.feature_map)}
    backwards = sorted(gaps, key=lambda layer: (layer.backward, layer.feature_map))
    earlier = {layer: previous.backward for previous, layer in pairwise(backwards)}
    absences: dict[TensorId, tuple[Absence, ...]] = {}
    for layer, gap in gaps.items():
        follows = [other.forward for other in layers if gap.after < other.forward]
        hides_out = min(follows, default=next((p for p in heavy if p > gap.after), gap.after))
        hides_in = earlier.get(layer, max((p for p in heavy if p < gap.before), default=gap.before))
        back = min(max(hides_in, gap.after), gap.before - 1)
        leave = hides_out if hides_out < back else gap.after
        if leave < back:
            nbytes = graph.tensors[layer.feature_map].nbytes
            hidden_out = min(copy_out_us(nbytes, profile), ends[leave + 1] - ends[gap.after + 1])
            hidden_in = min(copy_in_us(nbytes, profile), ends[gap.before] - ends[back])
            absences[layer.feature_map] = (Absence(layer.feature_map, leave, back, hidden_out + hidden_in),)
    return absences


def _gap(retention: Retention, layer: Layer, ends: Sequence[float]) -> Gap:
    """The longest time without a need from the layer's forward convolution to its backward one; ties go to the earliest."""
    needs = [p for p in retention.needs[layer.feature_map] if layer.forward <= p <= layer.backward]
    after, before = max(pairwise(needs), key=lambda pair: (ends[pair[1]] - ends[pair[0] + 1], -pair[0]))
    return Gap(layer.feature_map, after, before)
