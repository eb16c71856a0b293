"""Writes functions of single ops with inputs, results and gradients that JAX computes: NAME.mlir and NAME.safetensors.

    python ops.py DIRECTORY [SUBSTRING...]        only cases whose names have one of the substrings

What is compared is described in examples/evaluate.rs. Of the modules a half has locations, a third is in MLIR's generic
form. A gradient case is a loss, the sum of an op's results with weights, and JAX's gradient of it.
"""

import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from cases import Draw, control, elementwise, indexing, order, randomness, signals, structure, windows

jax.config.update("jax_default_matmul_precision", "highest")
# Rounds after each op as written, and compiles several times faster.
jax.config.update("jax_disable_most_optimizations", True)
warnings.filterwarnings("ignore", message=".*requested in .* is not available.*")

FAMILIES = [elementwise, structure, indexing, order, windows, control, randomness, signals]


def storable(x):
    """What a .safetensors file has no type for, in one that holds the same values."""
    x = np.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        stored = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
        x = x if x.dtype in stored else x.astype(np.float32)
    elif x.dtype in (ml_dtypes.int4, ml_dtypes.uint4):
        x = x.astype(np.int8)
    return np.ascontiguousarray(x).reshape(x.shape)


def save(path, number, lowered, tensors, named):
    """Modules take turns in their forms; names of arguments are in the locations, so `named` needs these."""
    operation = lowered.compiler_ir().operation
    located = named or number % 2 == 0
    with open(f"{path}.mlir", "w") as file:
        file.write(operation.get_asm(enable_debug_info=located, print_generic_op_form=number % 3 == 0))
    save_file({name: storable(x) for name, x in tensors.items()}, f"{path}.safetensors")


def lower(function, arguments, platform="cpu"):
    return jax.jit(function, keep_unused=True).trace(*arguments).lower(lowering_platforms=(platform,))


def write_values(path, number, case):
    lowered = lower(case.function, case.arguments, case.platform)
    as_it_is = case.platform == "cpu" and case.reference is None
    here = lowered if as_it_is else lower(case.reference or case.function, case.arguments)
    results = jax.tree.leaves(here.compile()(*case.arguments))
    tensors = {f"input/{i}": x for i, x in enumerate(case.arguments)}
    tensors |= {f"result/{i}": x for i, x in enumerate(results)}
    tensors |= {f"tolerance/{i}": case.tolerance(x.dtype) for i, x in enumerate(results)}
    save(path, number, lowered, tensors, named=False)


def write_gradient(path, number, case):
    draw = Draw(case.name + " weights")
    trained = {f"x{i}": case.arguments[i] for i in case.gradient}
    others = {f"x{i}": x for i, x in enumerate(case.arguments) if i not in case.gradient}
    shapes = jax.tree.leaves(jax.eval_shape(case.function, *case.arguments))
    floats = [i for i, s in enumerate(shapes) if jnp.issubdtype(s.dtype, jnp.floating)]
    inputs = others | {f"weight{i}": draw.normal(*shapes[i].shape) for i in floats}

    def terms(params, inputs, function=case.reference or case.function):
        arguments = [(params | inputs)[f"x{i}"] for i in range(len(case.arguments))]
        results = jax.tree.leaves(function(*arguments))
        return [results[i].astype(jnp.float32) * inputs[f"weight{i}"] for i in floats]

    def loss(params, inputs):
        return sum(jnp.sum(term) for term in terms(params, inputs, case.function))

    def reference(params, inputs):
        return sum(jnp.sum(term) for term in terms(params, inputs))

    lowered = lower(loss, (trained, inputs), case.platform)
    value, gradients = jax.jit(jax.value_and_grad(reference))(trained, inputs)
    # The loss is a sum, no better than its terms are, and these are no better than the coarsest type on their way. Their
    # errors are taken to be independent.
    size = sum((term**2).sum() for term in jax.jit(terms)(trained, inputs)) ** 0.5
    dtypes = [x.dtype for x in case.arguments if jnp.issubdtype(x.dtype, jnp.floating)]
    epsilon = max(case.epsilon(d) for d in dtypes + [np.float32])
    allowed = (max(case.relative + case.absolute, 6) + 2) * epsilon * size / max(abs(float(value)), 1e-30)
    tensors = {"loss": value, "tolerance/loss": np.array([allowed, 0], np.float32)}
    # A gradient passes through as many ops again as its function, and is a sum too. What is computed in half precision is
    # often rounded less than it may be, and would otherwise be allowed to be anything.
    for name, x in trained.items():
        tensors[f"params['{name}']"] = x
        tensors[f"grad/params['{name}']"] = gradients[name]
        epsilon = case.epsilon(x.dtype)
        relative, absolute = max(case.relative, 2) * epsilon, (max(case.relative, 2) + case.absolute) * epsilon
        factor = 1 if epsilon > 1e-5 else 4
        tensors[f"tolerance/grad/params['{name}']"] = np.array([factor * relative, factor * absolute], np.float32)
    tensors |= {f"input/inputs['{name}']": x for name, x in inputs.items()}
    save(path, number, lowered, tensors, named=True)


def write_family(name, directory, wanted):
    """How many cases were written, and what could not be: a JAX without a function must not hide what others give."""
    number, failed = 0, []
    # Modules cannot be sent to another process, their names can.
    for case in sys.modules[name].cases():
        if wanted and not any(word in case.name for word in wanted):
            continue
        try:
            with jax.enable_x64(case.x64):
                if not case.gradient_only:
                    write_values(f"{directory}/{case.name}", number, case)
                if case.gradient:
                    write_gradient(f"{directory}/{case.name}_gradient", number, case)
        except Exception as error:
            failed.append(f"{case.name}: {type(error).__name__}: {error}".splitlines()[0])
        number += 1
    return number, failed


def main(directory, wanted):
    # Processes that start afresh: JAX's threads do not survive a fork.
    with ProcessPoolExecutor(max_workers=os.cpu_count(), mp_context=get_context("spawn")) as pool:
        running = [pool.submit(write_family, f.__name__, directory, wanted) for f in FAMILIES]
        done = [r.result() for r in running]
    failed = [line for _, lines in done for line in lines]
    print("\n".join([f"NOT WRITTEN  {line}" for line in failed] + [f"{sum(n for n, _ in done)} cases"]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
