"""Writes small models of many architectures with loss and gradients that JAX computes: NAME.mlir and NAME.safetensors.

    python zoo.py DIRECTORY [NAME...]

The files are named and laid out as those of models.py, with `tolerance/...` beside what is expected (see
examples/evaluate.rs). NAME-step.mlir is a whole training step as one function, loss, gradients and Adam.
"""

import sys
import zlib

import jax
import numpy as np
import optax
from safetensors.numpy import save_file

from architectures import images, routing, sequences

jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_disable_most_optimizations", True)

MODELS = images.MODELS | routing.MODELS | sequences.MODELS
# Models whose whole training step is written too.
STEPS = ["scanned", "resnet"]
# Single precision up to the order of additions, and bf16 wherever a model rounds to it.
TOLERANCE = {"f32": (1e-5, 1e-3, 1e-4), "bf16": (2e-2, 5e-2, 5e-2)}


def named(prefix, tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {prefix + jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def stored(tensors):
    arrays = {name: np.asarray(x) for name, x in tensors.items()}
    return {name: np.ascontiguousarray(x).reshape(x.shape) for name, x in arrays.items()}


def write_text(path, function, arguments):
    with open(path, "w") as file:
        file.write(jax.jit(function).lower(*arguments).as_text(debug_info=True))


def write(directory, name):
    numbers = np.random.default_rng(zlib.crc32(name.encode()))
    loss, params, inputs, precision = MODELS[name](numbers)
    arguments = (params, *inputs.values())
    write_text(f"{directory}/{name}.mlir", loss, arguments)
    value, gradients = jax.jit(jax.value_and_grad(loss))(*arguments)
    of_loss, relative, absolute = TOLERANCE[precision]
    gradients = named("grad/params", gradients)
    tensors = {"loss": np.asarray(value, np.float32).reshape(1)}
    tensors |= named("params", params) | gradients | {f"input/{n}": x for n, x in inputs.items()}
    tensors["tolerance/loss"] = np.array([of_loss, 0], np.float32)
    # Where a gradient is zero but for rounding, the rounding is that of what was added up on the way.
    largest = max(np.abs(g).max() for g in gradients.values())
    for gradient, g in gradients.items():
        noise = max(absolute, 1e-6 * largest / max(np.abs(g).max(), 1e-30))
        tensors[f"tolerance/{gradient}"] = np.array([relative, min(noise, 1e30)], np.float32)
    save_file(stored(tensors), f"{directory}/{name}.safetensors")
    if name in STEPS:
        write_step(f"{directory}/{name}-step", loss, params, inputs)
    print(f"{name}: loss {float(value):.6f}, {sum(x.size for x in jax.tree.leaves(params))} parameters")


def write_step(path, loss, params, inputs):
    # An epsilon well above rounding: Adam divides a gradient by its own size, whatever that is.
    optimizer = optax.adam(1e-3, eps=1e-4)

    def step(params, state, *inputs):
        value, gradients = jax.value_and_grad(loss)(params, *inputs)
        updates, state = optimizer.update(gradients, state)
        return value, optax.apply_updates(params, updates), state

    arguments = (params, optimizer.init(params), *inputs.values())
    write_text(f"{path}.mlir", step, arguments)
    results = jax.tree.leaves(jax.jit(step)(*arguments))
    tensors = {f"input/{i}": x for i, x in enumerate(jax.tree.leaves(arguments))}
    for i, x in enumerate(results):
        tensors |= {f"result/{i}": x, f"tolerance/{i}": np.array([1e-3, 1e-4], np.float32)}
    save_file(stored(tensors), f"{path}.safetensors")


if __name__ == "__main__":
    for name in sys.argv[2:] or MODELS:
        write(sys.argv[1], name)
