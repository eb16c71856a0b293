"""The program in a process of its own, ``altiplano serve --stdio``, which answers questions over pipes.

A defect of the program cannot take the interpreter down, other threads run while one waits, and Ctrl-C stops a search
with its best plan so far.
"""

from __future__ import annotations

import atexit
import collections
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any, Callable

from . import _errors


def binary() -> str:
    """The path of the program: ``ALTIPLANO_BINARY``, that of this package's wheel, or one on the path."""
    named = os.environ.get("ALTIPLANO_BINARY")
    if named:
        return named
    name = "altiplano" + (sysconfig.get_config_var("EXE") or "")
    schemes = [None, "posix_user" if os.name == "posix" else "nt_user"]
    # `pip install --target` puts scripts beside the package.
    folders = [Path(__file__).parent.parent / "bin"]
    folders += [Path(sysconfig.get_path("scripts", scheme) if scheme else sysconfig.get_path("scripts")) for scheme in schemes]
    for folder in folders:
        if (folder / name).is_file():
            return str(folder / name)
    found = shutil.which(name)
    if found:
        return found
    raise _errors.ProcessError(
        "the program `altiplano` is not installed beside this package",
        remedies=["pip install --force-reinstall altiplano-planner", "name one in ALTIPLANO_BINARY"],
    )


