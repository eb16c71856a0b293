"""Exports for PyTorch beside PyTorch on one device: two steps of SGD with momentum, and the gradients of the first, in two to four
CPU processes under torchrun. Each parameter must lie where the plan has it.

    with_torch.py ALTIPLANO FOLDER [MODEL[/PLAN]]...
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

torch.set_num_threads(1)
# Tolerance of losses, gradients and parameters, as the largest difference over the norm of the tensor.
TOLERANCE = 1e-5
HIDDEN, HEADS, VOCABULARY, SEQUENCE, BATCH, CLASSES = 32, 4, 64, 16, 8, 10

# Devices and options. Not all models have plans for all of them.
PLANS = {
    "dp": (2, ["--dp", "2", "--zero", "0"]),
    "zero1": (2, ["--dp", "2", "--zero", "1"]),
    "zero2-accumulated": (2, ["--dp", "2", "--zero", "2", "--num-microbatches", "2"]),
    "zero3": (2, ["--dp", "2", "--zero", "3"]),
    "zero3-recomputed": (2, ["--dp", "2", "--zero", "3", "--recompute", "full"]),
    "tp": (2, ["--tp", "2"]),
    "tp-recomputed": (2, ["--tp", "2", "--recompute", "full"]),
    "sequence": (2, ["--cp", "2"]),
    "dp-tp": (4, ["--dp", "2", "--tp", "2", "--zero", "0"]),
    "zero1-tp-accumulated": (4, ["--dp", "2", "--tp", "2", "--zero", "1", "--num-microbatches", "2"]),
    "zero3-tp": (4, ["--dp", "2", "--tp", "2", "--zero", "3"]),
    "groups-zero1": (4, ["--dp", "4", "--dp-replicate", "2", "--zero", "1"]),
    "groups-zero3": (4, ["--dp", "4", "--dp-replicate", "2", "--zero", "3"]),
    "experts": (2, ["--ep", "2"]),
    "experts-part": (4, ["--dp", "4", "--ep", "2", "--zero", "1"]),
    "frozen": (4, ["--dp", "2", "--tp", "2", "--zero", "1", "--freeze", "*.0.*"]),
    "searched": (4, []),
}
PIPELINES = {
    "1f1b": (2, ["--pp", "2", "--num-microbatches", "4", "--schedule", "1f1b"]),
    "gpipe": (2, ["--pp", "2", "--num-microbatches", "2", "--schedule", "gpipe"]),
    "zb-h1": (2, ["--pp", "2", "--num-microbatches", "4", "--schedule", "zb-h1"]),
    "zb-v": (2, ["--pp", "2", "--num-microbatches", "4", "--schedule", "zb-v"]),
    "dualpipe-v": (2, ["--pp", "2", "--num-microbatches", "4", "--schedule", "dualpipe-v"]),
    "found": (4, ["--pp", "4", "--num-microbatches", "8", "--schedule", "found"]),
    "interleaved": (2, ["--pp", "2", "--num-microbatches", "4", "--virtual-stages", "2"]),
    "1f1b-dp": (4, ["--pp", "2", "--dp", "2", "--zero", "0", "--num-microbatches", "2"]),
    "zb-h1-zero1": (4, ["--pp", "2", "--dp", "2", "--zero", "1", "--num-microbatches", "2", "--schedule", "zb-h1"]),
    "1f1b-zero3": (4, ["--pp", "2", "--dp", "2", "--zero", "3", "--num-microbatches", "2"]),
    "1f1b-recomputed": (2, ["--pp", "2", "--num-microbatches", "2", "--recompute", "full"]),
    "1f1b-tp": (4, ["--pp", "2", "--tp", "2", "--num-microbatches", "2"]),
}


class Attention(nn.Module):
    """Queries, keys and values of one matrix, or of three with fewer heads of keys."""

    def __init__(self, packed, causal, key_heads=HEADS):
        super().__init__()
        self.causal, self.key_heads, size = causal, key_heads, HIDDEN // HEADS
        if packed:
            self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        else:
            self.q, self.k, self.v = (nn.Linear(HIDDEN, n * size, bias=False) for n in (HEADS, key_heads, key_heads))
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=packed)

    def forward(self, x, rotated=None):
        parts = self.qkv(x).split(HIDDEN, dim=-1) if hasattr(self, "qkv") else (self.q(x), self.k(x), self.v(x))
        q, k, v = (p.view(*x.shape[:2], -1, HIDDEN // HEADS).transpose(1, 2) for p in parts)
        if rotated is not None:
            q, k = rotated(q), rotated(k)
        if self.key_heads < HEADS:
            k, v = (p.repeat_interleave(HEADS // self.key_heads, dim=1) for p in (k, v))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(x.transpose(1, 2).reshape(x.shape[0], -1, HIDDEN))


class Block(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(HIDDEN), Attention(True, causal)
        self.ln_2, self.fc, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.out(F.gelu(self.fc(self.ln_2(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.h = nn.ModuleList(Block(True) for _ in range(4))
        self.ln_f, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


def angles(length):
    """Cosines and sines of rotary positions."""
    rates = 10000.0 ** (-torch.arange(0, HIDDEN // HEADS, 2) / (HIDDEN // HEADS))
    angle = torch.arange(length)[:, None] * torch.cat([rates, rates])[None]
    return angle.cos(), angle.sin()


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Experts of which each token takes two. All are computed, and the others count nothing."""

    def __init__(self, count=4):
        super().__init__()
        self.router = nn.Linear(HIDDEN, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, HIDDEN, 2 * HIDDEN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(count, 2 * HIDDEN, HIDDEN) / (2 * HIDDEN) ** 0.5)

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        least = scores.topk(2, dim=-1).values[..., -1:]
        weights = torch.where(scores >= least, scores, torch.zeros_like(scores))
        hidden = F.silu(torch.einsum("bth,ehf->betf", x, self.up))
        return torch.einsum("betf,efh,bte->bth", hidden, self.down, weights)


