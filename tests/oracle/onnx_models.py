"""Writes whole models with what they compute: NAME.onnx and NAME.safetensors.

    python onnx_models.py DIRECTORY

Convolutional nets whose weights are left out of the `onnx` package (made up here, and computed by ONNX Runtime); and where
PyTorch can be imported, small models that both of its exporters write, with losses, whose gradients PyTorch computes.
"""

import io
import os
import sys
import warnings

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper
from safetensors.numpy import save_file

from onnx_files import storable, write

warnings.filterwarnings("ignore")


def held(model):
    """The tensors that become leaves, by name."""
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def light(directory):
    """Architectures of well-known nets, small enough for the interpreter; their weights are made by nodes that fill them with one number."""
    folder = os.path.join(os.path.dirname(onnx.__file__), "backend/test/data/light")
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".onnx") or not any(net in name for net in ("inception_v1", "shufflenet", "squeezenet")):
            continue
        model = onnx.load(os.path.join(folder, name))
        if max(o.version for o in model.opset_import if o.domain == "") < 7:
            continue
        given = [i for i in model.graph.input if i.name not in held(model)]
        shape = [d.dim_value for d in given[0].type.tensor_type.shape.dim]
        x = np.random.default_rng(1).random(shape, np.float32)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        # Of some hundred layers each rounds.
        write(f"{directory}/{name[:-5]}", model, {given[0].name: x}, session.run(None, {given[0].name: x}), (4096, 1024), held(model).items())


def models():
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Attention(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

        def forward(self, x):
            b, s, w = x.shape
            q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, w))

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.ln1, self.ln2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, 4)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x):
            x = x + self.attention(self.ln1(x))
            return x + self.mlp(self.ln2(x))

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(40, 16), nn.Embedding(12, 16)
            self.h, self.head = nn.ModuleList([Block(16), Block(16)]), nn.Linear(16, 40, bias=False)

        def forward(self, tokens, labels):
            x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.h:
                x = block(x)
            return F.cross_entropy(self.head(x).reshape(-1, 40), labels.reshape(-1))

    class Images(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, 2, 1), norm(8)
            self.conv2, self.conv3 = nn.Conv2d(8, 8, 3, 1, 2, dilation=2, groups=4), nn.ConvTranspose2d(8, 6, 3, 2, 1, 1)
            self.head = nn.Linear(6, 5)

        def forward(self, x, labels):
            x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 3, 2, 1)
            x = F.interpolate(F.silu(self.conv2(x)), scale_factor=2, mode="bilinear")
            x = F.avg_pool2d(F.hardswish(self.conv3(x)), 2)
            return F.cross_entropy(self.head(x.mean((2, 3))), labels)

    class Sequence(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer, self.head = layer(6, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x, target):
            return F.mse_loss(self.head(self.layer(x)[0]), target)

    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.gate, self.up = nn.Linear(8, 8, bias=False), nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
            self.down, self.weight = nn.Linear(16, 8, bias=False), nn.Parameter(torch.rand(8))

        def forward(self, x, target):
            position = torch.arange(x.shape[1], dtype=torch.float32)
            angle = position[:, None] * (10000.0 ** (-torch.arange(0, 4, dtype=torch.float32) / 4))[None]
            cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
            q = self.q(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight)
            q = q * cos + torch.cat([-q[..., 4:], q[..., :4]], -1) * sin
            return F.mse_loss(self.down(F.silu(self.gate(q)) * self.up(q)), target)

    tokens = lambda: (torch.randint(0, 40, (2, 12)), torch.randint(0, 40, (2, 12)))
    images = lambda: (torch.randn(3, 3, 16, 16), torch.randint(0, 5, (3,)))
    yield "transformer", Transformer(), tokens()
    yield "images_batch_norm", Images(nn.BatchNorm2d), images()
    yield "images_group_norm", Images(lambda n: nn.GroupNorm(2, n)), images()
    yield "lstm", Sequence(nn.LSTM), (torch.randn(2, 4, 6), torch.randn(2, 4, 3))
    yield "gru", Sequence(nn.GRU), (torch.randn(2, 4, 6), torch.randn(2, 4, 3))
    yield "rotary", Rotary(), (torch.randn(2, 5, 8), torch.randn(2, 5, 8))


def exported(directory):
    import torch

    torch.manual_seed(1)
    failed = []
    for name, module, inputs in models():
        # Exporters share tensors that are equal, such as the ones and zeros that norms begin with.
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
            for buffer in filter(torch.is_floating_point, module.buffers()):
                buffer.uniform_(0.5, 1.5)
        module.eval()
        # Norms may be folded into convolutions, so gradients are compared of those weights that are what they were.
        loss = module(*inputs)
        parameters = dict(module.named_parameters())
        gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()))))
        for dynamo in (True, False):
            path = f"{directory}/torch_{name}_{'new' if dynamo else 'old'}"
            try:
                if dynamo:
                    model = torch.onnx.export(module, inputs, dynamo=True, optimize=True).model_proto
                else:
                    file = io.BytesIO()
                    training = torch.onnx.TrainingMode.PRESERVE
                    torch.onnx.export(module, inputs, file, dynamo=False, opset_version=17, do_constant_folding=False, training=training)
                    model = onnx.ModelProto.FromString(file.getvalue())
                known = held(model)
                names = [i.name for i in model.graph.input if i.name not in known]
                tensors = {f"input/{n}": x.numpy() for n, x in zip(names, inputs)} | known
                tensors |= {"loss": loss.detach().numpy(), "tolerance/loss": np.array([1e-5, 0], np.float32)}
                for n, gradient in gradients.items():
                    if n in known and np.array_equal(known[n], parameters[n].detach().numpy()):
                        tensors[f"grad/{n}"] = gradient.numpy()
                        tensors[f"tolerance/grad/{n}"] = np.array([1e-4, 1e-5], np.float32)
                onnx.save(model, f"{path}.onnx")
                save_file({n: storable(x) for n, x in tensors.items()}, f"{path}.safetensors")
            except Exception as error:
                failed.append(f"{path}: {type(error).__name__}: {error}".splitlines()[0])
    return failed


def main(directory):
    onnxruntime.set_default_logger_severity(4)
    light(directory)
    try:
        import torch  # noqa: F401
    except ImportError:
        print("SKIPPED models that PyTorch exports: it is not installed")
        return 0
    failed = exported(directory)
    print("\n".join(f"NOT WRITTEN  {line}" for line in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
