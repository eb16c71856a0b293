"""What PyTorch makes of a GPU: the rate of large matrix products, how far bf16 is from f32, and seconds of a training step, the latter
two of GPT-2's architecture.

    gpu_torch.py peak
    gpu_torch.py error LAYERS WIDTH HEADS BATCH SEQUENCE VOCABULARY
    gpu_torch.py step LAYERS WIDTH HEADS BATCH SEQUENCE f32|bf16 eager|compile [STEPS]

With bf16, weights and AdamW's state are kept in f32 and cast for the forward pass, as `altiplano run --precision bf16` has it; AdamW is fused.
Prints one line: the best rate in TFLOP/s, the relative differences of the loss and of gradients (the greatest of an element, beside the
greatest element of its tensor, of all tensors the worst), or the median step in milliseconds and the peak memory in GB.
"""

import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        split = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Model(nn.Module):
    # 50257 tokens, rounded up to a multiple of 8 as plans pad them.
    def __init__(self, layers, width, heads, length, vocabulary=50264):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, ids, labels):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.T
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def peak():
    best = 0.0
    for size in (4096, 8192, 16384):
        a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        times = []
        for _ in range(12):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            a @ b
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        best = max(best, 2 * size**3 / statistics.median(times[2:]) / 1e12)
    print(f"{best:.1f}")


def error(layers, width, heads, batch, length, vocabulary):
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The same weights twice: rounded to bf16 in both, so that only what is computed with them differs.
    narrow = Model(layers, width, heads, length, vocabulary).to(device, torch.bfloat16)
    wide = Model(layers, width, heads, length, vocabulary).to(device)
    wide.load_state_dict({name: tensor.float() for name, tensor in narrow.state_dict().items()})
    ids = torch.randint(0, vocabulary, (batch, length + 1), device=device)
    losses = [model(ids[:, :-1], ids[:, 1:]) for model in (wide, narrow)]
    for loss in losses:
        loss.backward()
    pairs = [(a.grad, b.grad.float()) for a, b in zip(wide.parameters(), narrow.parameters())]
    worst = max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs if a.abs().max() > 0)
    print(f"{abs(losses[1].item() / losses[0].item() - 1):.2e} {worst:.2e}")


def step(layers, width, heads, batch, length, precision, mode, steps=12):
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[precision]
    with torch.device("cuda"):
        model = Model(layers, width, heads, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def forward(ids, labels):
        weights = {name: weight.to(dtype) for name, weight in model.named_parameters()}
        return torch.func.functional_call(model, weights, (ids, labels))

    if mode == "compile":
        forward = torch.compile(forward)
    ids = torch.randint(0, 50257, (batch, length + 1), device="cuda")
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        forward(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    print(f"{1e3 * statistics.median(times[steps // 3 :]):.2f} {torch.cuda.max_memory_allocated() / 1e9:.2f}")


if __name__ == "__main__":
    if sys.argv[1] == "peak":
        peak()
    elif sys.argv[1] == "error":
        error(*[int(n) for n in sys.argv[2:8]])
    else:
        numbers, names = [int(n) for n in sys.argv[2:7]], sys.argv[7:9]
        step(*numbers, *names, *[int(n) for n in sys.argv[9:]])
