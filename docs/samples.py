#!/usr/bin/env python3
"""Rewrites the output of commands that pages show, by running the commands again.

    docs/samples.py target/release/altiplano MODEL_FOLDER README.md docs/reading-a-plan.md ...

A sample is an indented block in which lines that begin with `$ altiplano` are commands and the lines below each are its output. The
commands of a page run in order in one scratch folder, which has `examples`, `docs` and the files of MODEL_FOLDER in it. A command whose
input is missing there keeps its old output, with a note on stderr.

Samples may be abbreviated, and stay so:
  * `...` at the beginning of a line stands for lines and paragraphs that are left out. A paragraph above it or below it keeps the lines
    that it has; lines are known by their first words.
  * Indented dots stand for lines of a table that are left out.
  * Dots at the end of a line stand for the rest of it.
A sample `$ cat FILE` writes FILE as shown, for the commands below it, and `$ python3 -c` runs. `<!-- columns: 80 -->` before a block runs
its commands on a terminal of that width. Outputs that depend on the speed of this machine change with every run: look at the difference
before you commit it.
"""

import fcntl
import os
import pathlib
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROMPT = "$ altiplano "
DOTS = "..."


def run(command, folder, binary, columns):
    """What a command prints on stdout, or None where it fails."""
    words = [binary] + shlex.split(command)[1:]
    environment = dict(os.environ, NO_COLOR="1")
    if columns is None:
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
        text, code, problem = done.stdout, done.returncode, done.stderr
    else:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        child = subprocess.Popen(words, cwd=folder, env=environment, stdout=theirs, stderr=subprocess.PIPE, text=True)
        os.close(theirs)
        pieces = []
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:
                break
            if not piece:
                break
            pieces.append(piece)
        os.close(ours)
        text = b"".join(pieces).decode().replace("\r", "")
        problem, code = child.communicate()[1], child.returncode
    if code != 0:
        print(f"`{command}` exits with {code}: {problem.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return text.rstrip("\n").split("\n")


def paragraphs(lines):
    """Runs of lines without an empty one between them."""
    found = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [p for p in found if p]


def label(line):
    """The first words of a line, up to its first column of text."""
    return " ".join(re.split(r"  +(?![\d ])", line.strip())[0].split()[:2])


def head(line):
    """The same without what may differ from run to run: up to the first number."""
    return re.split(r"\d|  +(?=\S)", line.strip(), maxsplit=1)[0].strip()


def position(paragraph, line, start=0):
    """Where a line of an old output is in a new paragraph: by its first words, or else by those before a number."""
    indent = lambda text: len(text) - len(text.lstrip())
    lines = [(i, new) for i, new in list(enumerate(paragraph))[start:] if indent(new) == indent(line)]
    exact = [i for i, new in lines if (label(new) + " ").startswith(label(line) + " ")]
    alike = [i for i, new in lines if head(line) and head(new).startswith(head(line))]
    return exact[0] if exact else alike[0] if alike else None


def cut(whole, old):
    """A line as long as an old one that ends with dots."""
    old = old.rstrip()
    return whole[: len(old) - len(DOTS)].rstrip() + " " + DOTS if old.endswith(" " + DOTS) else whole


def renewed(old, new):
    """An old output with what a new one says."""
    rest, out = paragraphs(new), []
    chunks, is_first = [], True
    for line in old:
        if line == DOTS or not line.strip():
            chunks.append([line])
            is_first = True
        elif is_first:
            chunks.append([line])
            is_first = False
        else:
            chunks[-1].append(line)
    for number, chunk in enumerate(chunks):
        if chunk == [DOTS] or not chunk[0].strip():
            out += chunk
            continue
        lines = [line for line in chunk if line.strip() != DOTS]
        at = 0 if number == 0 else next((i for i, p in enumerate(rest) if position(p, lines[0]) == 0), None)
        if at is None or number == 0 and chunk[0].strip() == DOTS:
            at = next((i for i, p in enumerate(rest) if position(p, lines[0]) is not None), None)
        if at is None:
            print(f"no paragraph for `{lines[0].strip()}`", file=sys.stderr)
            out += chunk
            continue
        found, rest = rest[at], rest[at + 1 :]
        is_whole = len(lines) == len(chunk) and chunks[number + 1 : number + 2] != [[DOTS]]
        is_whole &= not any(line.rstrip().endswith(" " + DOTS) for line in lines)
        if is_whole:
            out += found[position(found, lines[0]) or 0 :]
            continue
        start = 0
        for i, line in enumerate(chunk):
            if line.strip() == DOTS:
                out.append(line)
                continue
            at = 0 if number == 0 and i == 0 else position(found, line, start)
            if at is None:
                print(f"no line for `{line.strip()}`", file=sys.stderr)
                continue
            out.append(cut(found[at], line))
            start = at + 1
        rest = ([found[start:]] if found[start:] else []) + rest
    return out


def rewrite(page, binary, models):
    folder = pathlib.Path(tempfile.mkdtemp())
    for name in ("examples", "docs"):
        (folder / name).symlink_to(ROOT / name)
    for model in sorted(pathlib.Path(models).iterdir()):
        (folder / model.name).symlink_to(model.resolve())
    lines = page.read_text().split("\n")
    out, at, columns = [], 0, None
    while at < len(lines):
        line = lines[at]
        marker = re.match(r"<!-- columns: (\d+) -->", line)
        if marker:
            columns = int(marker.group(1))
        elif line and not line.startswith("    "):
            columns = None
        out.append(line)
        at += 1
        if line.startswith("    $ python3 -c "):
            subprocess.run(line.strip()[2:], shell=True, cwd=folder, check=True)
        if not line.startswith(("    " + PROMPT, "    $ cat ")):
            continue
        end = at
        while end < len(lines) and (lines[end].startswith("    ") or not lines[end]) and not lines[end].startswith("    $ "):
            end += 1
        while end > at and not lines[end - 1]:
            end -= 1
        old = [text[4:] for text in lines[at:end]]
        command = line.strip()[2:].split("  #")[0]
        if command.startswith("cat "):
            (folder / command.split()[1]).write_text("\n".join(old) + "\n")
            continue
        new = run(command, folder, binary, columns)
        if new is not None and old:
            old = renewed(old, new)
        out += ["    " + text if text else "" for text in old]
        at = end
    page.write_text("\n".join(out))


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    for page in sys.argv[3:]:
        rewrite(pathlib.Path(page), str(pathlib.Path(sys.argv[1]).resolve()), sys.argv[2])
