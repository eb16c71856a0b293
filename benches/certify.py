#!/usr/bin/env python3
"""How far predictions of memory and communication are from what XLA's compiler makes of plans for GPUs that are not there.

    benches/certify.py [TABLE.md] [NAME]...     ALTIPLANO=a binary, else `cargo build --release` makes one; PLANNER=another binary
                                                that plans; VIRTUAL_ENV=an environment with jax-cuda12-pjrt or jax-cuda13-pjrt and
                                                nvidia-cuda-nvcc; ALTIPLANO_SHARED=a folder with models/; PATIENCE=900 seconds a plan

Each case is a model, a cluster and options of `altiplano plan`. Models are configs of benches/configs/huggingface.jsonl, or files of the
shared folder, which are left out without it. The table is written after each case. A later run keeps
its rows and goes on; remove the table to measure another version.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from built import ROOT, binary

PATIENCE = float(os.environ.get("PATIENCE", "900"))
TARGET = os.environ.get("TARGET", "cuda:H100")
SHARED = os.environ.get("ALTIPLANO_SHARED")

# Models that a device holds, if optimizer states are dealt out, with their batches.
SMALL = [
    ("gpt2-small.mlir", "--global-batch 64"),
    ("ernie-4.5-0.3b", "--seq 2048 --global-batch 64"),
    ("mamba-130m", "--seq 1024 --global-batch 64"),
    ("llama-3.2-1b", "--seq 2048 --global-batch 64"),
    ("olmoe-1b-7b", "--seq 2048 --global-batch 64"),
    ("gemma-2b", "--seq 2048 --global-batch 64"),
    ("moe-2.4b.mlir", "--global-batch 64"),
    ("bert-large", "--seq 512 --global-batch 256"),
    ("modernbert-large", "--seq 1024 --global-batch 128"),
    ("wresnet50-1b.mlir", "--global-batch 256"),
    ("vit-huge", "--global-batch 256"),
    ("clip-vit-large-14", "--global-batch 256"),
    ("phi-2", "--seq 2048 --global-batch 64"),
    ("granite-3-3b-a800m", "--seq 2048 --global-batch 64"),
    ("gpt2-xl", "--seq 1024 --global-batch 64"),
    ("llama-3.1-8b", "--seq 4096 --global-batch 64"),
]
LARGE = [
    ("gpt3-39b.mlir", "--global-batch 256"),
    ("mixtral-8x7b", "--seq 2048 --global-batch 256"),
    ("llama-2-70b", "--seq 4096 --global-batch 256"),
    ("qwen3-30b-a3b", "--seq 4096 --global-batch 256"),
]
# Nodes of eight H100 and degrees.
MESHES = [
    ("dp8", 1, "--pp 1 --tp 1"),
    ("pp2", 1, "--pp 2 --tp 1"),
    ("tp2", 1, "--pp 1 --tp 2"),
    ("pp4 tp2", 1, "--pp 4 --tp 2"),
    ("zero3 full", 1, "--pp 1 --tp 1 --zero 3 --recompute full"),
    ("64 GPUs", 8, "--pp 2 --tp 4"),
    ("tp8", 1, "--pp 1 --tp 8 --recompute selective"),
    ("zero3", 1, "--pp 1 --tp 1 --zero 3"),
    ("dp8 f32", 1, "--pp 1 --tp 1 --precision f32"),
    ("256 GPUs", 32, "--pp 1 --tp 8 --zero 3"),
]
LARGE_MESHES = [
    ("pp8 tp8", 8, "--pp 8 --tp 8"),
    ("pp4 tp8", 8, "--pp 4 --tp 8"),
    ("pp8 tp4", 16, "--pp 8 --tp 4"),
    ("256 GPUs", 32, "--pp 8 --tp 8"),
    ("pp4 tp8 full", 8, "--pp 4 --tp 8 --recompute full"),
    ("pp8 tp8 f32", 32, "--pp 8 --tp 8 --precision f32"),
    ("pp4 zero2", 32, "--pp 4 --tp 8 --zero 2"),
    ("pp2 tp8", 16, "--pp 2 --tp 8"),
    ("tp8 zero3", 16, "--pp 1 --tp 8 --zero 3 --recompute full"),
    ("zero3", 16, "--pp 1 --tp 1 --zero 3 --recompute full"),
]


def cases():
    """Name, model, nodes and options, one mesh after the other."""
    for i in range(len(MESHES)):
        for models, meshes in ((SMALL, MESHES), (LARGE, LARGE_MESHES)):
            name, nodes, degrees = meshes[i]
            precision = "" if "--precision" in degrees else " --precision bf16"
            for model, options in models:
                yield f"{model.removesuffix('.mlir')} {name}", model, nodes, f"{options} {degrees}{precision}"


def model_of(name, folder):
    if name.endswith(".mlir"):
        file = Path(SHARED or "/nonexistent") / "models" / name
        return file if file.exists() else None
    with open(ROOT / "benches/configs/huggingface.jsonl") as lines:
        config = next(c["config"] for c in map(json.loads, lines) if c["name"] == name)
    home = Path(folder) / name
    home.mkdir(exist_ok=True)
    (home / "config.json").write_text(json.dumps(config))
    return home / "config.json"


def ran(command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return None, f"not done after {PATIENCE:.0f} s"
    problem = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return done, (problem[-1][7:] if problem else "")


def amount(traffic):
    return f"{traffic['count']} / {traffic['bytes'] / 1e9:.3g}"


def measured(certificate, wall):
    rows = []
    stages = certificate["stages"]
    # The worst stage speaks for all.
    worst = max(stages, key=lambda s: abs(s["predicted_bytes"] / s["peak_bytes"] - 1))
    kinds = sorted({row["kind"] for stage in stages for row in stage["collectives"]})
    found = {row["kind"]: row for row in worst["collectives"]}
    words = [f"{kind} {amount(found[kind]['planned'])} -> {amount(found[kind]['compiled'])}" for kind in kinds if kind in found]
    rows += [
        str(len(stages)),
        f"{worst['predicted_bytes'] / 1e9:.2f}",
        f"{worst['peak_bytes'] / 1e9:.2f}",
        f"{100 * (worst['predicted_bytes'] / worst['peak_bytes'] - 1):+.1f} %",
        f"{worst['overlapped_bytes'] / 1e9:.2f}",
        f"{worst['lasting_bytes'] / 1e9:.2f} + {worst['held_bytes'] / 1e9:.2f} + {worst['body_bytes'] / 1e9:.2f} ({worst['fullest']})",
        "; ".join(words) or "none",
        f"{wall:.0f}",
    ]
    return rows


def case(name, model, nodes, options, tools, folder):
    altiplano, planner = tools
    file = model_of(model, folder)
    if file is None:
        return None
    plan = Path(folder) / "plan.json"
    plan.unlink(missing_ok=True)
    # Plans of one stage can be those that JAX's users have. Others are of the default target.
    if "--pp 1 " in options:
        options += " --target xla"
    done, problem = ran([planner, "plan", file, "--cluster", f"dgx-h100:{nodes}", *options.split(), "-o", plan])
    if not plan.exists():
        return [name, options, f"no plan: {problem}", *[""] * 7]
    begun = time.monotonic()
    done, problem = ran([altiplano, "certify", plan, "--for", TARGET, "--json"])
    wall = time.monotonic() - begun
    start = done.stdout.find("{") if done else -1
    if start < 0:
        return [name, options, f"not certified: {problem}", *[""] * 6, f"{wall:.0f}"]
    return [name, options, *measured(json.loads(done.stdout[start:]), wall)]


HEAD = """# Predictions of memory beside XLA's compiler

