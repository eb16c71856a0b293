#!/usr/bin/env python3
"""Measures the shape of the code: `benches/house.py [FOLDER]`.

Prints lines by crate, functions over 80 lines, functions with tuple parameters, the largest structs, public names,
test programs, comment lines that open with a free clause, and the size of the front page. Compare two checkouts by
running it on both.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)
CRATES = ["ir", "transforms", "import", "cost_models", "solver", "planner", "prover", "runtime", "xla"]
FUNCTION = re.compile(r"^(\s*)(?:pub(?:\([^)]*\))? )?(?:const )?(?:unsafe )?(?:extern \"C\" )?fn (\w+)")
STRUCT = re.compile(r"^pub struct (\w+)[^;]*\{$")
OPENING = re.compile(r"^\s*//[/!]?\s+(What|Whether|Of|Whoever|Whatever)\b")


def files():
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "*.rs"], capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).exists()]


def crate(path):
    top = path.relative_to(ROOT).parts[0]
    return top if top in CRATES + ["tests", "examples", "benches", "fuzz"] else "root"


def is_test(path):
    return "tests" in path.parts or path.stem.endswith("tests") or path.stem == "tests"


def end_of(lines, start, indent):
    """The line that closes a block opened at `start`."""
    for i in range(start, len(lines)):
        if lines[i] == indent + "}":
            return i
    return start


def main():
    by_crate, public, openings = Counter(), Counter(), Counter()
    long, tuples, structs = [], 0, []
    for path in files():
        lines = path.read_text().split("\n")
        by_crate[crate(path)] += len(lines) - 1
        openings.update(m.group(1) for line in lines if (m := OPENING.match(line)))
        if is_test(path):
            continue
        in_tests = False
        for i, line in enumerate(lines):
            in_tests |= line.startswith("mod tests {")
            if re.match(r"^\s*pub (?:const )?(?:unsafe )?(fn|struct|enum|trait|type|const|static) ", line):
                public[crate(path)] += not in_tests
            if (found := FUNCTION.match(line)) and not in_tests:
                declared = " ".join(lines[i : i + 12]).split("{")[0]
                end = i if ";" in declared else end_of(lines, i, found.group(1))
                if end - i + 1 > 80:
                    long.append((end - i + 1, f"{path.relative_to(ROOT)}: {found.group(2)}"))
                tuples += bool(re.search(r"[(,]\s*\([a-z_, &]+\): \(", declared))
            if (found := STRUCT.match(line)) and not in_tests:
                fields = [f for f in lines[i : end_of(lines, i, "")] if re.match(r"^    (pub(\([^)]*\))? )?\w+: ", f)]
                structs.append((len(fields), f"{path.relative_to(ROOT)}: {found.group(1)}"))
    programs = [p for p in files() if re.match(r"(.*/)?tests/([^/]+/main|[^/]+)\.rs$", str(p.relative_to(ROOT)))]
    print(f"lines: {sum(by_crate.values()):,} of Rust: " + ", ".join(f"{c} {n:,}" for c, n in by_crate.most_common()))
    print(f"functions over 80 lines: {len(long)}")
    for size, name in sorted(long, reverse=True)[:12]:
        print(f"    {size} {name}")
    print(f"functions with tuple parameters: {tuples}")
    print("largest structs: " + ", ".join(f"{name} {size}" for size, name in sorted(structs, reverse=True)[:6]))
    print(f"public names: {sum(public.values()):,}: " + ", ".join(f"{c} {n:,}" for c, n in public.most_common()))
    print(f"test programs: {len(programs)}")
    print("comment lines that open with a free clause: " + (", ".join(f"{w} {n}" for w, n in openings.items()) or "0"))
    for page in ("README.md", "ARCHITECTURE.md"):
        text = (ROOT / page).read_text()
        print(f"{page}: {text.count(chr(10))} lines, {len(text.encode()) / 1000:.1f} kB")


if __name__ == "__main__":
    main()
