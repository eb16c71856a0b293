#!/usr/bin/env python3
"""Judges the public configurations in tests/data/judged, and prints benches/results/judge.md.

    benches/judge.py ALTIPLANO > benches/results/judge.md
"""

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "tests/data/judged"
# A model that the list of published configs lacks.
OTHERS = {
    "llama-3.1-70b": {
        "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    }
}


def configs():
    lines = (ROOT / "benches/configs/huggingface.jsonl").read_text().splitlines()
    named = {entry["name"]: entry["config"] for entry in map(json.loads, lines)}
    return {**named, **OTHERS}


def judged(altiplano, case, models, folder):
    command = [Path(altiplano).resolve(), "judge", CASES / case["file"], "--cluster", case["cluster"], "--json", "--within", "0"]
    if case["model"]:
        model = folder / f"{case['model']}.json"
        model.write_text(json.dumps(models[case["model"]]))
        command += ["--model", model]
    done = subprocess.run([*command, *case["options"].split()], capture_output=True, text=True, cwd=ROOT)
    return json.loads(done.stdout) if done.returncode == 0 else None, done.stderr.strip()


def row(case, found, problem):
    name, measured = case["file"], float(case["measured_s"] or 0)
    if found is None:
        if "error: " not in problem:
            raise SystemExit(f"{name}: {problem}")
        said = problem.split("error: ", 1)[1].replace(str(CASES / name) + ": ", "")
        return f"| `{name}` | {case['cluster']} | refused: {' '.join(said.split())} | | | | | |", None
    step, fits = found["step_time_s"], "yes" if found["fits"] else "no"
    error = step / measured - 1 if measured else None
    best = found["changes"][0] if found["changes"] else None
    change = f"{', '.join(best['change'])}: {best['times_as_fast']:.2f}x" if best else "none"
    cells = [
        f"`{name}`", case["cluster"], f"{step:.3g}", f"{measured:.4g}" if measured else "", f"{100 * error:+.0f} %" if measured else "",
        f"{found['peak_bytes'] / 1e9:.3g}", fits, change.replace("|", "\\|"),
    ]
    return "| " + " | ".join(cells) + " |", error


def main():
    altiplano, models = sys.argv[1], configs()
    cases = list(csv.DictReader((CASES / "cases.csv").open()))
    rows, errors, refused = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            line, error = row(case, *judged(altiplano, case, models, Path(folder)))
            rows.append(line)
            refused += "| refused: " in line
            errors += [] if error is None else [error]
            print(line, file=sys.stderr)
    print("# Public configurations, judged\n")
    print(f"`benches/judge.py` judges {len(cases)} configurations that projects publish; `tests/data/judged/cases.csv` names the source of each. Their")
    print("files hold the knobs with influence only. A measured step follows from published tokens a second and device, or from FLOPs.")
    print(f"{len(cases) - refused} are read and {refused} refused, each with the knob or size at fault.\n")
    mean = sum(map(abs, errors)) / max(1, len(errors))
    print(f"Predictions of the {len(errors)} with a published step time are off by {100 * mean:.0f} % on average. Models with experts are measured")
    print("without limits on tokens per expert; the predictions give each expert 1.25 times an even share.\n")
    print("| configuration | cluster | seconds a step | measured | error | GB a device | fits | best change of one knob |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    print("\n".join(rows))


main()
