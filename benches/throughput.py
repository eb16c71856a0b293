"""Trains the model of gpt2-small.mlir with PyTorch on this machine's CPU, and tells each step's loss and seconds.

    benches/throughput.py prepare FOLDER            writes weights.safetensors and data.safetensors for both sides
    benches/throughput.py train FOLDER STEPS [BATCH] [THREADS]

It is written as PyTorch's users would write it to be fast: attention by scaled_dot_product_attention, a fused AdamW.
"""

import sys
import time

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

HIDDEN, LAYERS, HEADS, LENGTH, VOCABULARY = 768, 12, 12, 1024, 50257
SAMPLES = 8
SHAPES = {
    "fc": {"b": (4 * HIDDEN,), "w": (HIDDEN, 4 * HIDDEN)},
    "ln1": {"b": (HIDDEN,), "g": (HIDDEN,)},
    "ln2": {"b": (HIDDEN,), "g": (HIDDEN,)},
    "out": {"b": (HIDDEN,), "w": (4 * HIDDEN, HIDDEN)},
    "proj": {"b": (HIDDEN,), "w": (HIDDEN, HIDDEN)},
    "qkv": {"b": (3 * HIDDEN,), "w": (HIDDEN, 3 * HIDDEN)},
}


def prepare(folder):
    torch.manual_seed(0)
    weights = {"params['wte']": (VOCABULARY, HIDDEN), "params['wpe']": (LENGTH, HIDDEN)}
    weights |= {f"params['lnf']['{part}']": (HIDDEN,) for part in "bg"}
    for layer in range(LAYERS):
        for block, parts in SHAPES.items():
            weights |= {f"params['h{layer:03}']['{block}']['{part}']": shape for part, shape in parts.items()}
    value = {"b": torch.zeros, "g": torch.ones}
    make = lambda name, shape: value.get(name[-3], lambda s: 0.02 * torch.randn(s))(shape)
    save_file({name: make(name, shape) for name, shape in weights.items()}, f"{folder}/weights.safetensors")
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), dtype=torch.int32)
    data = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    save_file(data, f"{folder}/data.safetensors")


def loss_of(w, tokens, labels):
    batch = tokens.shape[0]
    norm = lambda x, p: F.layer_norm(x, (HIDDEN,), w[f"{p}['g']"], w[f"{p}['b']"], 1e-5)
    linear = lambda x, p: x @ w[f"{p}['w']"] + w[f"{p}['b']"]
    x = w["params['wte']"][tokens] + w["params['wpe']"]
    for layer in range(LAYERS):
        p = f"params['h{layer:03}']"
        heads = linear(norm(x, f"{p}['ln1']"), f"{p}['qkv']").view(batch, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + linear(mixed.transpose(1, 2).reshape(batch, LENGTH, HIDDEN), f"{p}['proj']")
        wide = F.gelu(linear(norm(x, f"{p}['ln2']"), f"{p}['fc']"), approximate="tanh")
        x = x + linear(wide, f"{p}['out']")
    logits = norm(x, "params['lnf']") @ w["params['wte']"].T
    return F.cross_entropy(logits.view(-1, VOCABULARY), labels.reshape(-1))


def train(folder, steps, batch):
    weights = {name: t.requires_grad_() for name, t in load_file(f"{folder}/weights.safetensors").items()}
    data = {name: t.long() for name, t in load_file(f"{folder}/data.safetensors").items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3, weight_decay=0.0, fused=True)
    for step in range(steps):
        rows = slice(step * batch % SAMPLES, step * batch % SAMPLES + batch)
        start, busy = time.perf_counter(), time.process_time()
        loss = loss_of(weights, data["tokens"][rows], data["labels"][rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        print(f"step {step + 1:4}  loss {loss.item():.6f}  {seconds:.3f} s/step  {busy:.3f} s of CPU", flush=True)


if sys.argv[1] == "prepare":
    prepare(sys.argv[2])
else:
    torch.set_num_threads(int(sys.argv[5]) if len(sys.argv) > 5 else 2)
    train(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 1)
