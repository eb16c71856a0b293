"""The functions of the package."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from . import _process
from ._models import as_file
from ._plan import Comparison, Judgement, Plan, Report

#: Options of reading a model; all others are of planning.
_OF_MODEL = frozenset(
    "params inputs freeze no_decay batch_dim also stop_gradient loss ignore_shardings as_written precision bf16 fp16 seq "
    "capacity_factor size reduce".split()
)


def plan(
    model: Any,
    example_inputs: Any = None,
    cluster: str | os.PathLike[str] | None = None,
    loss: str | None = None,
    **options: Any,
) -> Plan:
    """Searches for the fastest way to train a model on a cluster.

    Args:
        model: A ``torch.nn.Module``, a JAX function of parameters and batch that returns its loss, a Hugging Face config
            (the object, a folder with ``config.json``, or an id that transformers has on disk), or the path of a file:
            StableHLO text, ``.pt2``, ONNX, ``config.json``, or a graph as JSON.
        example_inputs: What a module or a function is traced with: a tuple by position, a dict by name. A batch of 2 or
            more; arrays, tensors, or for JAX ``jax.ShapeDtypeStruct``.
        cluster: A preset with a count of nodes such as ``"dgx-h100:2"``, or the path of a TOML file. Default: four workers
            of this machine.
        loss: For a model whose result is no loss: ``"cross-entropy"``, ``"mse"``, or ``"none"`` to run it untrained.
        **options: Options of ``altiplano plan``, with ``_`` for ``-``: ``tp=8``, ``global_batch=512``,
            ``precision="bf16"``, ``target="megatron"``.

    Returns:
        The plan. Ctrl-C ends the search with the best plan so far.

    Raises:
        ModelError: The model cannot be exported or read.
        DoesNotFit, NoPlan: There is no plan; ``remedies`` lists changes with which there is one.
        OptionError, ClusterError: An option or the cluster is at fault.
    """
    with as_file(model, example_inputs, "batch_dim" in options) as file:
        params = {"model": file, "cluster": _text(cluster), "loss": loss, **options}
        return Plan(_process.ask("plan", params, "planning"))


def load(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan file."""
    return Plan(_process.ask("load_plan", {"file": os.fspath(path)}))


def judge(
    model: Any,
    example_inputs: Any = None,
    cluster: str | os.PathLike[str] | None = None,
    loss: str | None = None,
    **options: Any,
) -> Judgement:
    """Predicts one configuration that is given in full, without a search; see :meth:`Oracle.judge`."""
    with Oracle(model, cluster, example_inputs=example_inputs, loss=loss, **options) as oracle:
        return oracle.judge()


def frontier(
    model: Any,
    example_inputs: Any = None,
    cluster: str | os.PathLike[str] | None = None,
    loss: str | None = None,
    **options: Any,
) -> list[Plan]:
    """The plans that no other beats in seconds, bytes, devices and price at once, fastest first."""
    with Oracle(model, cluster, example_inputs=example_inputs, loss=loss, **options) as oracle:
        return oracle.frontier()


def scale(
    model: Any,
    example_inputs: Any = None,
    cluster: str | os.PathLike[str] | None = None,
    loss: str | None = None,
    *,
    nodes: str | int | Sequence[int],
    **options: Any,
) -> Report:
    """Plans for several numbers of nodes: throughput, training time, cost, and a recommendation.

    `nodes` is a list of counts, or text such as ``"1,2,4,...,64"``.
    """
    counts = nodes if isinstance(nodes, str) else ",".join(map(str, [nodes] if isinstance(nodes, int) else nodes))
    with as_file(model, example_inputs, "batch_dim" in options) as file:
        params = {"model": file, "cluster": _text(cluster), "loss": loss, "nodes": counts, **options}
        fields = _process.ask("scale", params, "planning")
        return Report(fields, _process.ask("scale", {**params, "json": False}, "planning")["text"])


