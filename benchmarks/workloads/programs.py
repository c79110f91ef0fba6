"""Train steps as the users of several libraries write them.

The workloads of the other files all have one form, `step(state, batch)`, with the state donated. Here each program keeps the form
of its origin, which its docstring names: what its arguments are, what holds the state, and with which options it is given to
`jax.jit`. All of them are written anew.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from jax import lax
from jax.example_libraries import optimizers, stax

from benchmarks.workloads.workload import cross_entropy, integers, normal


@dataclass(frozen=True)
class Program:
    """`jax.jit(function, **options)` is called with these arguments: arrays, or the shapes of arrays."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


# -- Flax Linen ---------------------------------------------------------------------------------------------------------------


class _Digits(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (32, 64):
            x = nn.avg_pool(nn.relu(nn.Conv(width, (3, 3))(x)), (2, 2), strides=(2, 2))
        return nn.Dense(10)(nn.relu(nn.Dense(256)(x.reshape(len(x), -1))))


def flax_mnist() -> Program:
    """Flax's MNIST example: a `TrainState`, images and labels are three arguments, and nothing is donated."""
    net = _Digits()

    def start() -> TrainState:
        params = net.init(jax.random.key(0), jnp.ones((1, 28, 28, 1)))["params"]
        return TrainState.create(apply_fn=net.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))

    def train_step(state: TrainState, images: jax.Array, labels: jax.Array) -> Any:
        def loss_fn(params: Any) -> Any:
            logits = state.apply_fn({"params": params}, images)
            return cross_entropy(logits, labels), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), loss, jnp.mean(jnp.argmax(logits, -1) == labels)

    return Program(train_step, (jax.eval_shape(start), normal(0, 128, 28, 28, 1), integers(0, 10, 128)))


class _Block(nn.Module):
    """Two convolutions with batch statistics beside a shortcut."""

    channels: int
    strides: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = partial(nn.Conv, use_bias=False, dtype=jnp.float16)
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=jnp.float16)
        y = nn.relu(norm()(conv(self.channels, (3, 3), self.strides)(x)))
        y = norm(scale_init=nn.initializers.zeros)(conv(self.channels, (3, 3))(y))
        if x.shape != y.shape:
            x = norm()(conv(self.channels, (1, 1), self.strides)(x))
        return nn.relu(x + y)


