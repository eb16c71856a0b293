#!/usr/bin/env python3
"""Plans and proves pairs of models and clusters, and says which plans are not proved and why.

    benches/proofs.py matrix MODELS          six models in a folder, each on ten clusters
    benches/proofs.py random COUNT [SEED]    random configs, clusters and options; the seed alone decides which

ALTIPLANO=a binary, else `cargo build --release` makes one; PATIENCE=60 seconds for a pair; SECONDS ends a random run early.
Pairs without a plan, by the options or by memory, are counted and replaced. The last lines are a summary in Markdown.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from built import binary

PATIENCE = float(os.environ.get("PATIENCE", "60"))

MODELS = {
    "gpt2-small.mlir": 64, "llama3-8b.mlir": 256, "moe-2.4b.mlir": 256,
    "wresnet50-1b.mlir": 512, "gpt3-2.6b.mlir": 256, "gpt3-39b.mlir": 1024,
}
CLUSTERS = [
    "p3.16xlarge:2", "p3.16xlarge:8", "dgx-a100:1", "dgx-a100:4", "dgx-h100:4", "dgx-h100:16",
    "p4d.24xlarge:1", "perlmutter:8", "p6-b200.48xlarge:2", "local:8",
]


def tried(altiplano, words, plan):
    """The outcome of planning and proving, in a word; the reason; and the certificate."""
    plan.unlink(missing_ok=True)
    command = [altiplano, "plan", *words, "--prove", "-o", str(plan)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return "no plan", f"more than {PATIENCE:.0f} s", None
    said = [line for line in done.stderr.splitlines() if not line.startswith("note")]
    unproved = [line for line in said if "not proved" in line]
    if unproved:
        return "not proved", unproved[0].removeprefix("error: "), None
    if done.returncode in (1, 2):
        errors = [line for line in said if line.startswith("error")]
        return "no plan", (errors or said or ["?"])[0], None
    if done.returncode != 0:
        return "failed", f"exit code {done.returncode}: {done.stderr[-300:]}", None
    certificate = json.loads(plan.read_text())["proof"]
    return "proved", "; ".join(line for line in said if "are summed over" in line), certificate


def transformer(draw):
    """A config of a random family and size."""
    family = draw.choice(["gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "bert", "t5", "vit"])
    heads, width = draw.choice([2, 4, 8, 12, 16, 32]), draw.choice([32, 64, 128])
    hidden, layers = heads * width, draw.choice([1, 2, 3, 4, 6, 8, 12, 24])
    inner, vocabulary = hidden * draw.choice([2, 3, 4]), draw.choice([1000, 30522, 32000, 50257, 50304])
    if family == "gpt2":
        return family, {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 4096, "vocab_size": vocabulary}
    if family == "t5":
        return family, {"d_model": hidden, "d_kv": width, "d_ff": inner, "num_layers": layers, "num_heads": heads, "vocab_size": vocabulary}
    config = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner}
    if family == "vit":
        return family, {**config, "image_size": 224, "patch_size": 16, "num_channels": 3}
    config |= {"vocab_size": vocabulary, "max_position_embeddings": 8192}
    if family != "bert":
        config["num_key_value_heads"] = draw.choice([k for k in (1, 2, 4, 8, heads) if heads % k == 0])
        config["head_dim"] = width
    if family == "mixtral":
        config |= {"num_local_experts": draw.choice([4, 8]), "num_experts_per_tok": draw.choice([1, 2])}
    return family, config


def options(draw):
    """Options of a plan, of which about a third are given."""
    choices = {
        "--dp": ["1", "2", "4"], "--tp": ["1", "2", "4"], "--pp": ["1", "2", "4"], "--cp": ["1", "2"], "--zero": ["0", "1", "2", "3"],
        "--num-microbatches": ["1", "2", "4", "8"], "--recompute": ["none", "full", "selective"],
        "--schedule": ["1f1b", "gpipe", "zb-h1"], "--precision": ["f32", "bf16", "f16"],
        "--optimizer": ["sgd", "adam", "adamw", "lamb", "adagrad"], "--clip-norm": ["1"], "--loss-scale": ["dynamic"],
        "--virtual-stages": ["1", "2"],
    }
    words = []
    for name, values in choices.items():
        if draw.random() < 0.3:
            words += [name, draw.choice(values)]
    return words


def pair(draw, folder):
    family, config = transformer(draw)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": family, **config}))
    cluster = draw.choice(["local:2", "local:4", "local:8", "p3.16xlarge:1", "p3.16xlarge:2", "dgx-a100:1", "dgx-a100:2", "dgx-h100:2", "p4d.24xlarge:1"])
    batch = ["--global-batch", draw.choice(["16", "32", "64", "128", "96"])]
    length = [] if family == "vit" else ["--seq", draw.choice(["64", "128", "512", "1024"])]
    return family, config, ["--cluster", cluster, *batch, *length, *options(draw)]


def matrix(altiplano, models, plan):
    for model, batch in MODELS.items():
        for cluster in CLUSTERS:
            yield f"{model} {cluster}", tried(altiplano, [str(models / model), "--cluster", cluster, "--global-batch", str(batch)], plan)


def drawn(altiplano, count, seed, scratch):
    draw, end = random.Random(seed), time.monotonic() + float(os.environ.get("SECONDS", "1e9"))
    found = 0
    while found < count and time.monotonic() < end:
        family, config, words = pair(draw, scratch / "model")
        outcome = tried(altiplano, [str(scratch / "model"), *words], scratch / "plan.json")
        found += outcome[0] != "no plan"
        yield f"{family} {json.dumps(config)} {' '.join(words)}", outcome


def summary(outcomes, seconds):
    counts = Counter(kind for _, (kind, _, _) in outcomes)
    proofs = [certificate["seconds"] for _, (_, _, certificate) in outcomes if certificate]
    values = [certificate["values"] for _, (_, _, certificate) in outcomes if certificate]
    pairs = sum(counts.values()) - counts["no plan"]
    print(f"\n{counts['proved']} of {pairs} plans are proved, in {max(proofs, default=0):.2f} s at most and {sum(proofs):.1f} s together, "
          f"of {sum(values):,} local values. {counts['no plan']} pairs have no plan. {seconds:.0f} s in all.\n")
    for name, (kind, why, _) in outcomes:
        if kind in ("not proved", "failed"):
            print(f"* `{name}`: {why}")


def main():
    if len(sys.argv) < 3 or sys.argv[1] not in ("matrix", "random"):
        sys.exit(__doc__)
    altiplano, start, outcomes = binary(), time.monotonic(), []
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        if sys.argv[1] == "matrix":
            tries = matrix(altiplano, Path(sys.argv[2]), scratch / "plan.json")
        else:
            tries = drawn(altiplano, int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "1", scratch)
        for name, outcome in tries:
            outcomes.append((name, outcome))
            print(f"{outcome[0]}: {name} {outcome[1]}", flush=True)
    summary(outcomes, time.monotonic() - start)


if __name__ == "__main__":
    main()
