"""Plans how the training of a model is split over many devices, and explains the plan.

    import altiplano

    plan = altiplano.plan(module, (tokens,), cluster="dgx-h100:2", loss="cross-entropy")
    print(plan)                 # degrees, batch sizes and predictions
    print(plan.why(op="attention"))
    plan.save("plan.json")

``plan`` takes a ``torch.nn.Module``, a JAX function, a Hugging Face config or a file. ``Oracle`` keeps a model loaded and
judges configurations in milliseconds. The work is done by the program ``altiplano`` that the wheel contains, in a process
beside this one. torch and jax are imported only if a model comes from them.
"""

from __future__ import annotations

from ._api import Oracle, compare, frontier, judge, load, plan, scale, trials, verify
from ._errors import (
    ClusterError,
    DoesNotFit,
    Error,
    ExportError,
    FileError,
    ModelError,
    NoPlan,
    NumbersDiffer,
    OptionError,
    ProcessError,
    RunError,
)
from ._plan import Comparison, Judgement, Plan, Report

__all__ = [
    "ClusterError",
    "Comparison",
    "DoesNotFit",
    "Error",
    "ExportError",
    "FileError",
    "Judgement",
    "ModelError",
    "NoPlan",
    "NumbersDiffer",
    "OptionError",
    "Oracle",
    "Plan",
    "ProcessError",
    "Report",
    "RunError",
    "compare",
    "frontier",
    "judge",
    "load",
    "plan",
    "scale",
    "trials",
    "verify",
]
