"""What the proofs of exports share: models are planned and exported by the program, and layouts are read from plan files."""

import importlib.util
import json
import subprocess
import sys

import numpy as np

DEVICES = 4
# Options of plans that are exported. The last one is the searched plan.
PLANS = {
    "dp": ["--dp", "4"],
    "fsdp": ["--dp", "4", "--zero", "3"],
    "tp": ["--tp", "4"],
    "fsdp-tp": ["--dp", "2", "--tp", "2", "--zero", "3"],
    "accumulated": ["--dp", "2", "--tp", "2", "--zero", "2", "--num-microbatches", "2"],
    "searched": [],
}


def planned(altiplano, model, options, file):
    """Plans a model on four workers in one stage. None if the options have no plan for it, with the reason."""
    command = [altiplano, "plan", model, "--cluster", f"local:{DEVICES}", "--pp", "1", *options, "-o", file]
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
