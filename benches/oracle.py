"""Latencies of the resident process, as its Python client sees them, and the growth of its memory.

    ALTIPLANO_BINARY=target/release/altiplano PYTHONPATH=python python benches/oracle.py [QUESTIONS] [SLOW]

QUESTIONS judgements, and SLOW of each slower question (defaults 1000 and 20), of a GPT with 40 layers. Prints medians, the 95th
percentile, and the processor's time of the process for each call.
"""

import itertools
import os
import random
import statistics
import sys
import time

import altiplano
from altiplano import _process

CONFIG = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 2048, "n_embd": 5120, "n_layer": 40, "n_head": 40}
OPTIONS = {"seq": 2048, "precision": "bf16", "global_batch": 256}
DEGREES = {
    "tp": (1, 2, 4, 8),
    "pp": (1, 2, 4, 8),
    "zero": (0, 1, 2, 3),
    "micro_batch_size": (1, 2, 4, 8),
    "recompute": ("none", "selective", "full"),
    "virtual_stages": (1, 5),
}


def of_process(file):
    with open(f"/proc/{_process.shared()._child.pid}/{file}") as text:
        return text.read()


def resident_bytes():
    return next(1024 * int(line.split()[1]) for line in of_process("status").splitlines() if line.startswith("VmRSS"))


def processor_seconds():
    user, system = of_process("stat").rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def timed(what, questions):
    """Asks questions one after the other, and prints a row. Returns their answers and times."""
    times, answers, before = [], [], processor_seconds()
    for question in questions:
        start = time.perf_counter()
        answers.append(question())
        times.append(time.perf_counter() - start)
    row(what, times, (processor_seconds() - before) / len(times))
    return answers, times


def row(what, times, processor_s=None):
    ranked = sorted(times)
    middle, late = statistics.median(ranked), ranked[min(len(ranked) - 1, round(0.95 * len(ranked)))]
    processor = "" if processor_s is None else f"{1e3 * processor_s:.1f} ms"
    print(f"| {what} | {len(times)} | {1e3 * middle:.2f} ms | {1e3 * late:.2f} ms | {processor} |", flush=True)


def main():
    count, slow = (int(argument) for argument in (sys.argv[1:] + ["1000", "20"][len(sys.argv) - 1 :])[:2])
    random.seed(1)
    print("| question | calls | median | 95 % | processor |\n| --- | --- | --- | --- | --- |")
    with altiplano.Oracle(CONFIG, "dgx-h100:4", **OPTIONS) as oracle:
        timed("nothing (`ping`)", [lambda: _process.ask("ping", {})] * count)
        all_of = [dict(zip(DEGREES, values)) for values in itertools.product(*DEGREES.values())]
        questions = [lambda q=q: oracle.judge(**q) for q in random.sample(all_of, count)]
        timed("`judge`, the first 50", questions[:50])
        before = resident_bytes()
        answers, times = timed("`judge`, each for the first time", questions[50:])
        for what, of in (
            ("of these, that fit", lambda answer: answer.fits),
            ("of these, that do not fit", lambda answer: answer.is_predicted and not answer.fits),
            ("of these, that cannot be", lambda answer: not answer.is_predicted),
        ):
            row(what, [seconds for answer, seconds in zip(answers, times) if of(answer)])
        timed("`judge`, again", questions)
        print(f"  memory: {before / 1e6:.0f} MB before, {resident_bytes() / 1e6:.0f} MB after", file=sys.stderr)
        plan = oracle.plan()
        asked = [{"tp": tp} for tp in (2, 4, 8)] + [{"pp": pp} for pp in (2, 4)] + [{"zero": 1}, {"tp": 8, "pp": 4}]
        timed("`why_not`, each question for the first time", [lambda q=q: plan.why_not(**q) for q in asked])
        again = itertools.islice(itertools.cycle(asked), count)
        timed("`why_not`, again", [lambda q=q: plan.why_not(**q) for q in again])
        lost = [lambda n=n: oracle.plan(cluster=f"dgx-h100:{n}") for n in (3, 2)]
        timed("`plan` after a node is lost, and another", lost)
        timed("`plan` after a node is lost, again", lost[:1] * slow)


if __name__ == "__main__":
    main()
