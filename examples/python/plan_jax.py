"""Plans a JAX loss for four devices of this machine, and trains with the plan."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import altiplano


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)


class Sgd:
    """Any optimizer with `init` and `update` will do, such as those of optax."""

    def init(self, params):
        return ()

    def update(self, gradients, state, params=None):
        return jax.tree.map(lambda g: -0.1 * g, gradients), state


keys = jax.random.split(jax.random.key(0), 4)
params = {"up": jax.random.normal(keys[0], (32, 128)) / 6, "down": jax.random.normal(keys[1], (128, 8)) / 11}
batch = {"x": jax.random.normal(keys[2], (64, 32)), "y": jax.random.normal(keys[3], (64, 8))}

plan = altiplano.plan(loss, {"params": params, **batch}, cluster="local:4", dp=2, tp=2, optimizer="sgd")
print(plan)
step, params, state = plan.jit(Sgd(), params, batch)
for _ in range(5):
    params, state, value = step(params, state, batch)
    print(f"loss {float(value):.6f}")
print(params["up"].sharding)
