"""Latencies of the resident process, as its Python client sees them, and the growth of its memory.

    ALTIPLANO_BINARY=target/release/altiplano PYTHONPATH=python python benches/oracle.py [QUESTIONS] [SLOW]

QUESTIONS judgements, and SLOW of each slower question (defaults 1000 and 20), of a GPT with 40 layers. Prints medians and the 95th percentile.
"""

import itertools
import random
import statistics
import sys
import time

import altiplano
from altiplano import _process

CONFIG = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 2048, "n_embd": 5120, "n_layer": 40, "n_head": 40}
OPTIONS = {"seq": 2048, "precision": "bf16", "global_batch": 256}


def resident_bytes():
    with open(f"/proc/{_process.shared()._child.pid}/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def timed(what, questions):
    times = []
    for question in questions:
        start = time.perf_counter()
        question()
        times.append(time.perf_counter() - start)
    times.sort()
    middle, late = statistics.median(times), times[min(len(times) - 1, round(0.95 * len(times)))]
    print(f"| {what} | {len(times)} | {1e3 * middle:.2f} ms | {1e3 * late:.2f} ms |", flush=True)


def main():
    count, slow = (int(argument) for argument in (sys.argv[1:] + ["1000", "20"][len(sys.argv) - 1 :])[:2])
    random.seed(1)
    print("| question | calls | median | 95 % |\n| --- | --- | --- | --- |")
    with altiplano.Oracle(CONFIG, "dgx-h100:4", **OPTIONS) as oracle:
        timed("nothing (`ping`)", [lambda: _process.ask("ping", {})] * count)
        degrees = itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (0, 1, 3), (1, 2, 4), ("none", "full"))
        names = ("tp", "pp", "zero", "micro_batch_size", "recompute")
        all_of = [dict(zip(names, values)) for values in degrees]
        first = [random.choice(all_of) for _ in range(50)]
        timed("`judge`, the first 50", [lambda q=q: oracle.judge(**q) for q in first])
        before = resident_bytes()
        again = [random.choice(all_of) for _ in range(count)]
        timed("`judge`", [lambda q=q: oracle.judge(**q) for q in again])
        print(f"  memory: {before / 1e6:.0f} MB before, {resident_bytes() / 1e6:.0f} MB after", file=sys.stderr)
        plan = oracle.plan()
        asked = [{"tp": tp} for tp in (2, 4, 8)] + [{"pp": pp} for pp in (2, 4)] + [{"zero": 1}, {"tp": 8, "pp": 4}]
        timed("`why_not`, each question for the first time", [lambda q=q: plan.why_not(**q) for q in asked])
        timed("`why_not`, again", [lambda q=q: plan.why_not(**q) for q in itertools.islice(itertools.cycle(asked), slow)])
        timed("`plan` after a node is lost", [lambda: oracle.plan(cluster="dgx-h100:3")])
        timed("`plan` after a node is lost, again", [lambda: oracle.plan(cluster="dgx-h100:3")] * slow)


if __name__ == "__main__":
    main()
