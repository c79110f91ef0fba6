"""Workloads of reinforcement learning; the environment is a part of the step where there is one."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax

from benchmarks.workloads.workload import Workload, applied, normal, params_of

_OBSERVED, _ACTIONS, _ENVIRONMENTS = 16, 4, 64


class _Policy(nn.Module):
    """The logarithm of each action's chance, and the value."""

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.tanh(nn.Dense(128)(nn.tanh(nn.Dense(128)(x))))
        return nn.log_softmax(nn.Dense(_ACTIONS)(x)), nn.Dense(1)(x)[..., 0]


def _moved(world: jax.Array, place: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The next place, and the reward."""
    place = jnp.tanh(0.9 * place + world[action])
    return place, -jnp.sum(place**2, -1)


def _acted(net: _Policy, params: Any, world: jax.Array, place: jax.Array, key: jax.Array, steps: int) -> tuple[jax.Array, Any]:
    """Actions by chance: the last place; and (step, environment, ...) places, actions, their chances, values and rewards."""

    def act(place: jax.Array, key: jax.Array) -> Any:
        chances, value = applied(net, params, place)
        action = jax.random.categorical(key, chances)
        chance = jnp.take_along_axis(chances, action[:, None], -1)[:, 0]
        following, reward = _moved(world, place, action)
        return following, (place, action, chance, value, reward)

    return lax.scan(act, place, jax.random.split(key, steps))


def rollout() -> Workload:
    """Actions in 64 environments and the gradient of their chances, through the loop (Williams, 1992)."""
    net, optimizer = _Policy(), optax.adam(1e-3)

    def init() -> Any:
        params = params_of(net, normal(0, 1, _OBSERVED))
        return params, optimizer.init(params), jax.random.key(1)

    def step(state: Any, world: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state, key = state
        key, used = jax.random.split(key)

        def loss(params: Any) -> jax.Array:
            _, (_, _, chances, values, rewards) = _acted(net, params, world, jnp.zeros((_ENVIRONMENTS, _OBSERVED)), used, 64)
            returns = jnp.cumsum(rewards[::-1], 0)[::-1] / 64
            return jnp.mean((returns - values) ** 2) - jnp.mean(lax.stop_gradient(returns - values) * chances)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return (optax.apply_updates(params, updates), opt_state, key), value

    return Workload(step, init, lambda number: normal(number, _ACTIONS, _OBSERVED, scale=0.3))


def proximal() -> Workload:
    """Actions, then four epochs of four mini-batches in two loops, all in one step (Schulman et al., 2017)."""
    net, optimizer = _Policy(), optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4))

    def init() -> Any:
        params = params_of(net, normal(0, 1, _OBSERVED))
        return params, optimizer.init(params), jnp.zeros((_ENVIRONMENTS, _OBSERVED)), jax.random.key(1)

    def loss(params: Any, batch: Any) -> jax.Array:
        places, actions, before, advantages, returns = batch
        chances, values = applied(net, params, places)
        ratio = jnp.exp(jnp.take_along_axis(chances, actions[:, None], -1)[:, 0] - before)
        gained = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        entropy = -jnp.mean(jnp.sum(jnp.exp(chances) * chances, -1))
        return -jnp.mean(gained) + 0.5 * jnp.mean((values - returns) ** 2) - 0.01 * entropy

    def step(state: Any, world: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state, place, key = state
        key, for_actions, for_order = jax.random.split(key, 3)
        place, (places, actions, chances, values, rewards) = _acted(net, params, world, place, for_actions, 64)
        last = applied(net, params, place)[1]

        def advantage(following: Any, now: Any) -> Any:
            (later, next_value), (value, reward) = following, now
            later = reward + 0.99 * next_value - value + 0.99 * 0.95 * later
            return (later, value), later

        _, advantages = lax.scan(advantage, (jnp.zeros(_ENVIRONMENTS), last), (values, rewards), reverse=True)
        rows = (places, actions, chances, advantages, advantages + values)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)

        def update(carry: Any, batch: Any) -> Any:
            params, opt_state = carry
            value, gradients = jax.value_and_grad(loss)(params, batch)
            updates, opt_state = optimizer.update(gradients, opt_state)
            return (optax.apply_updates(params, updates), opt_state), value

        def epoch(carry: Any, key: jax.Array) -> Any:
            order = jax.random.permutation(key, 64 * _ENVIRONMENTS).reshape(4, -1)
            return lax.scan(update, carry, jax.tree.map(lambda x: x[order], flat))

        (params, opt_state), values = lax.scan(epoch, (params, opt_state), jax.random.split(for_order, 4))
        return (params, opt_state, place, key), jnp.mean(values)

    return Workload(step, init, lambda number: normal(number, _ACTIONS, _OBSERVED, scale=0.3))


def replay() -> Workload:
    """Places are stored in a ring, and values learned from a draw of it (Mnih et al., 2015)."""
    net, optimizer, ring = _Policy(), optax.adam(1e-3), 16384

    def init() -> Any:
        params = params_of(net, normal(0, 1, _OBSERVED))
        stored = {
            "place": jnp.zeros((ring, _OBSERVED)),
            "following": jnp.zeros((ring, _OBSERVED)),
            "action": jnp.zeros(ring, jnp.int32),
            "reward": jnp.zeros(ring),
        }
        return params, jax.tree.map(jnp.copy, params), optimizer.init(params), stored, jnp.int32(0), jax.random.key(1)

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, target, opt_state, stored, count, key = state
        key, used, for_action = jax.random.split(key, 3)
        world, place = batch
        action = jax.random.randint(for_action, (len(place),), 0, _ACTIONS)
        following, reward = _moved(world, place, action)
        new = {"place": place, "following": following, "action": action, "reward": reward}
        begin = (count * len(place)) % ring
        stored = jax.tree.map(lambda a, b: lax.dynamic_update_slice_in_dim(a, b, begin, 0), stored, new)
        drawn = jax.tree.map(lambda a: a[jax.random.randint(used, (4096,), 0, ring)], stored)
        best = jnp.max(applied(net, target, drawn["following"])[0], -1)

        def loss(params: Any) -> jax.Array:
            values = jnp.take_along_axis(applied(net, params, drawn["place"])[0], drawn["action"][:, None], -1)[:, 0]
            return optax.losses.huber_loss(values, drawn["reward"] + 0.99 * best).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(gradients, opt_state)
        params = optax.apply_updates(params, updates)
        target = optax.periodic_update(params, target, count, 10)
        return (params, target, opt_state, stored, count + 1, key), value

    return Workload(
        step,
        init,
        lambda number: (normal(number, _ACTIONS, _OBSERVED, scale=0.3), normal(number, _ENVIRONMENTS, _OBSERVED)),
    )


REINFORCEMENT: Mapping[str, Callable[[], Workload]] = {"rollout": rollout, "proximal": proximal, "replay": replay}
