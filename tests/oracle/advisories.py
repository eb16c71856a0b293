#!/usr/bin/env python3
"""Compares the versions in Cargo.lock files with RustSec's advisories.

    advisories.py DATABASE LOCK...

DATABASE is a checkout of https://github.com/rustsec/advisory-db. Prints each advisory that applies, and fails if one is
of a vulnerability. Notices about crates that are no longer maintained are printed and do not fail. An advisory that
cannot be read counts as one that applies.
"""

import re
import sys
import tomllib
from pathlib import Path


def number(text):
    """A version as three numbers; a missing one is zero. Pre-releases count as their release."""
    parts = re.split(r"[-+]", text.strip())[0].split(".")
    return tuple(int(part) for part in (parts + ["0", "0"])[:3])


def holds(version, comparator):
    """Returns whether a version satisfies one comparison, as `>= 1.2`, `^0.3.4` or `< 2`."""
    operator, wanted = re.fullmatch(r"\s*(>=|<=|>|<|=|\^|~)?\s*([0-9][^\s,]*)\s*", comparator).groups()
    least, parts = number(wanted), re.split(r"[-+]", wanted)[0].count(".") + 1
    if operator in (">=", "<=", ">", "<"):
        return {">=": version >= least, "<=": version <= least, ">": version > least, "<": version < least}[operator]
    if operator == "=":
        return version[:parts] == least[:parts]
    if operator == "~":
        kept = min(parts, 2)
    else:
        # A caret keeps everything up to the first number that is not zero.
        kept = next((i + 1 for i, part in enumerate(least[:parts]) if part), parts)
    return version >= least and version[:kept] == least[:kept]


def satisfies(version, requirements):
    return any(all(holds(version, part) for part in entry.split(",")) for entry in requirements)


def advisories(database):
    for file in sorted(Path(database).glob("crates/*/RUSTSEC-*.md")):
        front = file.read_text().split("```toml", 1)[1].split("```", 1)[0]
        yield file.stem, file.parent.name, tomllib.loads(front)


def main(database, locks):
    found = {}
    for lock in locks:
        for package in tomllib.loads(Path(lock).read_text())["package"]:
            # Packages of this repository have no source.
            if "source" in package:
                found.setdefault(package["name"], set()).add(package["version"])
    read, notices, failures = 0, 0, 0
    for name, crate, advisory in advisories(database):
        read += 1
        about, versions = advisory["advisory"], advisory.get("versions", {})
        if crate not in found or "withdrawn" in about:
            continue
        safe = versions.get("patched", []) + versions.get("unaffected", [])
        for version in sorted(found[crate]):
            if satisfies(number(version), safe):
                continue
            kind = about.get("informational")
            notices, failures = notices + bool(kind), failures + (not kind)
            print(f"{'notice' if kind else 'FAILED'}       {name}: {crate} {version}{f' ({kind})' if kind else ''}")
    if read == 0:
        sys.exit(f"{database} has no advisories")
    packages = sum(len(versions) for versions in found.values())
    print(f"{packages} versions against {read} advisories: {failures} vulnerabilities, {notices} notices")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
