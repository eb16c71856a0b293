"""Plans, and the answers to questions about them."""

from __future__ import annotations

import html
import importlib.util
import itertools
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import _process
from ._errors import Error, ExportError, OptionError

_names = itertools.count(1)


class Report(dict):  # type: ignore[type-arg]
    """An answer with all its fields, which prints as words."""

    def __init__(self, fields: dict[str, Any], words: str) -> None:
        super().__init__(fields)
        self.words = words

    def __str__(self) -> str:
        return self.words

    __repr__ = __str__


class Comparison(Report):
    """Two plans beside each other. ``plans`` has the figures of each."""

    plan: Plan | None = None

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of a step of the one plan and of the other."""
        one, other = (side["step_time_s"] for side in self["plans"])
        return one, other


class _Figures:
    """What a configuration is predicted to take."""

    _figures: dict[str, Any]

    @property
    def figures(self) -> dict[str, Any]:
        """All figures, by name."""
        return dict(self._figures)

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step."""
        return self._figures["step_time_s"]

    @property
    def samples_per_second(self) -> float:
        """Predicted samples a second."""
        return self._figures["samples_per_s"]

    @property
    def mfu(self) -> float:
        """Model FLOPs over those of the devices at their peak, from 0 to 1."""
        return self._figures["mfu"]

    @property
    def peak_bytes(self) -> int:
        """Bytes that the fullest device holds when it holds most."""
        return self._figures["peak_bytes"]

    @property
    def lower_bound_seconds(self) -> float:
        """Seconds below which no plan on these devices can be: the model's FLOPs at peak rate."""
        return self._figures["lower_bound_s"]

    @property
    def fits(self) -> bool:
        """True if every device has the memory that it needs."""
        return self._figures["fits"]

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees of data, tensor, pipeline, context and expert parallelism; of the first stage, if stages differ."""
        first = self._figures["of_stages"][0]
        degrees = {name: first[name] for name in ("dp", "tp", "cp", "ep")}
        return degrees | {"pp": self._figures["pp"]}

    @property
    def stages(self) -> list[dict[str, Any]]:
        """Degrees, memory and seconds of each stage: rows of a table, as ``pandas.DataFrame`` takes them."""
        return [dict(stage) for stage in self._figures["of_stages"]]

    @property
    def zero(self) -> int:
        """The ZeRO stage: 0 to 3."""
        return self._figures["of_stages"][0]["zero"]

    @property
    def recompute(self) -> str:
        """The activations that are recomputed."""
        return self._figures["of_stages"][0]["recompute"]

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self._figures["global_batch"]

    @property
    def microbatch(self) -> int:
        """Samples of all replicas in one pass through a stage."""
        return self._figures["microbatch"]

    @property
    def num_microbatches(self) -> int:
        """Passes of a step."""
        return self._figures["num_microbatches"]

    @property
    def schedule(self) -> str:
        """The order of a pipeline's passes."""
        return self._figures["schedule"]

    @property
    def num_devices(self) -> int:
        """Devices that are used."""
        return self._figures["devices"]


class Judgement(_Figures):
    """The figures of a configuration that was given in full. False if it cannot be or does not fit; then ``reason`` says
    why, and there may be no figures."""

    def __init__(self, figures: dict[str, Any]) -> None:
        self._figures = figures

    @property
    def reason(self) -> str | None:
        """Why the configuration cannot be; None if it fits."""
        return self._figures.get("reason")

    @property
    def is_predicted(self) -> bool:
        """True if there are figures, of a configuration that fits or not."""
        return "step_time_s" in self._figures

    def __bool__(self) -> bool:
        return self.fits

    def __repr__(self) -> str:
        return f"<Judgement {self._figures.get('answer') or ''}{self.reason or ''}>"