def trials(
    *models: Any,
    count: int | Sequence[int],
    steps: int | Sequence[int] = 1000,
    cluster: str | os.PathLike[str] | None = None,
    loss: str | None = None,
    **options: Any,
) -> Report:
    """Packs many trainings onto a cluster: how many devices each gets, which take turns, and when all are done.

    Args:
        *models: Files or configs, as for :func:`plan`, or pairs of a module or function and its example inputs.
        count: The number of trials, of each model or the same for all.
        steps: The optimizer steps of a trial, likewise.
    """
    with contextlib.ExitStack() as files:
        given = [model if isinstance(model, tuple) else (model, None) for model in models]
        names = [files.enter_context(as_file(model, inputs, "batch_dim" in options)) for model, inputs in given]
        params = {"models": names, "count": count, "steps": steps, "cluster": _text(cluster), "loss": loss, **options}
        fields = _process.ask("trials", params, "planning")
        return Report(fields, _process.ask("trials", {**params, "json": False}, "planning")["text"])


def verify(plan: Plan | str | os.PathLike[str], **options: Any) -> str:
    """Runs a step of a plan on CPU workers and on one device, and compares the numbers; see :meth:`Plan.verify`."""
    if isinstance(plan, Plan):
        return plan.verify(**options)
    return _process.ask("verify", {"plan": os.fspath(plan), **options}, "running")["text"]


def compare(one: Plan, other: Plan | str | os.PathLike[str], **options: Any) -> Comparison:
    """Compares a plan with another one, or with a configuration; see :meth:`Plan.compare`."""
    return one.compare(other, **options)


class Oracle:
    """A model that stays loaded, for many questions.

        with altiplano.Oracle(model, "dgx-h100:4", seq=4096, global_batch=512) as oracle:
            judged = [oracle.judge(tp=tp, pp=pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4)]
            best = min(filter(None, judged), key=lambda judgement: judgement.step_seconds)

    Options of the constructor hold for all questions, which may override those of planning.
    """

    def __init__(
        self,
        model: Any,
        cluster: str | os.PathLike[str] | None = None,
        *,
        example_inputs: Any = None,
        loss: str | None = None,
        **options: Any,
    ) -> None:
        of_model = {name: value for name, value in options.items() if name in _OF_MODEL}
        self._options = {name: value for name, value in options.items() if name not in _OF_MODEL}
        self._options["cluster"] = _text(cluster)
        with as_file(model, example_inputs, "batch_dim" in options) as file:
            self.model: dict[str, Any] = _process.ask("load_model", {"model": file, "loss": loss, **of_model})
        self._handle: str | None = self.model.pop("model")

    def judge(self, **options: Any) -> Judgement:
        """Predicts a configuration that is given in full, in milliseconds.

        Open degrees are 1, ``dp`` follows from the cluster, a replica has one sample at a time (``micro_batch_size``),
        ``zero`` is 0 and nothing is recomputed. All layers are split alike; ``plan`` also searches the layouts.

        Returns:
            Its figures, or the reason why it cannot be.
        """
        return Judgement(self._ask("judge", options))

    def plan(self, **options: Any) -> Plan:
        """Searches for the fastest plan."""
        return Plan(self._ask("plan", options, "planning"))

    def frontier(self, **options: Any) -> list[Plan]:
        """The plans that no other beats in seconds, bytes, devices and price at once, fastest first."""
        found = self._ask("frontier", {**options, "keep": True}, "planning")
        return [Plan(answer) for answer in found["plans"]]

    def close(self) -> None:
        """Forgets the model."""
        if self._handle is not None:
            _process.ask("release", {"handle": self._handle})
            self._handle = None

    def _ask(self, method: str, options: dict[str, Any], what: str | None = None) -> dict[str, Any]:
        if self._handle is None:
            raise ValueError("the oracle is closed")
        return _process.ask(method, {"model": self._handle, **self._options, **options}, what)

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _text(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else os.fspath(path)
