"""Models of frameworks as files: what the program reads. torch and jax are imported only where a model is theirs."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ._errors import Error, ModelError, OptionError


@contextlib.contextmanager
def as_file(model: Any, example_inputs: Any = None, batch_is_known: bool = False) -> Iterator[str]:
    """The path of a file that holds `model`, for the time of a `with`. A failure of the program in it that names this
    file comes out with a place in the model itself.

    `batch_is_known`: the caller says which dimensions grow with the batch, so that one sample will do.

    Raises:
        ModelError: The model cannot be exported. The exception names the place and what helps.
    """
    if isinstance(model, (str, os.PathLike)):
        _no_inputs(example_inputs, "a file")
        yield _path(model)
        return
    with tempfile.TemporaryDirectory(prefix="altiplano-") as folder:
        file, program = _written(model, example_inputs, Path(folder), batch_is_known)
        try:
            yield file
        except Error as error:
            _name_in_model(error, file, program)
            raise


def _name_in_model(error: Error, file: str, program: Any) -> None:
    """Replaces the temporary file in a failure by the model, and its lines by those of the user's code."""
    if file not in error.message:
        return
    place = re.search(re.escape(file) + r":(\d+):\d+", error.message)
    line = int(place[1]) if place else None
    found = _traced_from(file, line) if file.endswith(".mlir") and line else _node_from(program, error.message)
    name = Path(file).stem
    error.message = re.sub(re.escape(file) + r"(:\d+:\d+)?", name, error.message)
    error.args = (error.message,)
    error.place = found or "model"
    error.remedies = error.remedies or [
        remedy for words, remedies in _REMEDIES.items() if words in error.message for remedy in remedies
    ] or ["`altiplano show` lists what the exported model computes"]


#: What helps, by words of the failure.
_REMEDIES = {
    "not supported": [
        "compute it by other operations; docs/ops.md lists those that are supported",
        "compute it before the step, and pass the result as an input",
    ],
    "so no loss": [
        "loss='cross-entropy', 'mse' or 'none'",
        "a function or module that returns the loss of the batch as a floating-point scalar",
    ],
    "which arguments are trained": ["params=[...] or inputs=[...], by position, range or name"],
    "element types": ["example inputs of the types that the model is trained with"],
    "model_type": ["plan the module itself, with example_inputs"],
}


def _traced_from(file: str, line: int) -> str | None:
    """The user's line in the locations that a StableHLO text gives for one of its lines."""
    lines = Path(file).read_text().splitlines()
    if line > len(lines):
        return None
    locations = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", "\n".join(lines), re.MULTILINE))
    # The line itself, and the call of the function that it is in.
    end = next((text for text in lines[line:] if text.startswith("  } loc(")), "")
    pending, seen = re.findall(r"loc\((#loc\d*)\)", f"{lines[line - 1]} {end}"), set()
    while pending:
        name = pending.pop(0)
        if name in seen:
            continue
        seen.add(name)
        text = locations.get(name, "")
        for path, at in re.findall(r'"([^"]+)":(\d+):\d+', text):
            if _is_of_user(path):
                return f"{path}:{at}"
        pending += re.findall(r"#loc\d*", text)
    return None


def _node_from(program: Any, message: str) -> str | None:
    """The user's line of a node of a traced module that a failure names."""
    graph = getattr(program, "graph", None)
    names = set(re.findall(r"\w+", message))
    for node in getattr(graph, "nodes", ()):
        if node.op == "call_function" and node.name in names:
            frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
            own = [f"{path}:{at}" for path, at in frames if _is_of_user(path)]
            return own[-1] if own else node.name
    return None


