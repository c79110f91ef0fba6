"""Models: published sizes, steps that learn, readable names, clear refusals."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from tensile_models.bert import bert, bert_base
from tensile_models.cnn import cnn
from tensile_models.densenet import densenet121
from tensile_models.gpt import gpt, gpt2_small, gpt_scan
from tensile_models.inception_v3 import inceptionv3
from tensile_models.inception_v4 import inceptionv4
from tensile_models.mlp import mlp
from tensile_models.model import Model, count
from tensile_models.resnet import resnet50
from tensile_models.vgg import vgg16

from tensile_jax.trace.step import trace_step
from tests.builders import slow_but, slow_if
from tests.models.sizes import SMALL

CLASSIFIERS: dict[str, Callable[..., Model]] = {
    "densenet121": densenet121,
    "inceptionv3": inceptionv3,
    "inceptionv4": inceptionv4,
    "resnet50": resnet50,
    "vgg16": vgg16,
}
MODELS: dict[str, Callable[..., Model]] = {"bert": bert, "cnn": cnn, "gpt": gpt, "gpt_scan": gpt_scan, "mlp": mlp, **CLASSIFIERS}
# XLA compiles each of these for five seconds and more.
SLOW = ("densenet121", "inceptionv3", "inceptionv4", "resnet50")
STEPS = slow_if(MODELS, *SLOW)


def shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def name_stacks(model: Model) -> set[str]:
    jaxpr = jax.make_jaxpr(model.step)(model.state_shape, model.batch_shape)
    return {str(eqn.source_info.name_stack) for eqn in jaxpr.eqns}


@pytest.mark.parametrize(
    ("name", "parameters", "statistics", "forward_gmacs"),
    [
        ("vgg16", 138_357_544, 0, 15.470),
        ("resnet50", 25_557_032, 53_120, 4.089),
        pytest.param("inceptionv3", 23_834_568, 34_432, 5.713, marks=pytest.mark.slow),
        pytest.param("inceptionv4", 42_679_816, 63_168, 12.254, marks=pytest.mark.slow),
        pytest.param("densenet121", 7_978_856, 83_648, 2.834, marks=pytest.mark.slow),
    ],
)
def test_classifiers_have_the_published_sizes(name: str, parameters: int, statistics: int, forward_gmacs: float) -> None:
    model = CLASSIFIERS[name](batch_size=1, optimizer=optax.sgd(0.1))
    assert (model.parameters, count(model.state_shape.batch_stats)) == (parameters, statistics)
    operators = trace_step(jax.jit(model.step), model.step, (model.state_shape, model.batch_shape), {}).graph.operators
    products = [o for o in operators if o.primitive in ("conv_general_dilated", "dot_general")]
    forward = sum(o.flops for o in products if not o.in_backward_pass)
    assert round(forward / 2e9, 3) == forward_gmacs


@pytest.mark.parametrize("scan", [False, True])
def test_gpt2_small_has_the_published_size(scan: bool) -> None:
    assert gpt2_small(batch_size=1, scan=scan).parameters == 124_439_808


def test_bert_base_has_the_published_size_whatever_the_length() -> None:
    assert {bert_base(batch_size=1, sequence_length=length).parameters for length in (128, 512)} == {109_514_298}


@pytest.mark.slow
def test_an_encoder_reads_what_comes_after_a_masked_place_too() -> None:
    model = bert(**SMALL["bert"])
    state, batch = model.init(), next(model.batches())
    changed = batch["tokens"].copy()
    changed[:, -1] = 1
    batch["masked"] = batch["masked"] * 0  # the first place of every window, whose loss hangs on the last one
    other = {**batch, "tokens": changed}
    assert float(model.step(state, batch)[1]["loss"]) != float(model.step(state, other)[1]["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_a_decoder_with_its_layers_in_a_loop_computes_what_one_without_computes(remat: bool) -> None:
    unrolled, looped = gpt(**SMALL["gpt"]), gpt_scan(**SMALL["gpt_scan"], remat=remat)
    state, batch = looped.init(), next(looped.batches())
    params = dict(state.params)
    stacked = params.pop("Blocks")
    for i in range(SMALL["gpt"]["layers"]):
        params[f"Block_{i}"] = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
    expected = unrolled.step(dataclasses.replace(unrolled.init(), params=params), batch)[1]
    assert jax.tree.map(float, looped.step(state, batch)[1]) == pytest.approx(jax.tree.map(float, expected), rel=1e-5)
    assert bool(jnp.all(stacked["Norm_0"]["scale"] == 1))


def test_adam_keeps_two_moments_for_each_parameter() -> None:
    model = mlp(batch_size=1)
    assert count(model.state_shape.opt_state) == 2 * model.parameters + 1  # and its own counter


@pytest.mark.parametrize("name", slow_if(MODELS, "inceptionv3", "inceptionv4"))
def test_a_step_keeps_the_shapes_of_its_state(name: str) -> None:
    model = MODELS[name](**SMALL[name])
    state, metrics = jax.eval_shape(model.step, model.state_shape, model.batch_shape)
    assert shapes_of(state) == shapes_of(model.state_shape)
    assert shapes_of(metrics) == {"loss": ((), jnp.float32), "accuracy": ((), jnp.float32)}


@pytest.mark.parametrize("name", MODELS)
def test_real_batches_have_the_promised_shapes(name: str) -> None:
    model = MODELS[name](**SMALL[name])
    assert shapes_of(next(model.batches())) == shapes_of(model.batch_shape)


@pytest.mark.parametrize("name", STEPS)
def test_a_few_steps_on_one_batch_lower_its_loss(name: str) -> None:
    model = MODELS[name](**SMALL[name])
    state, batch = model.init(), next(model.batches())
    assert shapes_of(state) == shapes_of(model.state_shape)
    step = jax.jit(model.step, donate_argnums=0)
    losses = []
    for _ in range(8):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    assert int(state.step) == 8


@pytest.mark.smoke
def test_the_cnn_learns_the_digits() -> None:
    model = cnn(batch_size=128)
    step = jax.jit(model.step, donate_argnums=0)
    state = model.init()
    for _, batch in zip(range(100), model.batches(), strict=False):
        state, _ = step(state, batch)
    assert model.evaluate is not None
    assert model.evaluate(state) >= 0.97


def test_the_first_state_is_the_same_each_time_and_another_for_another_seed() -> None:
    def kernel(seed: int) -> Any:
        return mlp(batch_size=1, seed=seed).init().params["Dense_0"]["kernel"]

    assert bool(jnp.all(kernel(0) == kernel(0)))
    assert not bool(jnp.any(kernel(0) == kernel(1)))


def test_every_parameter_of_a_resnet_has_a_name_that_a_person_recognises() -> None:
    stacks = name_stacks(resnet50(batch_size=1, image_size=32))
    assert {"jvp(ResNet)/Block_3/Conv_1", "transpose(jvp(ResNet))/Block_3/Conv_1"} <= stacks


def test_every_layer_of_a_decoder_has_its_own_name() -> None:
    stacks = name_stacks(gpt(**SMALL["gpt"]))
    assert {"jvp(GPT)/Block_0/Attention/QKV", "jvp(GPT)/Block_1/Down"} <= stacks


@pytest.mark.parametrize("name", slow_but(["bert", "gpt", *CLASSIFIERS], "bert", "gpt", "vgg16", "resnet50"))
def test_a_model_in_bfloat16_keeps_its_state_and_loss_in_float32(name: str) -> None:
    model = MODELS[name](**SMALL[name], dtype="bfloat16", optimizer=optax.sgd(0.1))
    jaxpr = jax.make_jaxpr(model.step)(model.state_shape, model.batch_shape)
    layers = [
        eqn
        for eqn in jaxpr.eqns
        if eqn.primitive.name in ("conv_general_dilated", "dot_general") and "Attention" not in str(eqn.source_info.name_stack)
    ]
    assert {eqn.outvars[0].aval.dtype for eqn in layers} == {jnp.dtype(jnp.bfloat16)}  # pyright: ignore[reportAttributeAccessIssue]  (aval is an array's)
    state, metrics = jax.eval_shape(model.step, model.state_shape, model.batch_shape)
    assert {leaf.dtype for leaf in jax.tree.leaves((state, metrics))} <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}


def test_what_lies_between_the_layers_of_a_densenet_in_bfloat16_is_bfloat16() -> None:
    model = densenet121(**SMALL["densenet121"], dtype=jnp.bfloat16)
    jaxpr = jax.make_jaxpr(model.step)(model.state_shape, model.batch_shape)
    joined = [eqn.outvars[0].aval.dtype for eqn in jaxpr.eqns if eqn.primitive.name == "concatenate"]  # pyright: ignore[reportAttributeAccessIssue]  (aval is an array's)
    assert set(joined) == {jnp.dtype(jnp.bfloat16)}


def test_the_step_is_named_train_step_and_takes_the_given_optimizer() -> None:
    model = mlp(batch_size=1, optimizer=optax.sgd(0.1))
    assert model.step.__name__ == "train_step"
    assert count(model.state_shape.opt_state) == 0


@pytest.mark.parametrize(
    ("name", "sizes", "error", "message"),
    [
        ("mlp", {"batch_size": 0}, ValueError, "batch_size must be at least 1: got 0. Pass batch_size=1 or more"),
        ("cnn", {"batch_size": 2.0}, TypeError, "batch_size must be a whole number: got 2.0 .float.. Pass an int"),
        ("cnn", {"batch_size": 2, "image_size": 7}, ValueError, "image_size must be at least 8: got 7"),
        ("resnet50", {"batch_size": 2, "image_size": 31}, ValueError, "image_size must be at least 32: got 31"),
        ("vgg16", {"batch_size": 2, "classes": 1}, ValueError, "classes must be at least 2: got 1"),
        ("gpt", {"batch_size": 2, "vocabulary": 255}, ValueError, "vocabulary must be at least 256: got 255"),
        ("bert", {"batch_size": 2, "vocabulary": 256}, ValueError, "vocabulary must be at least 257: got 256"),
        ("bert", {"batch_size": 2, "positions": 64}, ValueError, "positions must be at least 128: got 64"),
        ("gpt", {"batch_size": 2, "heads": 3}, ValueError, "heads must divide width: got heads=3, width=128. Pass"),
        ("gpt", {"batch_size": 2, "dtype": jnp.int32}, ValueError, "dtype must be a floating type: got int32. Pass"),
        ("vgg16", {"batch_size": 2, "dtype": "bf16"}, ValueError, "dtype must be a floating type: got 'bf16'. Pass"),
        ("inceptionv3", {"batch_size": 2, "image_size": 74}, ValueError, "image_size must be at least 75: got 74"),
        (
            "inceptionv4",
            {"batch_size": 2, "blocks": [4, 7]},
            ValueError,
            r"blocks must be 3 numbers: got \(4, 7\). Published are",
        ),
        ("resnet50", {"batch_size": 2, "blocks": [3, 4, 0, 3]}, ValueError, r"blocks\[2\] must be at least 1: got 0"),
        ("inceptionv3", {"batch_size": 2, "blocks": [1, 0, -1]}, ValueError, r"blocks\[2\] must be at least 0: got -1"),
        ("mlp", {"batch_size": 2, "seed": -1}, ValueError, "seed must be at least 0: got -1"),
    ],
)
def test_a_bad_size_is_refused_with_argument_value_and_remedy(
    name: str, sizes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        MODELS[name](**sizes)


@pytest.mark.parametrize("rate", [0.0, -1e-3, float("nan"), True, "fast"])
def test_a_learning_rate_that_is_no_number_above_zero_is_refused(rate: Any) -> None:
    with pytest.raises(ValueError, match="learning_rate must be a number above zero: got .*. The model's own is 0.001"):
        mlp(batch_size=2, learning_rate=rate)


def test_a_learning_rate_beside_an_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="learning_rate=0.1 is for Adam, and an optimizer is given. Leave one of them out"):
        mlp(batch_size=2, learning_rate=0.1, optimizer=optax.sgd(0.1))


def test_a_learning_rate_is_the_one_of_adam() -> None:
    def change(rate: float | None) -> float:
        model = mlp(batch_size=2, learning_rate=rate)
        state = model.init()
        after, _ = model.step(state, next(model.batches()))
        before = state.params["Dense_0"]["kernel"]
        return float(jnp.abs(after.params["Dense_0"]["kernel"] - before).max())

    assert change(None) == change(1e-3)  # Adam's first step moves every parameter by its rate
    assert change(5e-3) == pytest.approx(5e-3, rel=1e-2)