`benches/certify.py` plans each case for nodes of eight H100 and compiles the plan with `altiplano certify --for {target}` on a machine
without a GPU: {machine}, {date}, {compiler}. Bytes are those of a device, in GB. The stage whose prediction is farthest
off speaks for its plan. `compiled` is in the order that holds few bytes, `overlapped` in the one that starts communication early. For the second
one XLA's scheduler keeps values as far as a whole device has room; runs take it where it fits. The compiler's bytes are those that last
(parameters, state, sums of gradients), those held between bodies, and what the fullest body takes beside its arguments. Collectives are those of a
step: how many / GB, of the plan -> compiled; XLA joins small ones. Seconds are those of the whole command, mostly compiling.

{compiled} of {plans} plans compile. Predictions are off by {median:.1f} % in the median and by {worst:.1f} % at worst; the largest
shortfall is {under:.1f} %.

| plan | options | stages | predicted | compiled | error | overlapped | lasting + held + body | collectives | seconds |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def finished(table):
    """Rows of a table that an earlier run began."""
    lines = table.read_text().splitlines() if table and table.exists() else []
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return rows[2:]


def main():
    arguments = sys.argv[1:]
    table = Path(arguments.pop(0)) if arguments and arguments[0].endswith(".md") else None
    altiplano = binary()
    tools = (altiplano, os.environ.get("PLANNER", altiplano))
    kept = finished(table)
    done = {row[0] for row in kept}
    with tempfile.TemporaryDirectory() as folder:
        for name, model, nodes, options in cases():
            if name in done or (arguments and name not in arguments):
                continue
            row = case(name, model, nodes, options, tools, folder)
            if row is None:
                continue
            kept.append(row)
            print(" | ".join(row), flush=True)
            if table:
                write(table, kept)


def write(table, rows):
    errors = [float(row[5].split()[0]) for row in rows if row[5]] or [0.0]
    sizes = sorted(abs(error) for error in errors)
    head = HEAD.format(
        target=TARGET,
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
        date=date.today().isoformat(),
        compiler=os.environ.get("COMPILER", "the plugin in VIRTUAL_ENV"),
        plans=len(rows),
        compiled=sum(1 for row in rows if row[3]),
        median=sizes[len(sizes) // 2],
        worst=sizes[-1],
        under=-min(min(errors), 0.0),
    )
    table.write_text(head + "".join(f"| {' | '.join(row)} |\n" for row in rows))


if __name__ == "__main__":
    main()