def _written(model: Any, example_inputs: Any, folder: Path, batch_is_known: bool) -> tuple[str, Any]:
    """The file of a model, and the program of torch.export in it, if it holds one."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return _of_module(torch, model, example_inputs, folder, batch_is_known)
    if torch is not None and isinstance(model, torch.export.ExportedProgram):
        _no_inputs(example_inputs, "an exported program")
        file = folder / "model.pt2"
        torch.export.save(model, file)
        return str(file), model
    if isinstance(model, Mapping) or hasattr(model, "model_type") and hasattr(model, "to_dict"):
        _no_inputs(example_inputs, "a config")
        config = dict(model) if isinstance(model, Mapping) else model.to_dict()
        file = folder / f"{config.get('model_type', 'model')}.json"
        file.write_text(json.dumps(config, default=str))
        return str(file), None
    if hasattr(model, "as_text"):
        _no_inputs(example_inputs, "a lowered function")
        return _of_lowered(model, "model", folder), None
    if callable(model) and not inspect.isclass(model):
        return _of_function(model, example_inputs, folder, batch_is_known), None
    raise ModelError(
        f"a {type(model).__name__} is no model",
        place="model",
        remedies=[
            "a torch.nn.Module with example_inputs",
            "a JAX function of parameters and batch that returns its loss, with example_inputs",
            "a Hugging Face config, or the path of a file that `altiplano plan` reads",
        ],
    )


def _no_inputs(example_inputs: Any, what: str) -> None:
    if example_inputs is not None:
        raise OptionError(f"{what} needs no example inputs", place="example_inputs")


def _path(model: str | os.PathLike[str]) -> str:
    path = Path(model)
    if (path / "config.json").is_file():
        return str(path / "config.json")
    if path.exists() or isinstance(model, os.PathLike) or path.suffix or "transformers" not in sys.modules:
        # The program says what is wrong with a file.
        return os.fspath(model)
    # A model id that transformers has on disk.
    transformers = sys.modules["transformers"]
    try:
        found = transformers.utils.cached_file(str(model), "config.json", local_files_only=True)
    except OSError as error:
        raise ModelError(
            f"'{model}' is no file, and no model of this id is on disk: {error}",
            place="model",
            remedies=[f"transformers.AutoConfig.from_pretrained({str(model)!r}), which fetches its config"],
        ) from error
    return str(found)


def _of_module(
    torch: Any, module: Any, example_inputs: Any, folder: Path, batch_is_known: bool
) -> tuple[str, Any]:
    args, kwargs = _call(example_inputs)
    if not args and not kwargs:
        raise ModelError(
            "a torch.nn.Module is exported with example inputs",
            place="example_inputs",
            remedies=["a tuple of what forward takes, or a dict of its arguments by name, with a batch of 2 or more"],
        )
    meta = [name for name, p in module.named_parameters() if p.device.type == "meta"]
    if meta:
        raise ModelError(
            f"the module is on the meta device ('{meta[0]}' and {len(meta) - 1} more have no values), and torch.export "
            "stores values",
            place="model",
            remedies=[
                "module.to_empty(device='cpu')",
                "for a model of transformers, plan its config: altiplano.plan(module.config, seq=..., global_batch=...)",
            ],
        )
    _check_tensors(list(_leaves(args, "example_inputs")) + list(_leaves(kwargs, "example_inputs")), torch, batch_is_known)
    try:
        program = torch.export.export(module, args, kwargs, strict=False)
    except KeyboardInterrupt:
        raise
    except Exception as error:
        raise ModelError(
            f"torch.export cannot trace {type(module).__name__}: {_first_line(error)}",
            place=_place(error) or "model",
            remedies=[
                "check that module(*example_inputs) runs",
                "replace branches on values of tensors, or export by torch.export yourself and pass the program",
            ],
        ) from error
    file = folder / f"{type(module).__name__}.pt2"
    torch.export.save(program, file)
    return str(file), program


def _of_function(function: Any, example_inputs: Any, folder: Path, batch_is_known: bool) -> str:
    args, kwargs = _call(example_inputs)
    name = getattr(function, "__name__", type(function).__name__)
    name = name if name.isidentifier() else "function"
    if not args and not kwargs:
        raise ModelError(
            f"'{name}' is lowered with example inputs",
            place="example_inputs",
            remedies=["the parameters and a batch of 2 or more, as arrays or jax.ShapeDtypeStruct"],
        )
    try:
        import jax
    except ImportError as error:
        raise ModelError(
            f"'{name}' is a function, which JAX lowers, but jax is not installed",
            place="model",
            remedies=["pip install jax", "for PyTorch, pass the torch.nn.Module"],
        ) from error
    if not batch_is_known:
        # The first argument has the parameters.
        rest = [(f"example_inputs[{i}]", arg) for i, arg in enumerate(args)][1:]
        rest += [(f"example_inputs[{key!r}]", arg) for key, arg in kwargs.items()][0 if args else 1 :]
        _check_batch([leaf for place, arg in rest for leaf in _leaves(arg, place) if hasattr(leaf[1], "shape")])
    try:
        jitted = function if hasattr(function, "lower") else jax.jit(function)
        lowered = jitted.lower(*args, **kwargs)
    except KeyboardInterrupt:
        raise
    except Exception as error:
        raise ModelError(
            f"JAX cannot lower '{name}': {_first_line(error)}",
            place=_place(error) or "model",
            remedies=[
                f"check that jax.jit({name})(*example_inputs) runs",
                "pass arrays; bind Python values such as strings and flags by functools.partial",
            ],
        ) from error
    return _of_lowered(lowered, name, folder)


def _of_lowered(lowered: Any, name: str, folder: Path) -> str:
    try:
        text = lowered.as_text(debug_info=True)
    except TypeError:
        text = lowered.as_text()
    file = folder / f"{name}.mlir"
    file.write_text(text)
    return str(file)


def _call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as arguments: a tuple by position, a mapping by name, anything else as the only one."""
    if example_inputs is None:
        return (), {}
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    if isinstance(example_inputs, Mapping) and all(isinstance(name, str) for name in example_inputs):
        return (), dict(example_inputs)
    if isinstance(example_inputs, list):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _leaves(part, f"{place}[{name!r}]")
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from _leaves(part, f"{place}[{i}]")
    else:
        yield place, value


