"""Exports for JAX beside JAX on one device: two steps of SGD with momentum, and the gradients of the first, on four devices
of the host. Each parameter and its optimizer state must lie on the devices where the plan has them.

    with_jax.py ALTIPLANO FOLDER [MODEL]...
"""

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
# The partitioner's advice about layouts between two ops.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from plans import PLANS, blocks, difference, exported, planned

# Of losses, gradients and parameters, as the largest difference over the norm of the tensor.
TOLERANCE = 1e-5
# AdamW would bring the rounding of gradients that vanish to full size.
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
HIDDEN, HEADS, VOCABULARY, SEQUENCE, BATCH = 32, 4, 64, 16, 8


def norm(x, p):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * p["g"] + p["b"]


def linear(x, p):
    return x @ p["w"] + p["b"]


def attention(x, p):
    batch, sequence, hidden = x.shape
    thirds = jnp.split(linear(x, p["qkv"]), 3, axis=-1)
    q, k, v = (third.reshape(batch, sequence, HEADS, hidden // HEADS) for third in thirds)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (hidden // HEADS) ** 0.5
    seen = jnp.tril(jnp.ones((sequence, sequence), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
    return linear(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, sequence, hidden), p["proj"])


def block(x, p):
    x = x + attention(norm(x, p["ln1"]), p)
    return x + linear(jax.nn.gelu(linear(norm(x, p["ln2"]), p["fc"])), p["out"])


def cross_entropy(logits, labels):
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()


def gpt(params, tokens, labels):
    x = params["wte"][tokens] + params["wpe"]
    for p in params["h"]:
        x = block(x, p)
    return cross_entropy(norm(x, params["ln_f"]) @ params["wte"].T, labels)


def scanned(params, tokens, labels):
    """The same with its layers in a scan, as stacked arrays."""
    x = params["wte"][tokens] + params["wpe"]
    x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, params["h"])
    return cross_entropy(norm(x, params["ln_f"]) @ params["wte"].T, labels)


def mlp(weights, bias, batch):
    """Parameters in two arguments, and inputs in one."""
    x = jnp.tanh(batch["x"] @ weights["first"] + bias["first"])
    return ((x @ weights["second"] + bias["second"] - batch["y"]) ** 2).mean()


def images(params, images, labels):
    x = images
    for p in params["convolutions"]:
        x = jax.lax.conv_general_dilated(x, p["w"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + p["b"])
    return cross_entropy(linear(x.mean((1, 2)), params["head"]), labels)


def cases():
    random = np.random.default_rng(1)

    def normal(*shape):
        return (random.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)

    def dense(inputs, outputs):
        return {"w": normal(inputs, outputs), "b": 0.1 * normal(outputs)}

    def gain():
        return {"g": 1 + 0.1 * normal(HIDDEN), "b": 0.1 * normal(HIDDEN)}

    def layer():
        wide = {"qkv": dense(HIDDEN, 3 * HIDDEN), "proj": dense(HIDDEN, HIDDEN)}
        return wide | {"fc": dense(HIDDEN, 4 * HIDDEN), "out": dense(4 * HIDDEN, HIDDEN), "ln1": gain(), "ln2": gain()}

    layers = [layer(), layer()]
    params = {"h": layers, "wte": normal(VOCABULARY, HIDDEN), "wpe": normal(SEQUENCE, HIDDEN), "ln_f": gain()}
    ids = [random.integers(0, VOCABULARY, (BATCH, SEQUENCE)).astype(np.int32) for _ in range(2)]
    text = {"tokens": ids[0], "labels": ids[1]}
    yield gpt, {"params": params}, text
    yield scanned, {"params": params | {"h": jax.tree.map(lambda *rows: np.stack(rows), *layers)}}, text
    arguments = {
        "weights": {"first": normal(16, 64), "second": normal(64, 8)},
        "bias": {"first": normal(64), "second": normal(8)},
    }
    yield mlp, arguments, {"batch": {"x": normal(BATCH, 16), "y": normal(BATCH, 8)}}
    kernels = [{"w": normal(3, 3, 4, 16), "b": normal(16)}, {"w": normal(3, 3, 16, 32), "b": normal(32)}]
    params = {"convolutions": kernels, "head": dense(32, 8)}
    labels = random.integers(0, 8, BATCH).astype(np.int32)
    yield images, {"params": params}, {"images": normal(BATCH, 16, 16, 4), "labels": labels}


def alone(loss, arguments, inputs, frozen=()):
    """Losses, gradients of the first step, and parameters after two steps on one device. `frozen` parameters stay."""
    whole = lambda arguments: loss(**arguments, **inputs)
    state, losses, first = OPTIMIZER.init(arguments), [], None
    for _ in range(2):
        value, gradients = jax.jit(jax.value_and_grad(whole))(arguments)
        first = first or gradients
        updates, state = OPTIMIZER.update(gradients, state, arguments)
        kept = [name in frozen for name in named(arguments)]
        kept = jax.tree.unflatten(jax.tree.structure(arguments), kept)
        arguments = jax.tree.map(lambda keep, p, u: p if keep else p + u, kept, arguments, updates)
        losses.append(value)
    return losses, first, arguments


def worst(found, expected):
    return max(map(difference, jax.tree.leaves(found), jax.tree.leaves(expected)))


def misplaced(array, name, sharding, plan):
    """Why an array does not lie where the plan has it, if it does not."""
    stage = plan["stages"][0]
    for shard in array.addressable_shards:
        position = stage["devices"].index(shard.device.id)
        expected = blocks(sharding, stage["mesh"]["axes"], position)
        # A stack of layers has a dimension in front.
        expected = [(0, n) for n in array.shape[: array.ndim - len(expected)]] + expected
        found = [(s.start or 0, n if s.stop is None else s.stop) for s, n in zip(shard.index, array.shape)]
        if found != expected:
            return f"{name}: device {position} holds {found}, the plan has {expected}"
    return None


def named(tree):
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {str(path[0].key) + jax.tree_util.keystr(path[1:]): x for path, x in flat}


def check(loss, arguments, inputs, expected, module, plan):
    """The largest difference from one device, the number of arrays whose places were read, and the misplaced ones."""
    losses, gradients, after = expected
    mesh = module.mesh()
    own = (lambda tree: tree) if len(arguments) > 1 else (lambda tree: tree["params"])
    params = module.shard_parameters(own(arguments), mesh)
    state = module.init_state(OPTIMIZER, params, mesh)
    sharded = module.shard_inputs(inputs, mesh)
    first, found = jax.jit(module.loss_and_gradients(loss, mesh))(params, sharded)
    errors = [difference(first, losses[0]), worst(found, own(gradients))]
    step = module.train_step(loss, OPTIMIZER, mesh, params, state, sharded)
    for value_alone in losses:
        params, state, value = step(params, state, sharded)
        errors.append(difference(value, value_alone))
    errors.append(worst(params, own(after)))

    storage, problems, checked = plan["stages"][0]["parameters"], [], 0
    whole = params if len(arguments) > 1 else {"params": params}
    traces = state[0].trace if len(arguments) > 1 else {"params": state[0].trace}
    for slot, tree in (("parameter", whole), ("state", traces)):
        for name, array in named(tree).items():
            known = storage.get(name) or storage[f"{name}[0]"]
            problems.append(misplaced(array, f"{slot} {name}", known[slot], plan))
            checked += 1
    problems = [problem for problem in problems if problem]
    return max(errors), checked, problems


def main():
    altiplano, folder = sys.argv[1], Path(sys.argv[2])
    failed, done, rounded, largest, arrays = False, 0, 0, 0.0, 0
    for loss, arguments, inputs in cases():
        if sys.argv[3:] and loss.__name__ not in sys.argv[3:]:
            continue
        model = folder / f"{loss.__name__}.mlir"
        expected = alone(loss, arguments, inputs)
        model.write_text(jax.jit(loss).lower(**arguments, **inputs).as_text(debug_info=True))
        plans = PLANS | ({"frozen": ["--dp", "2", "--tp", "2", "--freeze", "bias"]} if loss is mlp else {})
        for name, options in plans.items():
            file = folder / f"{loss.__name__}-{name}.json"
            trained = ["--params", ",".join(arguments)]
            plan, why = planned(altiplano, model, options + trained, file)
            if plan is None:
                print(f"no plan      {loss.__name__} {name}: {why}")
                continue
            module, said = exported(altiplano, file, "jax", file.with_suffix(".py"))
            if (name == "frozen") != bool(module.FROZEN):
                sys.exit(f"FAILED       {loss.__name__} {name}: the module keeps {module.FROZEN}")
            reference = alone(loss, arguments, inputs, module.FROZEN) if module.FROZEN else expected
            error, checked, problems = check(loss, arguments, inputs, reference, module, plan)
            done, arrays, largest = done + 1, arrays + checked, max(largest, error)
            rounded += "contiguous blocks" in said
            if problems or not error <= TOLERANCE:
                failed = True
                print(f"FAILED       {loss.__name__} {name}: off by {error:.1e}; {'; '.join(problems[:3])}")
    if done < 20 and not sys.argv[3:]:
        sys.exit(f"FAILED       only {done} plans were exported for JAX")
    if rounded == 0 and not sys.argv[3:]:
        sys.exit("FAILED       no plan splits thirds of a dimension, so that no rounding was tried")
    if failed:
        sys.exit(1)
    print(f"ok           {done} plans exported for JAX, {rounded} of them rounded: numbers within {largest:.1e} of one device")
    print(f"ok           {arrays} parameters and states of their optimizers are where the plans have them")


if __name__ == "__main__":
    main()