class _Classifier(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(32, (3, 3), use_bias=False, dtype=jnp.float16)(x)
        for channels, strides in ((32, 1), (64, 2), (128, 2)):
            x = _Block(channels, strides)(x)
        return nn.Dense(100, dtype=jnp.float32)(x.mean((1, 2)))


class _ScaledState(TrainState):
    """A state with batch statistics, and the factor by which the loss is multiplied so that float16 gradients do not vanish."""

    batch_stats: Any = None
    dynamic_scale: Any = None


def flax_imagenet() -> Program:
    """Flax's ImageNet example: float16 with a dynamic scale, batch statistics, weight decay in the loss, a dict as the batch."""
    net, schedule = _Classifier(), optax.cosine_decay_schedule(0.1, 1000)

    def start() -> _ScaledState:
        variables = net.init(jax.random.key(0), jnp.ones((1, 32, 32, 3)))
        return _ScaledState.create(
            apply_fn=net.apply, params=variables["params"], tx=optax.sgd(schedule, momentum=0.9, nesterov=True),
            batch_stats=variables["batch_stats"], dynamic_scale=DynamicScale(),
        )  # fmt: skip

    def train_step(state: _ScaledState, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, changed = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
            decay = sum(jnp.sum(w**2) for w in jax.tree.leaves(params) if w.ndim > 1)
            return cross_entropy(logits, batch["label"]) + 0.5e-4 * decay, (changed, logits)

        scale, finite, aux, grads = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True)(state.params)
        loss, (changed, logits) = aux
        new = state.apply_gradients(grads=grads, batch_stats=changed["batch_stats"], dynamic_scale=scale)
        or_old = partial(jnp.where, finite)
        params = jax.tree.map(or_old, new.params, state.params)
        opt_state = jax.tree.map(or_old, new.opt_state, state.opt_state)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
        metrics = {"loss": loss, "accuracy": accuracy, "learning_rate": schedule(state.step), "scale": scale.scale}
        return new.replace(params=params, opt_state=opt_state), metrics

    batch = {"image": normal(0, 64, 32, 32, 3), "label": integers(0, 100, 64)}
    return Program(train_step, (jax.eval_shape(start), batch), {"donate_argnums": 0})


class _Gpt(nn.Module):
    """Layers of causal attention and a dense network, with dropout; the embedding is the last layer, too."""

    vocabulary: int = 512
    width: int = 128

    @nn.compact
    def __call__(self, tokens: jax.Array, deterministic: bool) -> jax.Array:
        embed = nn.Embed(self.vocabulary, self.width, dtype=jnp.bfloat16)
        x = embed(tokens) + nn.Embed(tokens.shape[1], self.width, dtype=jnp.bfloat16)(jnp.arange(tokens.shape[1]))
        mask = nn.make_causal_mask(tokens)
        for _ in range(4):
            attention = nn.MultiHeadDotProductAttention(4, dtype=jnp.bfloat16, dropout_rate=0.1, deterministic=deterministic)
            y = attention(nn.LayerNorm(dtype=jnp.bfloat16)(x), mask=mask)
            x = x + nn.Dropout(0.1, deterministic=deterministic)(y)
            y = nn.gelu(nn.Dense(4 * self.width, dtype=jnp.bfloat16)(nn.LayerNorm(dtype=jnp.bfloat16)(x)))
            x = x + nn.Dropout(0.1, deterministic=deterministic)(nn.Dense(self.width, dtype=jnp.bfloat16)(y))
        return embed.attend(nn.LayerNorm(dtype=jnp.bfloat16)(x)).astype(jnp.float32)


def nanogpt() -> Program:
    """nanoGPT as it is rewritten in JAX: gradients of micro-batches are summed in a scan; no decay of vectors; bfloat16."""
    net = _Gpt()
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            optax.warmup_cosine_decay_schedule(0, 6e-4, 100, 1000, 6e-5), b2=0.95, weight_decay=0.1,
            mask=lambda params: jax.tree.map(lambda w: w.ndim > 1, params),
        ),
    )  # fmt: skip

    def start() -> Any:
        params = net.init(jax.random.key(0), jnp.zeros((1, 128), jnp.int32), True)["params"]
        return params, optimizer.init(params)

    def train_step(params: Any, opt_state: Any, tokens: jax.Array, key: jax.Array) -> Any:
        def loss_fn(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
            logits = net.apply({"params": params}, tokens[:, :-1], False, rngs={"dropout": key})
            return cross_entropy(jnp.asarray(logits), tokens[:, 1:])

        def micro_step(grads: Any, given: Any) -> Any:
            loss, more = jax.value_and_grad(loss_fn)(params, *given)
            return jax.tree.map(jnp.add, grads, more), loss

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, losses = lax.scan(micro_step, zeros, (tokens, jax.random.split(key, len(tokens))))
        grads = jax.tree.map(lambda g: g / len(tokens), grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, losses.mean()

    params, opt_state = jax.eval_shape(start)
    given = params, opt_state, integers(0, 512, 4, 8, 129), jax.random.PRNGKey(0)
    return Program(train_step, given, {"donate_argnums": (0, 1)})


# -- Flax NNX -----------------------------------------------------------------------------------------------------------------


class _Mixer(nnx.Module):
    """Attention over the columns of images, with dropout and batch statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(3, 64, (4, 4), strides=4, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.hidden, self.last = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm(self.first(x)).reshape(len(x), -1, 64)
        x = x + self.dropout(self.attention(x))
        return self.last(nnx.gelu(self.hidden(x)).mean(1))


def nnx_functional() -> Program:
    """Flax NNX's functional training loop: the objects are split once, merged inside the step, and split again."""
    model = _Mixer(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    graphdef, state = nnx.split((model, optimizer, metrics))

    def train_step(graphdef: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        model, optimizer, metrics = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(images), labels))(model)
        optimizer.update(model, grads)
        metrics.update(loss=loss)
        return nnx.state((model, optimizer, metrics)), loss

    given = graphdef, state, normal(0, 64, 32, 32, 3), integers(0, 10, 64)
    return Program(train_step, given, {"static_argnums": 0, "donate_argnums": 1})


# -- Equinox ------------------------------------------------------------------------------------------------------------------


def equinox_neural_ode() -> Program:
    """Equinox's neural ODE: a module is partitioned into arrays and the rest; Runge-Kutta in a scan; `vmap` over series."""
    import equinox as eqx  # not needed for the other programs

    field = eqx.nn.MLP(8, 8, 64, 2, activation=jax.nn.softplus, key=jax.random.key(0))
    params, static = eqx.partition(field, eqx.is_inexact_array)
    optimizer = optax.adabelief(3e-3)

    def solve(model: Any, times: jax.Array, y: jax.Array) -> jax.Array:
        def advance(y: jax.Array, dt: jax.Array) -> Any:
            a = model(y)
            b = model(y + dt / 2 * a)
            c = model(y + dt / 2 * b)
            y = y + dt / 6 * (a + 2 * b + 2 * c + model(y + dt * c))
            return y, y

        return lax.scan(advance, y, jnp.diff(times))[1]

    @eqx.filter_value_and_grad
    def grad_loss(model: Any, times: jax.Array, series: jax.Array) -> jax.Array:
        predicted = jax.vmap(solve, in_axes=(None, None, 0))(model, times, series[:, 0])
        return jnp.mean((predicted - series[:, 1:]) ** 2)

    def make_step(params: Any, opt_state: Any, times: jax.Array, series: jax.Array) -> Any:
        model = eqx.combine(params, static)
        loss, grads = grad_loss(model, times, series)
        updates, opt_state = optimizer.update(grads, opt_state)
        return loss, eqx.filter(eqx.apply_updates(model, updates), eqx.is_inexact_array), opt_state

    return Program(make_step, (params, optimizer.init(params), jnp.linspace(0, 1, 65), normal(0, 128, 65, 8)))


# -- Haiku, by hand -----------------------------------------------------------------------------------------------------------


class _Transformed:
    """A function that asks for its parameters by name, as a pair of pure functions."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def init(self, key: jax.Array, *arguments: Any) -> dict[str, jax.Array]:
        """The parameters that a call with these arguments asks for."""
        made: dict[str, jax.Array] = {}

        def get(name: str, shape: tuple[int, ...]) -> jax.Array:
            scale = shape[0] ** -0.5 if len(shape) > 1 else 0.0
            return made.setdefault(name, scale * jax.random.truncated_normal(jax.random.fold_in(key, len(made)), -2, 2, shape))

        self._function(get, *arguments)
        return made

    def apply(self, params: Mapping[str, jax.Array], *arguments: Any) -> Any:
        """The call with these parameters."""
        return self._function(lambda name, _: params[name], *arguments)


class _TrainingState(NamedTuple):
    params: Any
    average: Any
    opt_state: Any
    key: jax.Array


def haiku_vae() -> Program:
    """Haiku's variational autoencoder: parameters in a dict by name, a NamedTuple as the state, and an average of the weights."""

    def linear(get: Any, name: str, x: jax.Array, width: int) -> jax.Array:
        return x @ get(f"{name}/w", (x.shape[-1], width)) + get(f"{name}/b", (width,))

    def autoencoder(get: Any, images: jax.Array, key: jax.Array) -> Any:
        x = jax.nn.relu(linear(get, "encoder/hidden", images.reshape(len(images), -1), 512))
        mean, deviation = linear(get, "encoder/mean", x, 16), jnp.exp(linear(get, "encoder/log_deviation", x, 16))
        z = mean + deviation * jax.random.normal(key, mean.shape)
        logits = linear(get, "decoder/logits", jax.nn.relu(linear(get, "decoder/hidden", z, 512)), 784)
        return mean, deviation, logits.reshape(images.shape)

    net, optimizer = _Transformed(autoencoder), optax.adam(1e-3)

    def start(images: jax.Array) -> _TrainingState:
        params = net.init(jax.random.key(0), images, jax.random.key(1))
        return _TrainingState(params, params, optimizer.init(params), jax.random.PRNGKey(2))

    def loss_fn(params: Any, images: jax.Array, key: jax.Array) -> jax.Array:
        mean, deviation, logits = net.apply(params, images, key)
        likelihood = -optax.sigmoid_binary_cross_entropy(logits, images).sum((1, 2, 3))
        divergence = 0.5 * jnp.sum(mean**2 + deviation**2 - 1 - 2 * jnp.log(deviation), -1)
        return jnp.mean(divergence - likelihood)

    def update(state: _TrainingState, images: jax.Array) -> _TrainingState:
        key, used = jax.random.split(state.key)
        grads = jax.grad(loss_fn)(state.params, images, used)
        updates, opt_state = optimizer.update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        return _TrainingState(params, optax.incremental_update(params, state.average, 0.001), opt_state, key)

    images = jax.ShapeDtypeStruct((1000, 28, 28, 1), jnp.float32)
    return Program(update, (jax.eval_shape(start, images), images))


# -- what comes with JAX ------------------------------------------------------------------------------------------------------


def stax_epoch() -> Program:
    """The first examples of JAX: `stax` and its optimizers, with all images on the device and an epoch as one `fori_loop`."""
    init, predict = stax.serial(
        stax.Conv(32, (3, 3), padding="SAME"), stax.BatchNorm(), stax.Relu, stax.MaxPool((2, 2), strides=(2, 2)),
        stax.FanOut(2), stax.parallel(stax.Conv(32, (3, 3), padding="SAME"), stax.Identity), stax.FanInSum, stax.Relu,
        stax.Flatten, stax.Dense(256), stax.Relu, stax.Dense(10), stax.LogSoftmax,
    )  # fmt: skip
    opt_init, opt_update, get_params = optimizers.momentum(0.001, mass=0.9)
    batch_size, batches = 64, 8

    def loss(params: Any, images: jax.Array, targets: jax.Array) -> jax.Array:
        return -jnp.mean(jnp.sum(predict(params, images) * targets, axis=1))

    def run_epoch(opt_state: Any, images: jax.Array, targets: jax.Array) -> Any:
        def body(i: Any, opt_state: Any) -> Any:
            batch = [lax.dynamic_slice_in_dim(x, i * batch_size, batch_size) for x in (images, targets)]
            return opt_update(i, jax.grad(loss)(get_params(opt_state), *batch), opt_state)

        return lax.fori_loop(0, batches, body, opt_state)

    opt_state = jax.eval_shape(lambda key: opt_init(init(key, (-1, 32, 32, 3))[1]), jax.random.PRNGKey(0))
    count = batch_size * batches
    return Program(run_epoch, (opt_state, normal(0, count, 32, 32, 3), jax.nn.one_hot(integers(0, 10, count), 10)))


# -- Optax --------------------------------------------------------------------------------------------------------------------


def optax_adversarial() -> Program:
    """Optax's examples of adversarial training and of lookahead: an attack in a loop, and two copies of the parameters."""
    net = _Digits()
    optimizer = optax.lookahead(optax.adam(1e-3), sync_period=5, slow_step_size=0.5)

    def start() -> Any:
        params = optax.LookaheadParams.init_synced(net.init(jax.random.key(0), jnp.ones((1, 28, 28, 1))))
        return params, optimizer.init(params)

    def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(jnp.asarray(net.apply(params, images)), labels) + 1e-4 * optax.tree.norm(params, squared=True)

    def attack(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        def ascend(_: Any, moved: jax.Array) -> jax.Array:
            moved = moved + 0.01 * jnp.sign(jax.grad(loss_fn, argnums=1)(params, moved, labels))
            return jnp.clip(jnp.clip(moved, images - 0.1, images + 0.1), 0, 1)

        return lax.fori_loop(0, 10, ascend, images)

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        images, labels = batch
        moved = attack(params.fast, images, labels)
        loss, grads = jax.value_and_grad(loss_fn)(params.fast, moved, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params, opt_state = jax.eval_shape(start)
    return Program(train_step, (params, opt_state, (normal(0, 128, 28, 28, 1), integers(0, 10, 128))))


# -- reinforcement learning -----------------------------------------------------------------------------------------------------


class _ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        policy, value = x, x
        for _ in range(2):
            policy, value = nn.tanh(nn.Dense(64)(policy)), nn.tanh(nn.Dense(64)(value))
        return nn.Dense(3)(policy), nn.Dense(1)(value)[..., 0]


class _Transition(NamedTuple):
    place: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array


def purejaxrl_ppo() -> Program:
    """PureJaxRL's proximal policy optimization: the whole training is one function of a random key, with scans in scans."""
    environments, steps, minibatches, epochs, updates = 256, 64, 4, 2, 3
    net = _ActorCritic()
    apply: Callable[..., Any] = net.apply

    def advance(place: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A pendulum that is pushed to one side, to the other, or not at all."""
        angle, speed = place
        speed = jnp.clip(speed + 0.05 * (15 * jnp.sin(angle) + 3.0 * (action - 1)), -8, 8)
        angle = angle + 0.05 * speed
        return jnp.stack([angle, speed]), jnp.cos(angle) - 0.1 * speed**2

    def seen(place: jax.Array) -> jax.Array:
        return jnp.stack([jnp.cos(place[..., 0]), jnp.sin(place[..., 0]), place[..., 1]], -1)

    def log_prob_of(logits: jax.Array, action: jax.Array) -> jax.Array:
        return jnp.take_along_axis(nn.log_softmax(logits), action[..., None], -1)[..., 0]

    def loss_fn(params: Any, taken: _Transition, gain: jax.Array, target: jax.Array) -> Any:
        logits, value = apply(params, seen(taken.place))
        clipped = taken.value + jnp.clip(value - taken.value, -0.2, 0.2)
        value_loss = 0.5 * jnp.maximum((value - target) ** 2, (clipped - target) ** 2).mean()
        ratio = jnp.exp(log_prob_of(logits, taken.action) - taken.log_prob)
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        actor_loss = -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()
        entropy = -jnp.sum(nn.softmax(logits) * nn.log_softmax(logits), -1).mean()
        return actor_loss + 0.5 * value_loss - 0.01 * entropy, (value_loss, actor_loss, entropy)

    def train(key: jax.Array) -> Any:
        key, for_params, for_places = jax.random.split(key, 3)
        optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4, eps=1e-5))
        state = TrainState.create(apply_fn=apply, params=net.init(for_params, jnp.zeros(3)), tx=optimizer)
        places = jax.random.uniform(for_places, (environments, 2), minval=-1.0)

        def env_step(carry: Any, _: Any) -> Any:
            state, places, key = carry
            key, used = jax.random.split(key)
            logits, value = state.apply_fn(state.params, seen(places))
            action = jax.random.categorical(used, logits)
            following, reward = jax.vmap(advance)(places, action)
            return (state, following, key), _Transition(places, action, log_prob_of(logits, action), value, reward)

        def gain_of(carry: Any, taken: _Transition) -> Any:
            gain, following = carry
            gain = taken.reward + 0.99 * following - taken.value + 0.99 * 0.95 * gain
            return (gain, taken.value), gain

        def update_minibatch(state: TrainState, batch: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, *batch)
            return state.apply_gradients(grads=grads), loss

        def update_epoch(carry: Any, _: Any) -> Any:
            state, batch, key = carry
            key, used = jax.random.split(key)
            order = jax.random.permutation(used, environments * steps)
            shuffled = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[order], batch)
            parts = jax.tree.map(lambda x: x.reshape(minibatches, -1, *x.shape[1:]), shuffled)
            state, losses = lax.scan(update_minibatch, state, parts)
            return (state, batch, key), losses

        def update_step(carry: Any, _: Any) -> Any:
            (state, places, key), taken = lax.scan(env_step, carry, None, steps)
            _, last = state.apply_fn(state.params, seen(places))
            _, gains = lax.scan(gain_of, (jnp.zeros_like(last), last), taken, reverse=True, unroll=16)
            batch = taken, gains, gains + taken.value
            (state, _, key), losses = lax.scan(update_epoch, (state, batch, key), None, epochs)
            return (state, places, key), (taken.reward.mean(), losses)

        carry, metrics = lax.scan(update_step, (state, places, key), None, updates)
        return {"runner_state": carry, "metrics": metrics}

    return Program(train, (jax.random.PRNGKey(0),))


# -- Keras --------------------------------------------------------------------------------------------------------------------


def keras_mobilenet() -> Program:
    """Keras' guide to custom training loops in JAX, with its own MobileNetV2: the state is four lists of arrays."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras  # reads the variable above when it is imported

    mobilenet: Any = keras.applications.MobileNetV2
    model = mobilenet(input_shape=(96, 96, 3), alpha=0.5, weights=None, classes=10)
    optimizer: Any = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    metric: Any = keras.metrics.SparseCategoricalAccuracy()
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    def compute_loss(trainable: Any, others: Any, x: jax.Array, y: jax.Array) -> Any:
        predicted, others = model.stateless_call(trainable, others, x, training=True)
        return loss_of(y, predicted), (predicted, others)

    def train_step(state: Any, data: Any) -> Any:
        trainable, others, slots, counts = state
        (loss, (predicted, others)), grads = jax.value_and_grad(compute_loss, has_aux=True)(trainable, others, *data)
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        counts = metric.stateless_update_state(counts, data[1], predicted)
        return loss, (trainable, others, slots, counts)

    several = model.trainable_variables, model.non_trainable_variables, optimizer.variables, metric.variables
    state = tuple([jnp.asarray(variable.value) for variable in variables] for variables in several)
    return Program(train_step, (state, (normal(0, 8, 96, 96, 3), integers(0, 10, 8))))


PROGRAMS: Mapping[str, Callable[[], Program]] = {
    "flax_mnist": flax_mnist,
    "flax_imagenet": flax_imagenet,
    "nanogpt": nanogpt,
    "nnx_functional": nnx_functional,
    "equinox_neural_ode": equinox_neural_ode,
    "haiku_vae": haiku_vae,
    "stax_epoch": stax_epoch,
    "optax_adversarial": optax_adversarial,
    "purejaxrl_ppo": purejaxrl_ppo,
    "keras_mobilenet": keras_mobilenet,
}
