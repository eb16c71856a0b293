"""Exceptions. Each has the fields of the failure that the command line prints as JSON."""

from __future__ import annotations

from typing import Any


class Error(Exception):
    """A failure of Altiplano.

    Attributes:
        kind: The kind of failure, such as ``"memory"`` or ``"option"``.
        message: What is wrong.
        place: The argument, option, or file with line and column that is at fault, if one is.
        remedies: Changes that help, in words.
        data: All fields of the failure; ``changes`` has the predicted figures of each remedy.
    """

    kind = "error"

    def __init__(
        self,
        message: str,
        *,
        place: str | None = None,
        remedies: list[str] | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        self.message = message
        self.place = place
        self.data = data or {}
        self.remedies = remedies if remedies is not None else [c["change"] for c in self.data.get("changes") or []]
        super().__init__(message)

    @property
    def shortage(self) -> dict[str, Any] | None:
        """Where memory is short, and which tensors fill it, if that is the failure."""
        return self.data.get("shortage")

    def __str__(self) -> str:
        parts = [self.message]
        if self.place and self.place not in self.message:
            parts[0] = f"{self.place}: {self.message}"
        if self.remedies:
            parts.append("what helps:")
            parts.extend(f"  {remedy}" for remedy in self.remedies)
        return "\n".join(parts)


class OptionError(Error):
    """An option that is unknown, or that contradicts the model, the cluster or another option."""

    kind = "option"


class ModelError(Error):
    """A model that cannot be exported or read."""

    kind = "model"


class ClusterError(Error):
    """A cluster that is no preset and no readable file."""

    kind = "cluster"


class DoesNotFit(Error):
    """No plan fits in the memory of the devices."""

    kind = "memory"


class NoPlan(Error):
    """No plan has what the options fix."""

    kind = "no_plan"


class FileError(Error):
    """A file that cannot be read or written, or does not hold what it should."""

    kind = "file"


class ExportError(Error, NotImplementedError):
    """A plan that the other software cannot say, or software that this version does not export to."""

    kind = "export"


class NumbersDiffer(Error):
    """A plan whose numbers differ from those of one device."""

    kind = "numbers"


class RunError(Error):
    """A run that failed."""

    kind = "run"


class ProcessError(Error):
    """The program cannot be found or started, or it has ended."""

    kind = "process"


_BY_KIND = {
    cls.kind: cls
    for cls in (
        OptionError,
        ModelError,
        ClusterError,
        DoesNotFit,
        NoPlan,
        FileError,
        ExportError,
        NumbersDiffer,
        RunError,
    )
}


def of_answer(error: dict[str, Any]) -> Error:
    """The exception of an error in an answer."""
    data = error.get("data") or {}
    cls = _BY_KIND.get(data.get("kind", ""), Error)
    place = data.get("place")
    # An option of the command line is an argument here.
    place = place[2:].replace("-", "_") if place and place.startswith("--") else place
    found = cls(error.get("message", "unknown failure"), place=place, data=data)
    found.kind = data.get("kind", cls.kind)
    return found