class Plan(_Figures):
    """A plan: which layers run where, how tensors are split, and what a step takes."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._figures = answer
        self._handle = answer["plan"]
        self._process = _process.shared()
        self._modules: dict[str, Any] = {}
        weakref.finalize(self, _release, self._process, self._handle)

    @property
    def model(self) -> str:
        """The name of the model."""
        return self._figures["model"]

    @property
    def cluster(self) -> str:
        """The name of the cluster."""
        return self._figures["cluster"]

    @property
    def notes(self) -> list[str]:
        """Remarks on how the model was read."""
        return [note["note"] for note in self._figures.get("notes", [])]

    @property
    def stopped(self) -> bool:
        """True if the search was stopped, and this is its best plan by then."""
        return self._figures.get("stopped", False)

    def why(self, param: str | None = None, *, op: str | None = None, stage: int | None = None, layer: int | None = None) -> str:
        """Explains why a parameter is stored, an op split or a stage cut as it is, and what else would cost.

        `param` and `op` are names, in which ``*`` matches anything. `layer` restricts them to one layer.
        """
        return self._ask("why", param=param, op=op, stage=stage, layer=layer)["text"]

    def why_not(self, **fixed: Any) -> Comparison:
        """Compares this plan with the best one that has other choices fixed, such as ``tp=8`` or ``zero=3``.

        Raises:
            NoPlan, DoesNotFit: There is no such plan; `remedies` says which changes have one.
        """
        answer = self._ask("why_not", what="planning", keep=True, **fixed)
        other = Plan(answer.pop("kept"))
        comparison = Comparison(answer, _beside(self, other, "asked for"))
        comparison.plan = other
        return comparison

    def advise(self, **options: Any) -> Report:
        """Tells what limits this plan, and what another node, faster links, more memory or a larger batch would gain."""
        answer = self._ask("advise", what="planning changes", **options)
        rows = [f"{'change':32} {'s/step':>10}"]
        for scenario in answer["scenarios"]:
            of = scenario.get("plan")
            rows.append(f"{scenario['change']:32} {of['step_time_s']:10.4g}" if of else f"{scenario['change']:32} {scenario['why']}")
        return Report(answer, "\n".join(rows))

    def compare(self, other: Plan | str | os.PathLike[str], *, measured: float | str | None = None) -> Comparison:
        """Compares this plan with another one, or with a configuration that you run today.

        `other` is a plan, the path of one, or degrees such as ``"tp=4 pp=2 mbs=1 recompute"``. `measured` is the step time
        of that configuration, in seconds.
        """
        if isinstance(other, str) and "=" in other and not Path(other).exists():
            answer = self._ask("compare", what="planning", baseline=other, measured=measured)
        else:
            answer = self._ask("compare", other=_handle(other))
        one, two = answer["plans"]
        words = f"{one['name']}: {one['step_time_s']:.4g} s ({one['how']})\n{two['name']}: {two['step_time_s']:.4g} s ({two['how']})"
        return Comparison(answer, words)

    def simulate(self, **options: Any) -> Report:
        """Simulates a step: the timeline of every stage, with reasons. ``explain="NAME"`` explains an op in words,
        ``trace=PATH`` writes a Chrome trace."""
        if options.get("explain") or options.get("memory"):
            text = self._ask("simulate", **options)["text"]
            return Report({"text": text}, text)
        fields = self._ask("simulate", **options)
        return Report(fields, self._ask("simulate", json=False)["text"])

    def report(self) -> str:
        """The report of the plan, as the command line prints it."""
        return self._ask("inspect")["text"]

    def to_dict(self) -> dict[str, Any]:
        """The whole plan, as docs/plan.schema.json describes it."""
        return self._ask("inspect", json=True)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The page of the plan, which a browser opens without a network. It is also written to `path`, if given."""
        with tempfile.TemporaryDirectory(prefix="altiplano-") as folder:
            file = Path(path) if path is not None else Path(folder) / "plan.html"
            self._ask("inspect", html=str(file))
            return file.read_text()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file, which all commands of the command line read."""
        self._ask("save", output=os.fspath(path))

    def export(self, stack: str, path: str | os.PathLike[str] | None = None) -> str:
        """The plan as a program of other software, ``"jax"`` or ``"torch"``. It is also written to `path`, if given.

        Raises:
            ExportError: The software cannot say the plan, or this version does not export to it.
        """
        with tempfile.TemporaryDirectory(prefix="altiplano-") as folder:
            file = Path(path) if path is not None else Path(folder) / "exported"
            try:
                self._ask("export", to=stack, output=str(file))
            except OptionError as error:
                if error.place != "to":
                    raise
                raise ExportError(
                    f"this version has no export to {stack}: {error.message}", place="stack", data=error.data
                ) from error
            return file.read_text() if file.is_file() else str(file)

    def verify(self, **options: Any) -> str:
        """Runs a step on CPU workers and on one device, and compares loss, gradients and updated weights.

        Raises:
            NumbersDiffer: They differ by more than rounding explains.
        """
        return self._ask("verify", what="running", **options)["text"]

    def mesh(self, devices: Any = None) -> Any:
        """The plan's ``jax.sharding.Mesh``. `devices` are all devices of the job, node by node."""
        return self._module("jax").mesh(devices)

    def shardings(self, params: Any, mesh: Any = None) -> Any:
        """The ``NamedSharding`` of every leaf of a JAX pytree of parameters."""
        module = self._module("jax")
        if isinstance(module.PARAMETERS, list):
            raise ExportError(
                f"the plan has {len(module.PARAMETERS)} pipeline stages, and parameters lie on the mesh of their stage",
                place="shardings",
                remedies=["plan.jit(optimizer, params, inputs)", "plan with pp=1"],
            )
        return module.shardings(module.parameter_specs(params, module.PARAMETERS), mesh or module.mesh())

    def shard(self, params: Any, mesh: Any = None) -> Any:
        """Places JAX parameters as the plan stores them."""
        module = self._module("jax")
        return module.shard_parameters(params, mesh or module.mesh())

    def jit(self, optimizer: Any, params: Any, inputs: dict[str, Any], mesh: Any = None, loss: Any = None) -> Any:
        """The training step of a JAX model, jitted, with the plan's layouts, microbatches, ZeRO and pipeline.

        `optimizer` has ``init`` and ``update``, as in optax. `inputs` maps the names of the model's other arguments to a
        batch. The step computes the model that was planned; with one stage, `loss` may be a function to compute in its
        place. Returns ``(step, params, state)``: parameters and optimizer state in place, one tree for each stage of a
        pipeline, and ``step(params, state, inputs) -> (params, state, loss)``.
        """
        module = self._module("jax")
        mesh = mesh or module.mesh()
        params = module.shard_parameters(params, mesh)
        state = module.init_state(optimizer, params, mesh)
        inputs = module.shard_inputs(inputs, mesh)
        own = {} if loss is None else {"loss": loss}
        return module.train_step(optimizer, mesh, params, state, inputs, **own), params, state

    def parallelize(self, module: Any, mesh: Any = None) -> Any:
        """Makes a ``torch.nn.Module`` one that trains as planned, in place, and returns it: its parameters become DTensors,
        sharded by FSDP2 and recomputed as planned. Every process of the job calls it, with the same weights.

        Raises:
            ExportError: PyTorch cannot run the plan, or this version does not export to it.
        """
        exported = self._module("torch")
        if exported.STAGES > 1:
            raise ExportError(
                f"the plan has {exported.STAGES} pipeline stages, which are not one module",
                place="parallelize",
                remedies=["plan.exported('torch').Pipeline(module, mesh, inputs, loss)", "plan with pp=1"],
            )
        return exported.parallelize(module, mesh if mesh is not None else exported.mesh())

    def exported(self, stack: str) -> Any:
        """The module that ``export`` writes for a stack, imported."""
        return self._module(stack)

    def _module(self, stack: str) -> Any:
        if stack not in self._modules:
            text = self.export(stack)
            spec = importlib.util.spec_from_loader(f"altiplano_plan_{next(_names)}_{stack}", loader=None)
            if spec is None:
                raise Error("the exported module cannot be made")
            module = importlib.util.module_from_spec(spec)
            exec(compile(text, f"<plan of {self.model} for {stack}>", "exec"), module.__dict__)
            sys.modules[spec.name] = module
            self._modules[stack] = module
        return self._modules[stack]

    def _ask(self, method: str, what: str | None = None, **params: Any) -> dict[str, Any]:
        return _process.ask(method, {"plan": self._handle, **params}, what)

    def __repr__(self) -> str:
        return f"<Plan of {self.model} on {self.cluster}: {self._figures['answer']}>"

    def __str__(self) -> str:
        return f"{self.model} on {self.cluster}: {self._figures['answer']}"

    def _repr_html_(self) -> str:
        """The page of the plan, in a notebook."""
        page = html.escape(self.to_html(), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 720px; border: none"></iframe>'

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a Plan is no sequence; its figures are attributes")


def _beside(one: Plan, other: Plan, name: str) -> str:
    change = other.step_seconds / one.step_seconds - 1
    return (
        f"plan:      {one.step_seconds:.4g} s, {one._figures['how']}\n"
        f"{name}: {other.step_seconds:.4g} s, {other._figures['how']}\n"
        f"{abs(change):.1%} {'slower' if change >= 0 else 'faster'}"
    )


def _handle(plan: Plan | str | os.PathLike[str]) -> str:
    return plan._handle if isinstance(plan, Plan) else os.fspath(plan)


def _release(process: _process.Process, handle: str) -> None:
    """Forgets a plan that nobody has any more."""
    # Garbage may be collected in the midst of a question, so the next one tells the program.
    process.released.append(handle)
