"""Exports for JAX beside JAX on one device: two steps of SGD with momentum, and the gradients of the first, on devices of
the host. Each parameter and its optimizer state must lie on the devices where the plan has them.

    with_jax.py ALTIPLANO FOLDER [MODEL,.. [PLAN]...]
"""

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# Threads of a loaded machine may meet late in a collective, which XLA by default takes for a deadlock after 40 s.
os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
# Most of the time is the compiler's.
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["JAX_PLATFORMS"] = "cpu"
# The partitioner's advice about layouts between two ops.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from plans import PIPELINES, PLANS, blocks, difference, exported, planned

# Tolerance of losses, gradients and parameters, as the largest difference over the norm of the tensor.
TOLERANCE = 1e-5
# AdamW would bring the rounding of gradients that vanish to full size.
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
HIDDEN, HEADS, VOCABULARY, SEQUENCE, BATCH, EXPERTS, PATCH = 32, 4, 64, 16, 8, 4, 4


def norm(x, p):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * p["g"] + p["b"]


def linear(x, p):
    return x @ p["w"] + p["b"]


def heads(x):
    return x.reshape(*x.shape[:2], -1, HIDDEN // HEADS)


def attend(q, k, v, causal):
    """Attention of heads in the third dimension, without them in the result."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (HIDDEN // HEADS) ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v).reshape(*q.shape[:2], HIDDEN)


def attention(x, p, causal):
    thirds = jnp.split(linear(x, p["qkv"]), 3, axis=-1)
    return linear(attend(*map(heads, thirds), causal), p["proj"])


def block(x, p, causal=True, feed=None):
    x = x + attention(norm(x, p["ln1"]), p, causal)
    feed = feed or (lambda x: linear(jax.nn.gelu(linear(x, p["fc"])), p["out"]))
    return x + feed(norm(x, p["ln2"]))


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


def rms(x, gain):
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * gain


def rotated(x):
    angles = np.arange(SEQUENCE)[:, None] / 100.0 ** (np.arange(0, x.shape[-1], 2) / x.shape[-1])
    cosine, sine = (np.float32(part)[:, None, :] for part in (np.cos(angles), np.sin(angles)))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)


def llama(params, tokens, labels):
    """Grouped queries, rotary positions and gated layers, without ties."""
    x = params["embed"][tokens]
    for p in params["layers"]:
        h = rms(x, p["norm1"])
        q, k, v = rotated(heads(h @ p["q"])), rotated(heads(h @ p["k"])), heads(h @ p["v"])
        k, v = (jnp.repeat(shared, q.shape[2] // shared.shape[2], axis=2) for shared in (k, v))
        x = x + attend(q, k, v, True) @ p["o"]
        h = rms(x, p["norm2"])
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    return cross_entropy(rms(x, params["norm"]) @ params["head"], labels)


def routed(x, p):
    """Each token goes to its best expert, as long as that has places for its sequence."""
    shares = jax.nn.softmax(x @ p["router"])
    chosen = jax.nn.one_hot(jnp.argmax(shares, -1), EXPERTS)
    place = jnp.cumsum(chosen, axis=1) * chosen - 1
    sent = chosen[..., None] * jax.nn.one_hot(place.astype(jnp.int32), 2 * SEQUENCE // EXPERTS)
    hidden = jax.nn.gelu(jnp.einsum("ebch,ehf->ebcf", jnp.einsum("bsec,bsh->ebch", sent, x), p["w1"]))
    back = jnp.einsum("ebcf,efh->ebch", hidden, p["w2"])
    return jnp.einsum("bsec,ebch->bsh", sent * shares[..., None], back)


def moe(params, tokens, labels):
    x = params["wte"][tokens] + params["wpe"]
    for p in params["h"]:
        x = block(x, p, feed=lambda x: routed(x, p))
    return cross_entropy(norm(x, params["ln_f"]) @ params["wte"].T, labels)


def vit(params, images, labels):
    batch, side, _, channels = images.shape
    x = images.reshape(batch, side // PATCH, PATCH, side // PATCH, PATCH, channels)
    x = linear(x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, PATCH * PATCH * channels), params["patches"])
    x = x + params["positions"]
    for p in params["h"]:
        x = block(x, p, causal=False)
    return cross_entropy(linear(norm(x, params["ln_f"]).mean(1), params["head"]), labels)


def masked(params, tokens, labels, weights):
    """A mean over the weights of the whole batch, which every microbatch divides by."""
    x = params["wte"][tokens] + params["wpe"]
    for p in params["h"]:
        x = block(x, p)
    logits = norm(x, params["ln_f"]) @ params["wte"].T
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return ((jax.nn.logsumexp(logits, axis=-1) - picked) * weights).sum() / weights.sum()


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

    def attending():
        wide = {"qkv": dense(HIDDEN, 3 * HIDDEN), "proj": dense(HIDDEN, HIDDEN)}
        return wide | {"ln1": gain(), "ln2": gain()}

    def layer():
        return attending() | {"fc": dense(HIDDEN, 4 * HIDDEN), "out": dense(4 * HIDDEN, HIDDEN)}

    def gated():
        square = {name: normal(HIDDEN, HIDDEN) for name in ("q", "o")}
        shared = {name: normal(HIDDEN, HIDDEN // 2) for name in ("k", "v")}
        wide = {"gate": normal(HIDDEN, 2 * HIDDEN), "up": normal(HIDDEN, 2 * HIDDEN), "down": normal(2 * HIDDEN, HIDDEN)}
        return square | shared | wide | {"norm1": 1 + 0.1 * normal(HIDDEN), "norm2": 1 + 0.1 * normal(HIDDEN)}

    def routing():
        wide = {"w1": normal(EXPERTS, HIDDEN, 2 * HIDDEN), "w2": normal(EXPERTS, 2 * HIDDEN, HIDDEN)}
        return attending() | wide | {"router": normal(HIDDEN, EXPERTS)}

    layers = [layer(), layer()]
    params = {"h": layers, "wte": normal(VOCABULARY, HIDDEN), "wpe": normal(SEQUENCE, HIDDEN), "ln_f": gain()}
    ids = [random.integers(0, VOCABULARY, (BATCH, SEQUENCE)).astype(np.int32) for _ in range(2)]
    text = {"tokens": ids[0], "labels": ids[1]}
    yield gpt, {"params": params}, text
    weights = (random.random((BATCH, SEQUENCE)) < 0.5).astype(np.float32)
    yield masked, {"params": params}, text | {"weights": weights}
    yield scanned, {"params": params | {"h": jax.tree.map(lambda *rows: np.stack(rows), *layers)}}, text
    like_llama = {"embed": normal(VOCABULARY, HIDDEN), "head": normal(HIDDEN, VOCABULARY), "norm": normal(HIDDEN)}
    yield llama, {"params": like_llama | {"layers": [gated(), gated()]}}, text
    yield moe, {"params": params | {"h": [routing(), routing()]}}, text
    arguments = {
        "weights": {"first": normal(16, 64), "second": normal(64, 8)},
        "bias": {"first": normal(64), "second": normal(8)},
    }
    yield mlp, arguments, {"batch": {"x": normal(BATCH, 16), "y": normal(BATCH, 8)}}
    widths = [(4, 16), (16, 32), (32, 32), (32, 32)]
    kernels = [{"w": normal(3, 3, *width) / 3, "b": 0.1 * normal(width[1])} for width in widths]
    params = {"convolutions": kernels, "head": dense(32, 8)}
    labels = random.integers(0, 8, BATCH).astype(np.int32)
    pictures = {"images": normal(BATCH, 16, 16, 4), "labels": labels}
    yield images, {"params": params}, pictures
    params = {"patches": dense(PATCH * PATCH * 4, HIDDEN), "positions": normal(16, HIDDEN), "h": layers}
    yield vit, {"params": params | {"ln_f": gain(), "head": dense(HIDDEN, 8)}}, pictures


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


def misplaced(array, name, sharding, stage):
    """Why an array does not lie where the plan has it, if it does not."""
    for shard in array.addressable_shards:
        if shard.device.id not in stage["devices"]:
            return f"{name}: device {shard.device.id} holds a part, which is none of its stage"
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


def check(arguments, inputs, expected, module, plan, loss=None):
    """The largest difference from one device, the number of arrays whose places were read, and the misplaced ones."""
    losses, gradients, after = expected
    mesh, pipeline = module.mesh(), len(plan["stages"]) > 1
    own = (lambda tree: tree) if len(arguments) > 1 else (lambda tree: tree["params"])
    whole = (lambda stages: module.whole_parameters(stages, own(arguments))) if pipeline else (lambda tree: tree)
    given = {} if loss is None else {"loss": loss}
    params = module.shard_parameters(own(arguments), mesh)
    state = module.init_state(OPTIMIZER, params, mesh)
    sharded = module.shard_inputs(inputs, mesh)
    step, errors = module.train_step(OPTIMIZER, mesh, params, state, sharded, **given), []
    trace = lambda state: [of[0].trace for of in state] if pipeline else state[0].trace
    for number, value_alone in enumerate(losses):
        params, state, value = step(params, state, sharded)
        errors.append(difference(value, value_alone))
        # The first momentum is the first gradient, where parameters train.
        known = [name not in module.FROZEN for name in named(arguments)]
        pairs = zip(jax.tree.leaves(whole(trace(state))), jax.tree.leaves(own(gradients)), known)
        errors += [difference(*pair) for *pair, trains in pairs if trains and number == 0]
    errors.append(worst(whole(params), own(after)))

    if pipeline:
        stages = [(stage, own, of[0].trace) for stage, own, of in zip(plan["stages"], params, state)]
    else:
        name = (lambda tree: named(tree if len(arguments) > 1 else {"params": tree}))
        stages = [(plan["stages"][0], name(params), name(state[0].trace))]
    problems, checked = [], 0
    for stage, *trees in stages:
        for slot, tree in zip(("parameter", "state"), trees):
            for name, array in tree.items():
                known = stage["parameters"].get(name) or stage["parameters"][f"{name}[0]"]
                problems.append(misplaced(array, f"{slot} {name}", known[slot], stage))
                checked += 1
    problems = [problem for problem in problems if problem]
    return max(errors), checked, problems


def main():
    altiplano, folder = sys.argv[1], Path(sys.argv[2])
    wanted, plans_wanted = sys.argv[3:4], sys.argv[4:]
    failed, done, pipelines, rounded, largest, arrays = False, 0, 0, 0, 0.0, 0
    for loss, arguments, inputs in cases():
        if wanted and loss.__name__ not in wanted[0].split(","):
            continue
        model = folder / f"{loss.__name__}.mlir"
        expected = alone(loss, arguments, inputs)
        model.write_text(jax.jit(loss).lower(**arguments, **inputs).as_text(debug_info=True))
        plans = PLANS | PIPELINES
        plans |= {"frozen": (4, ["--pp", "1", "--dp", "2", "--tp", "2", "--freeze", "bias"])} if loss is mlp else {}
        for name, (workers, options) in plans.items():
            if plans_wanted and name not in plans_wanted:
                continue
            file = folder / f"{loss.__name__}-{name}.json"
            trained = ["--params", ",".join(arguments)]
            plan, why = planned(altiplano, model, workers, options + trained, file)
            if plan is None:
                print(f"no plan      {loss.__name__} {name}: {why}")
                continue
            module, said = exported(altiplano, file, "jax", file.with_suffix(".py"))
            if (name == "frozen") != bool(module.FROZEN):
                sys.exit(f"FAILED       {loss.__name__} {name}: the module keeps {module.FROZEN}")
            reference = alone(loss, arguments, inputs, module.FROZEN) if module.FROZEN else expected
            results = [check(arguments, inputs, reference, module, plan)]
            # A loss of the user's own, with the layouts of parameters alone. It knows nothing of sums over a whole batch.
            if name in ("fsdp-tp", "accumulated") and loss is not masked:
                results.append(check(arguments, inputs, reference, module, plan, loss))
            error, problems = max(error for error, _, _ in results), [p for result in results for p in result[2]]
            done, arrays, largest = done + 1, arrays + results[0][1], max(largest, error)
            pipelines += len(plan["stages"]) > 1
            rounded += "contiguous blocks" in said
            if problems or not error <= TOLERANCE:
                failed = True
                print(f"FAILED       {loss.__name__} {name}: off by {error:.1e}; {'; '.join(problems[:3])}")
    if not wanted and (done < 100 or pipelines < 45):
        sys.exit(f"FAILED       only {done} plans were exported for JAX, {pipelines} of them pipelines")
    if rounded == 0 and not wanted:
        sys.exit("FAILED       no plan splits thirds of a dimension, so that no rounding was tried")
    if failed:
        sys.exit(1)
    print(f"ok           {done} plans exported for JAX, {pipelines} of them pipelines: within {largest:.1e} of one device")
    print(f"ok           {arrays} parameters and states of their optimizers are where the plans have them")


if __name__ == "__main__":
    main()
