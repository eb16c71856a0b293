"""What the proofs of exports share: models are planned and exported by the program, and layouts are read from plan files."""

import importlib.util
import json
import subprocess
import sys

import numpy as np

# Options of plans that are exported, with the number of their workers. The last ones of both lists are searched plans.
PLANS = {
    "dp": (4, ["--pp", "1", "--dp", "4"]),
    "fsdp": (4, ["--pp", "1", "--dp", "4", "--zero", "3"]),
    "hsdp": (4, ["--pp", "1", "--dp", "4", "--dp-replicate", "2", "--zero", "3"]),
    "tp": (4, ["--pp", "1", "--tp", "4"]),
    "fsdp-tp": (4, ["--pp", "1", "--dp", "2", "--tp", "2", "--zero", "3"]),
    "accumulated": (4, ["--pp", "1", "--dp", "2", "--tp", "2", "--zero", "2", "--num-microbatches", "2"]),
    "recomputed": (4, ["--pp", "1", "--dp", "2", "--tp", "2", "--recompute", "full"]),
    "selective": (4, ["--pp", "1", "--dp", "2", "--tp", "2", "--recompute", "selective"]),
    "searched": (4, ["--pp", "1"]),
}
PIPELINES = {
    "1f1b": (4, ["--pp", "2", "--tp", "2", "--num-microbatches", "4", "--schedule", "1f1b"]),
    "gpipe": (4, ["--pp", "2", "--dp", "2", "--num-microbatches", "4", "--schedule", "gpipe", "--recompute", "full"]),
    "interleaved": (4, ["--pp", "2", "--dp", "2", "--num-microbatches", "4", "--virtual-stages", "2"]),
    "zb-h1": (4, ["--pp", "2", "--tp", "2", "--num-microbatches", "4", "--schedule", "zb-h1"]),
    "zb-v": (4, ["--pp", "2", "--tp", "2", "--num-microbatches", "4", "--schedule", "zb-v"]),
    "dualpipe-v": (4, ["--pp", "2", "--tp", "2", "--num-microbatches", "4", "--schedule", "dualpipe-v"]),
    "dp-tp-pp": (8, ["--dp", "2", "--tp", "2", "--pp", "2", "--zero", "1", "--num-microbatches", "2"]),
    "pp4": (4, ["--pp", "4", "--num-microbatches", "4"]),
    "searched-pp": (8, ["--pp", "2"]),
}


def planned(altiplano, model, workers, options, file):
    """Plans a model on workers of this machine. None if the options have no plan for it, with the reason."""
    command = [altiplano, "plan", model, "--cluster", f"local:{workers}", *options, "-o", file]
    done = subprocess.run(command, capture_output=True, text=True)
    return (json.loads(file.read_text()), "") if done.returncode == 0 else (None, done.stderr.strip().splitlines()[0])


def exported(altiplano, plan, to, file):
    """The module that a plan is exported as, and what the program said to stderr."""
    done = subprocess.run([altiplano, "export", plan, "--to", to, "-o", file], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"FAILED       export --to {to}: {done.stderr}")
    spec = importlib.util.spec_from_file_location(file.stem.replace("-", "_"), file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, done.stderr


def blocks(sharding, axes, position):
    """The range of each dimension that a device holds, by the plan's file: only the outermost segment of a dimension counts,
    since no target splits others."""
    coordinates, rest = [], position
    for axis in reversed(axes):
        coordinates.insert(0, rest % axis["size"])
        rest //= axis["size"]
    ranges = []
    for dim in sharding["dims"]:
        size = int(np.prod([segment["size"] for segment in dim["segments"]]))
        parts, part = 1, 0
        for axis in dim["segments"][0]["axes"]:
            parts *= axes[axis]["size"]
            part = part * axes[axis]["size"] + coordinates[axis]
        ranges.append((part * size // parts, (part + 1) * size // parts))
    return ranges


def difference(found, expected):
    """The largest difference, relative to the norm of what is expected."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(found - expected).max() / max(np.linalg.norm(expected), 1e-30))
