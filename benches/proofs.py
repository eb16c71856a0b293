#!/usr/bin/env python3
"""Plans and proves pairs of models and clusters, and says which plans are not proved and why.

    benches/proofs.py large [MODELS]         large plans of every kind of parallelism, with the peak memory of proving
    benches/proofs.py matrix MODELS          six models in a folder, each on ten clusters
    benches/proofs.py zoo MODELS             every model in a folder, under five plans
    benches/proofs.py random COUNT [SEED]    random configs, clusters and options; the seed alone decides which

ALTIPLANO=a binary, else `cargo build --release` makes one; PATIENCE=60 seconds for a pair; SECONDS ends a random run early.
Pairs without a plan, by the options or by memory, are counted and replaced. The last lines are a summary in Markdown.
"""

import json
import os
import random
import shlex
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


GPT3 = {"model_type": "gpt2", "n_layer": 48, "n_embd": 8192, "n_head": 64, "n_positions": 1024, "vocab_size": 50257}
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}
LLAMA_405B = LLAMA | {"num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128}
MIXTRAL = {
    "model_type": "mixtral", "num_hidden_layers": 56, "hidden_size": 6144, "intermediate_size": 16384, "num_attention_heads": 48,
    "num_key_value_heads": 8, "vocab_size": 32768, "max_position_embeddings": 65536, "num_local_experts": 8, "num_experts_per_tok": 2,
    "torch_dtype": "bfloat16",
}
QWEN3 = {
    "model_type": "qwen3_moe", "num_hidden_layers": 94, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "torch_dtype": "bfloat16",
}
T5 = {"model_type": "t5", "d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24, "num_heads": 128, "vocab_size": 32128}
BF16 = "--precision bf16"
# Files are those of the folder; configs need none.
LARGE = [
    ("Llama-3 405B", LLAMA_405B, "--cluster dgx-h100:2048 --seq 8192 --global-batch 2048"),
    ("GPT-3 39B, loss scaling", "gpt3-39b.mlir", "--cluster p3.16xlarge:8 --global-batch 1024 --loss-scale dynamic"),
    ("Mixtral 8x22B, experts over two nodes", MIXTRAL, "--cluster 16x4xH100 --seq 4096 --global-batch 256 --pp 1 --ep 8"),
    ("Qwen3 235B, experts over eight nodes", QWEN3, "--cluster dgx-h100:16 --seq 4096 --global-batch 1024 --ep 64"),
    ("Wide-ResNet", "wresnet50-1b.mlir", "--cluster p3.16xlarge:2"),
    ("Wide-ResNet, rows of images split", "wresnet50-1b.mlir", "--cluster p3.16xlarge:1 --dp 4 --tp 2 --pp 1 --pin 'images=[{}, {tensor}, {}, {}]'"),
    ("T5 11B, uneven stages", T5, f"--cluster p4d.24xlarge:3 --seq 512 --global-batch 192 --pp 2 --stage-devices 8,16 {BF16}"),
    ("dropout", "flax-dropout.mlir", "--cluster p3.16xlarge:1 --dp 2 --tp 4"),
    ("GPT-3 39B, tied embeddings, ZeRO 1", GPT3, f"--cluster dgx-h100:8 --global-batch 512 --pp 2 --zero 1 {BF16}"),
    ("GPT-3 39B, ZeRO 2", GPT3, f"--cluster dgx-h100:8 --global-batch 512 --pp 1 --zero 2 --recompute full {BF16}"),
    ("GPT-3 39B, ZeRO 3, clipped", GPT3, f"--cluster dgx-h100:8 --global-batch 512 --pp 1 --zero 3 --clip-norm 1 {BF16}"),
    ("Llama-3 70B, rings", LLAMA, "--cluster dgx-h100:4 --seq 131072 --global-batch 8 --cp 8 --ring 8"),
    ("Llama-3 70B, interleaved", LLAMA, "--cluster dgx-h100:8 --seq 8192 --global-batch 256 --virtual-stages 2 --clip-norm 1"),
    ("Llama-3 70B, 32 accumulated microbatches", LLAMA, "--cluster dgx-h100:8 --seq 8192 --global-batch 512 --pp 1 --zero 3 --num-microbatches 32"),
    ("Llama-3 70B, zb-h1", LLAMA, "--cluster dgx-h100:8 --seq 8192 --global-batch 256 --tp 8 --pp 8 --schedule zb-h1"),
    ("GPT-3 39B, padded vocabulary, tensors split", GPT3, f"--cluster dgx-h100:2 --global-batch 64 --tp 8 --pp 1 {BF16}"),
    ("Llama-3 70B, f16, loss scaling, clipped", LLAMA, "--cluster dgx-a100:8 --seq 4096 --global-batch 256 --precision f16 --loss-scale dynamic --clip-norm 1"),
]
PLANS = ["--cluster local:1", "--dp 2", "--tp 2", "--pp 2", "--cluster local:4"]


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


def large(altiplano, models, scratch):
    """Plans each of the large requests, proves the plan in another process, and prints a row with its peak memory."""
    print("| plan | devices of stages | proved in | process | peak memory |\n|---|---|--:|--:|--:|")
    for name, model, words in LARGE:
        if isinstance(model, str):
            if not models:
                continue
            file = models / model
        else:
            file = scratch / "config.json"
            file.write_text(json.dumps(model))
        plan = scratch / "plan.json"
        plan.unlink(missing_ok=True)
        planned = subprocess.run([altiplano, "plan", file, *shlex.split(words), "-o", plan], capture_output=True, text=True)
        if not plan.exists():
            outcome = "no plan", (planned.stderr.strip().splitlines() or ["?"])[-1], None
            print(f"| {name} `{words}` | | no plan: {outcome[1]} | | |", flush=True)
            yield name, outcome
            continue
        begun = time.monotonic()
        process = subprocess.Popen([altiplano, "prove", plan, "--json"], stdout=subprocess.PIPE, text=True)
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.monotonic() - begun
        certificate = json.loads(said) if os.waitstatus_to_exitcode(status) == 0 else None
        outcome = ("proved" if certificate else "not proved", "", certificate)
        devices = Counter(len(stage["devices"]) for stage in json.loads(plan.read_text())["stages"])
        stages = ", ".join(f"{count} x {size}" for size, count in devices.items())
        proof = f"{certificate['seconds']:.2f} s" if certificate else "not proved"
        print(f"| {name}: `{words}` | {stages} | {proof} | {seconds:.1f} s | {used.ru_maxrss // 1024} MB |", flush=True)
        yield name, outcome


def zoo(altiplano, models, plan):
    for model in sorted(models.glob("*.mlir")):
        for words in PLANS:
            yield f"{model.name} {words}", tried(altiplano, [str(model), *words.split()], plan)


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
    if len(sys.argv) < 2 or sys.argv[1] not in ("large", "matrix", "zoo", "random") or sys.argv[1] != "large" and len(sys.argv) < 3:
        sys.exit(__doc__)
    altiplano, start, outcomes = binary(), time.monotonic(), []
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        if sys.argv[1] == "large":
            tries = large(altiplano, Path(sys.argv[2]) if len(sys.argv) > 2 else None, scratch)
        elif sys.argv[1] == "zoo":
            tries = zoo(altiplano, Path(sys.argv[2]), scratch / "plan.json")
        elif sys.argv[1] == "matrix":
            tries = matrix(altiplano, Path(sys.argv[2]), scratch / "plan.json")
        else:
            tries = drawn(altiplano, int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "1", scratch)
        for name, outcome in tries:
            outcomes.append((name, outcome))
            if sys.argv[1] != "large":
                print(f"{outcome[0]}: {name} {outcome[1]}", flush=True)
    summary(outcomes, time.monotonic() - start)


if __name__ == "__main__":
    main()