class Process:
    """A running program. Threads may ask at the same time."""

    def __init__(self) -> None:
        path = binary()
        try:
            # In a session of its own, Ctrl-C reaches this process alone, which tells the program to stop its search.
            self._child = subprocess.Popen(
                [path, "serve", "--stdio"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=os.name == "posix",
            )
        except OSError as error:
            raise _errors.ProcessError(f"{path} does not start: {error}", place=path) from error
        self._ids = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any] | None]] = {}
        self._has_ended = False
        self._lock = threading.Lock()
        #: Handles that nobody has any more.
        self.released: collections.deque[str] = collections.deque()
        self._said: collections.deque[str] = collections.deque(maxlen=40)
        self._readers = [
            threading.Thread(target=self._read, name="altiplano-answers", daemon=True),
            threading.Thread(target=self._listen, name="altiplano-remarks", daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def is_alive(self) -> bool:
        # Its output ends a moment before its exit code is known.
        return not self._has_ended and self._child.poll() is None

    def ask(
        self, method: str, params: dict[str, Any], progress: Callable[[dict[str, Any]], None] | None = None
    ) -> dict[str, Any]:
        """Asks a question and waits for its answer. Ctrl-C stops a search, whose best result so far is the answer; a
        second one gives up."""
        answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        text = _text(params)
        with self._lock:
            if self._has_ended:
                raise self._ended()
            number = next(self._ids)
            self._answers[number] = answers
        try:
            while self.released:
                handle = self.released.popleft()
                self._send({"jsonrpc": "2.0", "method": "release", "params": {"handle": handle}})
            self._write(f'{{"jsonrpc": "2.0", "id": {number}, "method": {json.dumps(method)}, "params": {text}}}\n'.encode())
            interrupted = False
            while True:
                try:
                    message = answers.get()
                except KeyboardInterrupt:
                    self._send({"jsonrpc": "2.0", "method": "cancel", "params": {"id": number}})
                    if interrupted:
                        raise
                    interrupted = True
                    continue
                if message is None:
                    raise self._ended()
                if message.get("method") == "progress":
                    if progress is not None:
                        progress(message["params"])
                elif "error" in message:
                    raise _errors.of_answer(message["error"])
                else:
                    return message["result"]
        finally:
            with self._lock:
                self._answers.pop(number, None)

    def close(self) -> None:
        """Ends the program, after the answers that it owes."""
        try:
            self._child.stdin.close()
        except OSError:
            pass
        try:
            self._child.wait(5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        for reader in self._readers:
            reader.join()
        self._child.stdout.close()
        self._child.stderr.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._write(json.dumps(message).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        with self._lock:
            try:
                self._child.stdin.write(line)
                self._child.stdin.flush()
            except (OSError, ValueError) as error:
                raise self._ended() from error

    def _ended(self) -> _errors.ProcessError:
        try:
            code = self._child.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        said = "\n".join(self._said)
        return _errors.ProcessError(f"the program has ended with {code}{': ' if said else ''}{said}")

    def _read(self) -> None:
        for line in self._child.stdout:
            message = json.loads(line)
            number = message.get("id") if "method" not in message else message["params"].get("id")
            with self._lock:
                waiting = self._answers.get(number)
            if waiting is not None:
                waiting.put(message)
        with self._lock:
            self._has_ended = True
            pending = list(self._answers.values())
        for waiting in pending:
            waiting.put(None)

    def _listen(self) -> None:
        for line in self._child.stderr:
            self._said.append(line.decode(errors="replace").rstrip())


#: Most bytes of a question; the program reads lines of 1 MiB.
_MOST_BYTES = (1 << 20) - 1024


def _text(params: dict[str, Any]) -> str:
    """Parameters as JSON, in which the program finds nothing that it cannot read.

    Raises:
        OptionError: A parameter has a value that JSON has not, such as NaN or an object.
    """
    try:
        text = json.dumps(params, allow_nan=False, ensure_ascii=False, default=_plain)
        if len(text.encode()) <= _MOST_BYTES:
            return text
    except (TypeError, ValueError, RecursionError):
        pass
    for name, value in params.items():
        try:
            if len(json.dumps(value, allow_nan=False, ensure_ascii=False, default=_plain).encode()) <= _MOST_BYTES // 2:
                continue
            problem = "the value is too long for a question"
        except (TypeError, ValueError, RecursionError) as error:
            problem = f"no option has a value like this: {error}"
        raise _errors.OptionError(
            problem, place=str(name), remedies=["text, finite numbers, True or False, paths, or lists and dicts of these"]
        )
    raise _errors.OptionError("the options are too long for a question", remedies=["patterns such as 'embed*' in place of many names"])


def _plain(value: Any) -> Any:
    """A path as text, and a number of numpy or a framework as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a {type(value).__name__}")


_shared: Process | None = None
_of_pid: int | None = None
_starting = threading.Lock()


def shared() -> Process:
    """The process of this interpreter, which starts with the first question. A fork has one of its own."""
    global _shared, _of_pid
    with _starting:
        if _shared is not None and _of_pid == os.getpid() and not _shared.is_alive():
            _shared.close()
            _shared = None
        if _shared is None or _of_pid != os.getpid():
            _shared, _of_pid = Process(), os.getpid()
    return _shared


@atexit.register
def _close() -> None:
    if _shared is not None and _of_pid == os.getpid():
        _shared.close()


class Line:
    """One line on stderr that shows the progress of a search, if stderr is a terminal and the search takes a while."""

    WIDTH = 24

    def __init__(self, what: str, shown: bool | None = None) -> None:
        self._what = what
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._length = 0

    def __call__(self, params: dict[str, Any]) -> None:
        if not self._shown:
            return
        done, total = params.get("done", 0), max(params.get("total", 1), 1)
        filled = min(self.WIDTH, self.WIDTH * done // total)
        text = f"{self._what}: {100 * done // total:3d}%|{'█' * filled}{' ' * (self.WIDTH - filled)}| {done}/{total} "
        text += params.get("what", "")
        if "best_step_s" in params:
            text += f", best {params['best_step_s']:.3g} s"
        text = text[: shutil.get_terminal_size().columns - 1]
        sys.stderr.write("\r" + text.ljust(self._length))
        sys.stderr.flush()
        self._length = len(text)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        if self._length:
            sys.stderr.write("\r" + " " * self._length + "\r")
            sys.stderr.flush()


def ask(method: str, params: dict[str, Any], what: str | None = None) -> dict[str, Any]:
    """Asks the shared process; `what` names the work on the line of progress."""
    given = {name: value for name, value in params.items() if value is not None}
    if what is None:
        return shared().ask(method, given)
    with Line(what) as line:
        return shared().ask(method, given, line)


def path(value: str | os.PathLike[str]) -> str:
    """A path as the program takes it."""
    return os.fspath(value)
