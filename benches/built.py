"""The program that the Python benchmarks run."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def binary():
    """ALTIPLANO's, or a release build of this checkout."""
    given = os.environ.get("ALTIPLANO")
    if given:
        return given
    subprocess.run(["cargo", "build", "--release", "--quiet"], cwd=ROOT, check=True)
    return str(Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release" / "altiplano")
