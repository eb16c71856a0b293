#!/usr/bin/env bash
# Plans each model for each cluster as a whole process, three times, and prints a table of medians: planning time, the
# predicted step, and its ratio to the time of the step's FLOPs at the peak rate of the devices that the plan uses.
# Usage: benches/planning.sh MODEL_FOLDER > benches/results/planning.md
set -euo pipefail
models=${1:?a folder of .mlir files}
cd "$(dirname "$0")/.."
cargo build --release --quiet
altiplano=target/release/altiplano
[ -x "$altiplano" ] || altiplano=${CARGO_TARGET_DIR:?}/release/altiplano
echo "# Planning: whole processes, median of three"
echo
echo "$(date -u +%F), $(nproc) cores, $(grep -m1 'model name' /proc/cpuinfo | cut -d: -f2- | xargs), commit $(git rev-parse --short HEAD); command: \`benches/planning.sh\`"
echo
echo "| model | cluster | options | planning s | stages | devices used | step s | step / FLOPs at peak of the devices used | GB/device |"
echo "|---|---|---|--:|--:|--:|--:|--:|--:|"
python3 - "$models" "$altiplano" <<'P'
import json, statistics, subprocess, sys, tempfile, time, os
models, altiplano = sys.argv[1:]
rows = [(m, c, o)
        for m in ("gpt2-small", "gpt3-2.6b", "gpt3-39b", "llama3-8b")
        for c in ("p3.16xlarge:1", "p3.16xlarge:8", "dgx-a100:4")
        for o in ([],)]
rows += [("gpt2-tiny", "local:4", []), ("llama-tiny", "local:4", []), ("gpt2-small", "local:2", []),
         ("gpt3-39b", "p3.16xlarge:8", ["--global-batch", "1024"]),
         ("gpt3-2.6b", "p3.16xlarge:8", ["--global-batch", "1024"]),
         ("gpt2-small", "p3.16xlarge:8", ["--global-batch", "512"]),
         ("gpt3-39b", "dgx-a100:4", ["--global-batch", "1024"])]
for model, cluster, options in rows:
    seconds, out = [], tempfile.mktemp()
    for _ in range(3):
        start = time.time()
        run = subprocess.run([altiplano, "plan", f"{models}/{model}.mlir", "--cluster", cluster, "-o", out, *options],
                             capture_output=True, text=True)
        seconds.append(time.time() - start)
        if run.returncode:
            break
    name = " ".join(options)
    if run.returncode:
        why = run.stderr.strip().splitlines()[-1]
        print(f"| {model} | {cluster} | {name} | {statistics.median(seconds):.1f} | | | | {why} | |")
        continue
    plan = json.load(open(out))
    p = plan["predicted"]
    used = sum(len(s["devices"]) for s in plan["stages"])
    group = plan["cluster"]["groups"][0]
    ratio = p["step_time_s"] / (p["lower_bound_s"] * group["nodes"] * group["devices_per_node"] / used)
    print(f"| {model} | {cluster} | {name} | {statistics.median(seconds):.1f} | {len(plan['stages'])} | {used} | "
          f"{p['step_time_s']:.3g} | {ratio:.2f} | {max(p['peak_bytes'])/1e9:.2f} |", flush=True)
    os.remove(out)
P
