"""Functions of JAX: one call plans them, and plans train on devices of the host as one device does."""

import os
import unittest

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
# Threads of a loaded machine may meet late in a collective, which XLA by default takes for a deadlock after 40 s.
os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import altiplano

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
except ImportError:
    raise unittest.SkipTest("jax is not installed")

HIDDEN, VOCABULARY, SEQUENCE, BATCH, EXPERTS = 32, 64, 16, 8, 4


def cross_entropy(logits, labels):
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()


def language_model(params, tokens, labels):
    x = params["embed"][tokens]
    for layer in params["layers"]:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return cross_entropy(x @ params["embed"].T, labels)


def experts(params, tokens, labels):
    x = params["embed"][tokens]
    gates = jax.nn.softmax(x @ params["router"])
    hidden = jax.nn.gelu(jnp.einsum("bsh,ehf->bsef", x, params["up"]))
    x = x + jnp.einsum("bsef,efh,bse->bsh", hidden, params["down"], gates)
    return cross_entropy(x @ params["embed"].T, labels)


def u_net(params, images, targets):
    conv = lambda x, w, stride=1: jax.lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    wide = jax.nn.relu(conv(images, params["in"]))
    deep = jax.nn.relu(conv(wide, params["down"], 2))
    back = jnp.repeat(jnp.repeat(deep, 2, axis=1), 2, axis=2)
    out = conv(jnp.concatenate([wide, conv(back, params["up"])], axis=-1), params["out"])
    return ((out - targets) ** 2).mean()


def random_arrays(shapes):
    random = np.random.default_rng(1)
    draw = lambda shape: (random.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)
    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def text():
    random = np.random.default_rng(2)
    ids = lambda: random.integers(0, VOCABULARY, (BATCH, SEQUENCE)).astype(np.int32)
    return {"tokens": ids(), "labels": ids()}


LAYER = {"up": (HIDDEN, 4 * HIDDEN), "down": (4 * HIDDEN, HIDDEN)}
MODEL = {"embed": (VOCABULARY, HIDDEN), "layers": [LAYER, LAYER]}
MIXTURE = {
    "embed": (VOCABULARY, HIDDEN),
    "router": (HIDDEN, EXPERTS),
    "up": (EXPERTS, HIDDEN, 4 * HIDDEN),
    "down": (EXPERTS, 4 * HIDDEN, HIDDEN),
}
CONVOLUTIONS = {"in": (3, 3, 3, 8), "down": (3, 3, 8, 16), "up": (3, 3, 16, 8), "out": (3, 3, 16, 3)}


class Sgd:
    """As optax.sgd, which the tests do without."""

    def init(self, params):
        return ()

    def update(self, gradients, state, params=None):
        return jax.tree.map(lambda g: -0.1 * g, gradients), state


class Planning(unittest.TestCase):
    def plans(self, loss, *inputs):
        plan = altiplano.plan(loss, inputs, cluster="dgx-a100:1", global_batch=64, prefer="fastest")
        self.assertTrue(plan.fits)
        self.assertEqual(plan.global_batch, 64)
        self.assertEqual(plan.model, loss.__name__)

    def test_models(self):
        batch = text()
        self.plans(language_model, random_arrays(MODEL), batch["tokens"], batch["labels"])
        self.plans(experts, random_arrays(MIXTURE), batch["tokens"], batch["labels"])
        images = jax.ShapeDtypeStruct((BATCH, 16, 16, 3), jnp.float32)
        self.plans(u_net, random_arrays(CONVOLUTIONS), images, images)

    def test_a_transformer_of_flax(self):
        try:
            import flax.linen as nn
        except ImportError:
            self.skipTest("flax is not installed")

        class Transformer(nn.Module):
            @nn.compact
            def __call__(self, tokens):
                x = nn.Embed(VOCABULARY, HIDDEN)(tokens)
                for _ in range(2):
                    x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
                    x = x + nn.Dense(HIDDEN)(nn.gelu(nn.Dense(4 * HIDDEN)(nn.LayerNorm()(x))))
                return nn.Dense(VOCABULARY)(x)

        module, batch = Transformer(), text()
        params = module.init(jax.random.key(0), batch["tokens"])

        def flax_transformer(params, tokens, labels):
            return cross_entropy(module.apply(params, tokens), labels)

        self.plans(flax_transformer, params, batch["tokens"], batch["labels"])


class Training(unittest.TestCase):
    def test_a_planned_step_computes_what_one_device_does(self):
        params, batch, optimizer = random_arrays(MODEL), text(), Sgd()
        expected, alone = [], params
        for _ in range(2):
            value, gradients = jax.value_and_grad(language_model)(alone, **batch)
            alone = jax.tree.map(lambda p, g: p - 0.1 * g, alone, gradients)
            expected.append(value)
        example = {"params": params, **batch}
        for options in ({"dp": 2, "tp": 2}, {"tp": 4}, {"dp": 4, "zero": 3, "num_microbatches": 2}):
            plan = altiplano.plan(language_model, example, cluster="local:4", pp=1, optimizer="sgd", pad="none", **options)
            placed = plan.shardings(params)
            self.assertEqual(jax.tree.structure(placed), jax.tree.structure(params))
            step, here, state = plan.jit(optimizer, params, batch)
            self.assertEqual(here["embed"].sharding, placed["embed"])
            for value in expected:
                here, state, found = step(here, state, batch)
                self.assertAlmostEqual(float(found), float(value), places=5)


class Refusals(unittest.TestCase):
    def refused(self, function, inputs, place):
        with self.assertRaises(altiplano.ModelError) as caught:
            altiplano.plan(function, inputs, cluster="local:2")
        self.assertTrue(caught.exception.remedies)
        self.assertIn(place, caught.exception.place)

    def test_each_is_one_exception_with_place_and_remedy(self):
        x = np.zeros((8, 16), np.float32)
        self.refused(lambda w, x: float((x @ w).sum()), (x.T, x), "test_jax.py")
        self.refused(lambda w, x: (x @ w).mean(), (x, x), "test_jax.py")
        self.refused(lambda w, x: (x @ w).mean(), None, "example_inputs")
        self.refused(lambda w, x: (x @ w).mean(), (x.T, "text"), "model")
        self.refused(lambda w, x: (x @ w).mean(), (x.T,), "model")
        self.refused(lambda w, x: x @ w, (x.T, x), "model")
        self.refused(lambda w, x: (x @ w).mean() if x.sum() > 0 else w.mean(), (x.T, x), "test_jax.py")
        self.refused(lambda w, x: (x @ w).mean(), (x.T, x[:1]), "example_inputs[1]")
        self.refused(lambda w, x: (x @ w).mean(), {"w": x.T, "x": x[:1]}, "example_inputs['x']")

    def test_unsupported_ops_are_named_by_the_line_of_the_function(self):
        x = np.zeros((8, 16), np.float32)

        def decomposed(w, x):
            return jnp.linalg.svd(x @ w)[1].mean()

        self.refused(decomposed, (x.T, x), "test_jax.py")
        with self.assertRaises(altiplano.ModelError) as caught:
            altiplano.plan(decomposed, (x.T, x), cluster="local:2")
        self.assertIn("custom_call", caught.exception.message)
        self.assertNotIn("altiplano-", caught.exception.message)


if __name__ == "__main__":
    unittest.main()