class Layer(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.norm_1, self.attn = nn.RMSNorm(HIDDEN, eps=1e-5), Attention(False, True, key_heads=2)
        self.norm_2, self.mlp = nn.RMSNorm(HIDDEN, eps=1e-5), mlp()

    def forward(self, x, cos, sin):
        def rotated(x):
            first, second = x.chunk(2, dim=-1)
            return x * cos + torch.cat([-second, first], dim=-1) * sin

        x = x + self.attn(self.norm_1(x), rotated)
        return x + self.mlp(self.norm_2(x))


class Llama(nn.Module):
    def __init__(self, mlp=Gated):
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCABULARY, HIDDEN), nn.ModuleList(Layer(mlp) for _ in range(4))
        self.norm, self.head = nn.RMSNorm(HIDDEN, eps=1e-5), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        cos, sin = angles(SEQUENCE)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


class Vit(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, HIDDEN, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, HIDDEN) / HIDDEN**0.5)
        self.positions = nn.Parameter(0.1 * torch.randn(1, 17, HIDDEN))
        self.blocks = nn.Sequential(*(Block(False) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class Images(nn.Module):
    """A convolutional net with residual blocks."""

    class Block(nn.Module):
        def __init__(self, channels, norm):
            super().__init__()
            # A gradient of a bias before a norm would vanish.
            convolutions = (nn.Conv2d(channels, channels, 3, padding=1, bias=norm is nn.Identity) for _ in range(2))
            self.first, self.second = convolutions
            self.norm_1, self.norm_2 = norm(channels), norm(channels)

        def forward(self, x):
            return F.relu(x + self.norm_2(self.second(F.relu(self.norm_1(self.first(x))))))

    def __init__(self, norm=nn.Identity):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.blocks = nn.ModuleList(Images.Block(16, norm) for _ in range(4))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images):
        x = F.relu(self.stem(images))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def tokens_and_labels():
    return {name: torch.randint(0, VOCABULARY, (BATCH, SEQUENCE)) for name in ("tokens", "labels")}


def images_and_labels():
    return {"images": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(0, CLASSES, (BATCH,))}


def ids_and_labels():
    tokens, labels = tokens_and_labels().values()
    return {"input_ids": tokens, "labels": labels}


def of_transformers():
    """Models of Transformers, by configs that are planned without the model."""
    if importlib.util.find_spec("transformers") is None:
        if "--worker" not in sys.argv:
            print("SKIPPED tests/oracle exports of Hugging Face configs: there is no transformers", flush=True)
        return {}
    import transformers

    transformers.logging.set_verbosity_error()
    size = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": 4}
    llama = size | {"intermediate_size": 2 * HIDDEN, "num_key_value_heads": 2, "max_position_embeddings": SEQUENCE}
    gpt2 = {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_head": HEADS, "n_layer": 4, "n_positions": SEQUENCE}
    gpt2 |= dict.fromkeys(["attn_pdrop", "embd_pdrop", "resid_pdrop", "bos_token_id", "eos_token_id"], 0)
    plain = {"use_cache": False}

    def model(kind, config, **options):
        return lambda: getattr(transformers, kind)(config(**options, **plain))

    return {
        "hf-llama": (model("LlamaForCausalLM", transformers.LlamaConfig, **llama), ids_and_labels),
        "hf-gpt2": (model("GPT2LMHeadModel", transformers.GPT2Config, **gpt2), ids_and_labels),
    }


MODELS = {
    "gpt": (Gpt, tokens_and_labels),
    "llama": (Llama, tokens_and_labels),
    "experts": (lambda: Llama(Experts), tokens_and_labels),
    "vit": (Vit, images_and_labels),
    "images": (Images, images_and_labels),
    "batch-norm": (lambda: Images(nn.BatchNorm2d), images_and_labels),
} | of_transformers()


def model_and_batch(name):
    torch.manual_seed(1)
    model, batch = MODELS[name]
    return model(), batch()


def criterion(result, labels):
    result = getattr(result, "logits", result)
    return F.cross_entropy(result.reshape(-1, result.shape[-1]), labels.reshape(-1))


def loss(module, labels, **inputs):
    return criterion(module(*inputs.values()), labels)


def optimizer_of(parameters):
    # AdamW would bring the rounding of gradients that vanish to full size.
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9)


def named(module):
    """Parameters by all their names."""
    return module.named_parameters(remove_duplicate=False)


def on_one_device(name, frozen):
    module, inputs = model_and_batch(name)
    for key, parameter in named(module):
        parameter.requires_grad_(key not in frozen)
    optimizer, losses, gradients = optimizer_of(module.parameters()), [], None
    for _ in range(2):
        optimizer.zero_grad()
        value = loss(module, **inputs)
        value.backward()
        gradients = gradients or {name: p.grad.clone() for name, p in named(module) if p.grad is not None}
        optimizer.step()
        losses.append(value.item())
    return losses, gradients, {name: p.detach() for name, p in named(module)}


def whole(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def difference(found, expected):
    return float((found - expected).abs().max() / expected.norm().clamp_min(1e-30))


def as_planned(file, own, parameters):
    """The names of parameters of which this process has other elements than the plan gives to its device."""
    stages = json.loads(file.read_text())["stages"]
    wrong = []
    for name, parameter in parameters.items():
        own_stages = [s for s in stages if name in s["parameters"] and dist.get_rank() in s["devices"]]
        stage = next(iter(own_stages), None)
        if stage is None:
            wrong.append(f"{name} is of another stage")
            continue
        axes, storage = stage["mesh"]["axes"], stage["parameters"][name]
        coordinates, rest = [], stage["devices"].index(dist.get_rank())
        for axis in reversed(axes):
            coordinates.insert(0, rest % axis["size"])
            rest //= axis["size"]
        expected = own[name]
        # FSDP2 stores what ZeRO-1 and ZeRO-2 split in parts between steps.
        layout, of_data = storage["parameter"], storage["state"]
        for dim, (planned, state) in enumerate(zip(layout["dims"], of_data["dims"])):
            first = planned["segments"][0]["axes"]
            more = [axis for axis in state["segments"][0]["axes"] if axis not in first and axes[axis]["name"] in plan_data]
            for axis in [*first, *more]:
                expected = expected.chunk(axes[axis]["size"], dim)[coordinates[axis]]
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if local.shape != expected.shape or not torch.equal(local.detach(), expected):
            wrong.append(f"{name} has {list(local.shape)}, planned {list(expected.shape)}")
    return wrong


def trained(module_of_plan, name, file):
    """What is wrong with two steps of an exported plan. Empty if nothing is."""
    global plan_data
    plan, plan_data = module_of_plan, module_of_plan.DATA
    module, inputs = model_and_batch(name)
    own = {name: p.detach().clone() for name, p in named(module)}
    losses, gradients, weights = on_one_device(name, plan.FROZEN)
    mesh = plan.mesh("cpu")
    if plan.STAGES > 1:
        module, of_step = plan.Pipeline(module, mesh, inputs, criterion), None
        parts = [stage.part for stage in module.stages]
    else:
        module, of_step = plan.parallelize(module, mesh), loss
        parts = [module]

    def parameters():
        return {name: owners[0][0]._parameters[owners[0][1]] for part in parts for name, owners in plan._names(part).items()}

    for part in parts:
        for key, found in plan.placements(part).items():
            if found != plan.PARAMETERS[key]:
                return f"{key} lies as {found}"
    wrong = [None] * dist.get_world_size()
    dist.all_gather_object(wrong, as_planned(file, own, parameters()))
    if wrong := [text for of_process in wrong for text in of_process]:
        return "; ".join(wrong[:3])
    optimizer, part, worst = optimizer_of(module.parameters()), plan.shard_inputs(inputs, mesh), []
    for step, expected in enumerate(losses):
        if step == 0:
            value, found = plan.loss_and_gradients(module, part, mesh, of_step)
            worst += [(difference(whole(found[key]), gradients[key]), f"gradient of {key}") for key in found]
            if set(found) != set(parameters()) - set(plan.FROZEN):
                return "gradients are not those of the trained parameters"
        value = plan.train_step(module, optimizer, part, mesh, of_step)
        worst.append((abs(float(value) - expected) / abs(expected), f"loss of step {step + 1}"))
    worst += [(difference(whole(p), weights[key]), f"updated {key}") for key, p in parameters().items()]
    off = max(worst)
    return "" if off[0] <= TOLERANCE else f"{off[1]}: {off[0]:.1e} off"


def worker(folder, cases):
    # Processes of a loaded machine start far apart.
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    for case in cases:
        name, _ = case.split("/")
        file = folder / case.replace("/", "-")
        try:
            wrong = trained(imported(file.with_suffix(".py")), name, file.with_suffix(".json"))
        except Exception as error:
            traceback.print_exc()
            wrong = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        said = [None] * dist.get_world_size()
        dist.all_gather_object(said, wrong)
        if dist.get_rank() == 0:
            wrong = next((f"process {i}: {text}" for i, text in enumerate(said) if text), "")
            print(f"FAILED       {case} {wrong}" if wrong else f"ok           {case}", flush=True)
    dist.destroy_process_group()


def imported(file):
    spec = importlib.util.spec_from_file_location(file.stem.replace("-", "_"), file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def planned(altiplano, model, devices, options, file):
    options = options if "--pp" in options else [*options, "--pp", "1"]
    command = [altiplano, "plan", *model, "--cluster", f"local:{devices}", *options, "-o", file]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr.strip().splitlines()[0] if done.returncode else ""


def ran(devices, folder, cases, log):
    """Runs cases in one job. A process that fails alone lets the others wait, which ends the job."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(devices), __file__, "--worker", folder]
    with log.open("w") as errors:
        job = subprocess.Popen([*command, *cases], stdout=subprocess.PIPE, stderr=errors, text=True)
        ended, failed = [], False
        for line in job.stdout:
            print(line, end="", flush=True)
            # Libraries of the workers may print too.
            if said := re.match(r"(ok|FAILED) +(\S+)", line):
                ended.append(said[2])
                failed |= said[1] == "FAILED"
    job.wait()
    for case in cases:
        if case not in ended:
            print(f"FAILED       {case}: the job ended before; the end of its log:\n{log.read_text()[-3000:]}")
    return job.returncode == 0 and not failed and len(ended) == len(cases)


def main(altiplano, folder, wanted):
    # Processes take long to start, so that one job of each size runs the cases of all models.
    failed, by_size = False, {2: [], 4: []}
    for name in MODELS:
        module, inputs = model_and_batch(name)
        if hasattr(module, "config"):
            file, options = folder / f"{name}.config.json", ["--seq", str(SEQUENCE), "--global-batch", str(BATCH)]
            module.config.to_json_file(file)
        else:
            file, options = folder / f"{name}.pt2", ["--loss", "cross-entropy"]
            args = tuple(x for key, x in inputs.items() if key != "labels")
            torch.export.save(torch.export.export(module, args), file)
        model = [file, *options]
        for plan, (devices, options) in (PLANS | PIPELINES).items():
            case = f"{name}/{plan}"
            if wanted and not any(word in (name, case, plan) for word in wanted):
                continue
            file = folder / case.replace("/", "-")
            if refused := planned(altiplano, model, devices, options, file.with_suffix(".json")):
                print(f"no plan      {case}: {refused}")
                continue
            command = [altiplano, "export", file.with_suffix(".json"), "--to", "torch", "-o", file.with_suffix(".py")]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"refused      {case}: {done.stderr.strip().splitlines()[0]}")
                failed |= done.returncode != 2
                continue
            by_size[devices].append(case)
    for devices, cases in by_size.items():
        failed |= bool(cases) and not ran(devices, folder, cases, folder / f"log-{devices}")
    return failed


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        worker(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
