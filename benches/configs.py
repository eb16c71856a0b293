#!/usr/bin/env python3
"""How long a plan of each published config takes, and whether its weights are counted as Transformers counts them.

    benches/configs.py [TABLE.md] [NAME]...     ALTIPLANO=a binary, else `cargo build --release` makes one; CLUSTER=dgx-h100:4;
                                                PATIENCE=120 seconds for a config

Configs and counts are in benches/configs/huggingface.jsonl, one a line. Each becomes a folder with a config.json, which is planned for
the cluster with samples of a length of its own choice. A config too large for the cluster has no plan, which the table says.
"""

import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from built import ROOT, binary

CLUSTER = os.environ.get("CLUSTER", "dgx-h100:4")
PATIENCE = float(os.environ.get("PATIENCE", "120"))


def weights(plan):
    # Of a model that was made larger so that devices divide it, those of the model as it is count.
    graph = plan.get("padding", plan)["graph"]
    ops = (node["op"] for node in graph["nodes"] if isinstance(node["op"], dict))
    return sum(math.prod(op["parameter"]["ty"]["shape"]) for op in ops if "parameter" in op)


def planned(altiplano, case, scratch):
    folder = scratch / case["name"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(case["config"]))
    command = [altiplano, "plan", str(folder), "--cluster", CLUSTER, "--json"]
    start, used = time.monotonic(), processor_seconds()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return (PATIENCE, processor_seconds() - used), None, f"more than {PATIENCE:.0f} s"
    seconds = (time.monotonic() - start, processor_seconds() - used)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if not line.startswith(("note", "warning"))]
        return seconds, None, (lines or ["no plan"])[0][:90]
    plan = json.loads(done.stdout)
    expected = case["parameters"] - case.get("frozen", 0)
    found = weights(plan)
    return seconds, plan, "" if found == expected else f"{found:,} weights"


def processor_seconds():
    """What all processes that have ended took of processors, which the load of the machine says less about than the clock."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main():
    arguments = sys.argv[1:]
    table = Path(arguments.pop(0)) if arguments and arguments[0].endswith(".md") else None
    cases = [json.loads(line) for line in (ROOT / "benches/configs/huggingface.jsonl").read_text().splitlines()]
    cases = [case for case in cases if not arguments or case["name"] in arguments]
    altiplano = binary()
    rows, times = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases:
            seconds, plan, problem = planned(altiplano, case, Path(scratch))
            if plan is not None and not problem:
                times.append(seconds)
            clock, used = seconds
            step = f"{plan['predicted']['step_time_s']:.3g} s" if plan else ""
            family, count = case["config"]["model_type"], f"{case['parameters']:,}"
            cells = [case["name"], family, count, f"{clock:.1f} s", f"{used:.1f} s", step, problem]
            rows.append(f"| {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    clock, used = (max((t[i] for t in times), default=0) for i in range(2))
    processor = platform.processor() or platform.machine()
    text = [
        "# Plans of published configs",
        "",
        f"`benches/configs.py` on {date.today()}, {os.cpu_count()} cores ({processor}), cluster `{CLUSTER}`: {len(times)} of "
        f"{len(cases)} planned with the weights that Transformers counts, in {clock:.1f} s at most "
        f"by the clock and {used:.1f} s of processors.",
        "",
        "| config | family | weights | by the clock | of processors | predicted step | problem |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
    ]
    if table:
        table.write_text("\n".join(text))
    else:
        print("\n".join(text[:4]))


if __name__ == "__main__":
    main()
