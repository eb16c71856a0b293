"""Writes functions of single ops as torch.export saves them, with inputs, results and gradients that PyTorch computes:
NAME.pt2 and NAME.safetensors.

    python torch_ops.py DIRECTORY [SUBSTRING...]        only cases whose names have one of the substrings

What is compared is described in examples/evaluate.rs. A gradient case is a loss, the sum of an op's results with weights, and
PyTorch's gradient of it with respect to the float arguments, which are parameters of the exported module.
"""

import logging
import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from safetensors.torch import save_file

import torch_cases

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
torch.set_num_threads(1)


class Values(torch.nn.Module):
    """The function of all its arguments."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *arguments):
        return self.function(*arguments)


class Loss(torch.nn.Module):
    """The sum of a function's float results with weights; its float arguments are trained."""

    def __init__(self, function, arguments, trained):
        super().__init__()
        self.function, self.count, self.trained = function, len(arguments), trained
        for i in trained:
            self.register_parameter(f"x{i}", torch.nn.Parameter(arguments[i].clone()))

    def forward(self, others, weights):
        others = list(others)
        arguments = [getattr(self, f"x{i}") if i in self.trained else others.pop(0) for i in range(self.count)]
        results = floats(listed(self.function(*arguments)))
        return sum((r.float() * w).sum() for r, w in zip(results, weights))


def listed(results):
    return list(results) if isinstance(results, (tuple, list)) else [results]


def floats(results):
    return [r for r in results if r.dtype.is_floating_point]


def allowed(case, dtype):
    epsilon = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, 2**-22)
    return torch.tensor([case.relative * epsilon, case.absolute * epsilon], dtype=torch.float32)


def storable(tensors):
    return {name: x.detach().contiguous().clone() for name, x in tensors.items()}


def write_values(path, case):
    arguments = case.arguments()
    results = listed(case.function(*[a.clone() for a in arguments]))
    torch.export.save(torch.export.export(Values(case.function), tuple(arguments), strict=False), f"{path}.pt2")
    tensors = {f"input/{i}": x for i, x in enumerate(arguments)}
    for i, x in enumerate(results):
        tensors |= {f"result/{i}": x, f"tolerance/{i}": allowed(case, x.dtype)}
    save_file(storable(tensors), f"{path}.safetensors")


def write_gradient(path, case):
    arguments = case.arguments()
    trained = [i for i, a in enumerate(arguments) if a.dtype.is_floating_point and i in case.trained]
    model = Loss(case.function, arguments, trained)
    others = tuple(a for i, a in enumerate(arguments) if i not in trained)
    results = floats(listed(case.function(*[a.clone() for a in arguments])))
    if not trained or not results:
        return
    generator = torch.Generator().manual_seed(len(case.name))
    weights = tuple(torch.randn(r.shape, generator=generator) for r in results)
    torch.export.save(torch.export.export(model, (others, weights), strict=False), f"{path}.pt2")
    loss = model(others, weights)
    loss.backward()
    terms = sum(float(((r.float() * w) ** 2).sum()) for r, w in zip(results, weights)) ** 0.5
    near = 32 * float(allowed(case, results[0].dtype).max()) * terms / max(abs(float(loss)), 1e-30)
    tensors = {"loss": loss, "tolerance/loss": torch.tensor([near, 0.0])}
    tensors |= {f"input/{i}": x for i, x in enumerate(others + weights)}
    for i in trained:
        x = getattr(model, f"x{i}")
        gradient = torch.zeros_like(x) if x.grad is None else x.grad
        tensors |= {f"x{i}": x, f"grad/x{i}": gradient, f"tolerance/grad/x{i}": 8 * allowed(case, x.dtype)}
    save_file(storable(tensors), f"{path}.safetensors")


def write_family(family, directory, wanted):
    number, failed = 0, []
    for case in torch_cases.FAMILIES[family]():
        if wanted and not any(word in case.name for word in wanted):
            continue
        for suffix, write in (("", write_values), ("_gradient", write_gradient)):
            if suffix and not case.trained:
                continue
            try:
                write(f"{directory}/{case.name}{suffix}", case)
                number += 1
            except Exception as error:
                failed.append(f"{case.name}{suffix}: {type(error).__name__}: {error}".splitlines()[0])
    return number, failed


def main(directory, wanted):
    with ProcessPoolExecutor(max_workers=os.cpu_count(), mp_context=get_context("spawn")) as pool:
        running = [pool.submit(write_family, f, directory, wanted) for f in torch_cases.FAMILIES]
        done = [r.result() for r in running]
    failed = [line for _, lines in done for line in lines]
    print("\n".join([f"NOT WRITTEN  {line}" for line in failed] + [f"{sum(n for n, _ in done)} cases"]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