def _check_tensors(leaves: list[tuple[str, Any]], torch: Any, batch_is_known: bool) -> None:
    for place, leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, bool, int, float, type(None))):
            raise ModelError(
                f"{place} is a {type(leaf).__name__}, no tensor", place=place, remedies=["torch.as_tensor(...)"]
            )
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta":
            raise ModelError(
                f"{place} is on the meta device, which the module is not",
                place=place,
                remedies=["torch.zeros_like(example, device='cpu')"],
            )
    tensors = [(place, leaf) for place, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim > 0]
    if not tensors:
        raise ModelError(
            "there is no tensor with a batch among the example inputs",
            place="example_inputs",
            remedies=["tensors whose first dimension is a batch of 2 samples or more"],
        )
    if not batch_is_known:
        _check_batch(tensors)


def _check_batch(leaves: list[tuple[str, Any]]) -> None:
    """Fails if the arrays of a batch have fewer than two samples."""
    sizes = [(place, leaf.shape[0]) for place, leaf in leaves if len(leaf.shape) > 0]
    if sizes and all(size <= 1 for _, size in sizes):
        samples = "one sample" if sizes[0][1] == 1 else "no samples"
        raise ModelError(
            f"a batch of {samples} does not tell which dimensions grow with the batch",
            place=sizes[0][0],
            remedies=[
                "example inputs of 2 samples or more; the batch to train with is global_batch=N",
                "batch_dim={NAME: DIMENSION}, if one sample is what you mean",
            ],
        )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _place(error: BaseException) -> str | None:
    """The last line of the user's own code in a traceback."""
    found, trace = None, error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if _is_of_user(file):
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _is_of_user(file: str) -> bool:
    """True if a file of Python code is neither of this package nor of an installed one."""
    own = str(Path(__file__).parent)
    return not file.startswith((own, "<")) and "site-packages" not in file and f"{os.sep}lib{os.sep}python" not in file
