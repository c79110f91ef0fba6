"""Calls on a second device. One device, whichever it is, works; two that are not a mesh are refused as by `jax.jit`.

Calls on a mesh of devices are tested in `tests/sharded`.

The devices are two CPU devices of a process of its own, since a process settles how many it has when JAX starts.
"""

import os
import subprocess
import sys
import textwrap

SCRIPT = textwrap.dedent(
    """
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import SingleDeviceSharding
    import tensile_jax as tensile
    from tests.conformance.observation import expect_same, see, segments, whole

    first, second = jax.devices()

    def square():
        return jnp.arange(16.0).reshape(4, 4) / 16

    def step(a, b):
        return jnp.tanh(a @ b) @ b, a + 1

    def by_argument(jit):
        f = jit(step, donate_argnums=0)
        there = lambda: jax.device_put(square(), second)
        return [see(f, there(), there()), see(f, there(), square()), see(f, square(), square()), see(f, square(), there()),
                see(f, jax.device_put(square(), first), square())]

    def by_default(jit):
        f = jit(step)
        seen = [see(f, square(), square())]
        with jax.default_device(second):
            seen += [see(f, square(), square()), see(f, np.ones((4, 4), np.float32), 1.0 * square())]
        with jax.default_device("cpu"):
            seen.append(see(f, square(), square()))
        return [*seen, see(f, square(), square())]

    def by_option(jit):
        on_second = SingleDeviceSharding(second)
        return [see(jit(step, in_shardings=on_second), square(), square()),
                see(jit(step, out_shardings=on_second), square(), square())]

    def by_the_step_itself(jit):
        return [see(jit(lambda a: jax.device_put(a @ a, SingleDeviceSharding(second)) + 1), square())]

    for jit in (segments, whole):
        for scenario in (by_argument, by_default, by_option, by_the_step_itself):
            expect_same(scenario, jit)

    for jit in (segments, whole):
        arguments = jax.device_put(square(), first), jax.device_put(square(), second)
        try:
            jit(step, donate_argnums=0)(*arguments)
        except ValueError as error:  # jit's own, of arguments on two devices
            assert "incompatible devices" in str(error), error
        else:
            raise AssertionError("two devices were not refused")
        assert not any(x.is_deleted() for x in arguments)
    print("all the same")
    """
)


def test_calls_on_a_second_device_look_the_same_as_of_jit() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("all the same"), done.stderr
