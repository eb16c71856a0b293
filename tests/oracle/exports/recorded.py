"""Exports for JAX of the models in tests/models, whose losses and gradients JAX recorded from their own code: the model in the
module must give them, on four devices of the host, in one stage and in two.

    recorded.py ALTIPLANO FOLDER [MODEL]...
"""

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
# Threads of a loaded machine may meet late in a collective, which XLA by default takes for a deadlock after 40 s.
os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Dropout counts random bits in 64 bits.
os.environ["JAX_ENABLE_X64"] = "1"

import jax
import numpy as np
from plans import difference, exported, planned
from safetensors.numpy import load_file

# Tolerance of losses and gradients, as `altiplano verify` allows: gradients that vanish differ by rounding.
LOSS, GRADIENT, TINY = 1e-5, 1e-4, 1e-7
MODELS = Path(__file__).parents[2] / "models"
PLANS = {"one": ["--pp", "1"], "two": ["--pp", "2"]}


def check(module, plan, recorded):
    """The largest differences of the loss and of gradients from what was recorded."""
    params = {name: x for name, x in recorded.items() if f"grad/{name}" in recorded}
    inputs = {name.removeprefix("input/"): x for name, x in recorded.items() if name.startswith("input/")}
    mesh, pipeline = module.mesh(), len(plan["stages"]) > 1
    placed = module.shard_parameters(params, mesh)
    gradients_of = module.loss_and_gradients(mesh)
    value, found = (gradients_of if pipeline else jax.jit(gradients_of))(placed, module.shard_inputs(inputs, mesh))
    found = module.whole_parameters(found, params) if pipeline else found
    pairs = [(np.asarray(found[name]), recorded[f"grad/{name}"]) for name in params]
    worst = max([difference(*pair) for pair in pairs if not np.abs(pair[0] - pair[1]).max() <= TINY], default=0.0)
    return difference(value, recorded["loss"][0]), worst


def main():
    altiplano, folder = sys.argv[1], Path(sys.argv[2])
    done, failed, largest = 0, False, 0.0
    for file in sorted(MODELS.glob("*.safetensors")):
        if sys.argv[3:] and file.stem not in sys.argv[3:]:
            continue
        recorded = load_file(file)
        for name, options in PLANS.items():
            path = folder / f"recorded-{file.stem}-{name}.json"
            plan, why = planned(altiplano, file.with_suffix(".mlir"), 4, options, path)
            if plan is None:
                print(f"no plan      {file.stem} {name}: {why}")
                continue
            module, _ = exported(altiplano, path, "jax", path.with_suffix(".py"))
            loss, gradient = check(module, plan, recorded)
            done, largest = done + 1, max(largest, gradient)
            if not (loss <= LOSS and gradient <= GRADIENT):
                failed = True
                print(f"FAILED       {file.stem} {name}: loss off by {loss:.1e}, gradients by {gradient:.1e}")
    if failed or (done < 16 and not sys.argv[3:]):
        sys.exit(f"FAILED       {done} plans of recorded models")
    print(f"ok           {done} plans of models with recorded gradients: within {largest:.1e} of them")


if __name__ == "__main__":
    main()
