"""Models of frameworks as files: what the program reads. torch and jax are imported only where a model is theirs."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ._errors import ModelError, OptionError


@contextlib.contextmanager
def as_file(model: Any, example_inputs: Any = None) -> Iterator[str]:
    """The path of a file that holds `model`, for the time of a `with`.

    Raises:
        ModelError: The model cannot be exported. The exception names the place and what helps.
    """
    if isinstance(model, (str, os.PathLike)):
        _no_inputs(example_inputs, "a file")
        yield _path(model)
        return
    with tempfile.TemporaryDirectory(prefix="altiplano-") as folder:
        yield _written(model, example_inputs, Path(folder))


def _written(model: Any, example_inputs: Any, folder: Path) -> str:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return _of_module(torch, model, example_inputs, folder)
    if torch is not None and isinstance(model, torch.export.ExportedProgram):
        _no_inputs(example_inputs, "an exported program")
        file = folder / "model.pt2"
        torch.export.save(model, file)
        return str(file)
    if isinstance(model, Mapping) or hasattr(model, "model_type") and hasattr(model, "to_dict"):
        _no_inputs(example_inputs, "a config")
        config = dict(model) if isinstance(model, Mapping) else model.to_dict()
        file = folder / f"{config.get('model_type', 'model')}.json"
        file.write_text(json.dumps(config, default=str))
        return str(file)
    if hasattr(model, "as_text"):
        _no_inputs(example_inputs, "a lowered function")
        return _of_lowered(model, "model", folder)
    if callable(model) and not inspect.isclass(model):
        return _of_function(model, example_inputs, folder)
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


def _of_module(torch: Any, module: Any, example_inputs: Any, folder: Path) -> str:
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
    _check_leaves(list(_leaves(args, "example_inputs")) + list(_leaves(kwargs, "example_inputs")), torch.Tensor)
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
    return str(file)


def _of_function(function: Any, example_inputs: Any, folder: Path) -> str:
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


def _check_leaves(leaves: list[tuple[str, Any]], tensor: type) -> None:
    for place, leaf in leaves:
        if not isinstance(leaf, (tensor, bool, int, float, type(None))):
            raise ModelError(
                f"{place} is a {type(leaf).__name__}, no tensor", place=place, remedies=["torch.as_tensor(...)"]
            )
    batches = [(place, leaf.shape[0]) for place, leaf in leaves if isinstance(leaf, tensor) and leaf.ndim > 0]
    if not batches:
        raise ModelError("there is no tensor with a batch among the example inputs", place="example_inputs")
    if all(batch == 1 for _, batch in batches):
        raise ModelError(
            "a batch of one sample does not tell which dimensions grow with the batch",
            place=batches[0][0],
            remedies=["example inputs of 2 samples or more; the batch to train with is global_batch=N"],
        )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _place(error: BaseException) -> str | None:
    """The last line of the user's own code in a traceback."""
    found, trace = None, error.__traceback__
    own = str(Path(__file__).parent)
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((own, "<")) and "site-packages" not in file and f"{os.sep}lib{os.sep}python" not in file:
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
