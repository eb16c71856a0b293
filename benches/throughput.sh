#!/usr/bin/env bash
# What this machine's cores reach: an all-reduce among workers beside memory's bandwidth and MPI's, and a training step of GPT-2 124M
# (one sequence of 1024, AdamW) beside PyTorch's. Both sides of a pair take turns, so that they meet the same disturbances; medians count.
#
#   benches/throughput.sh all-reduce [ROUNDS]                 needs mpicc and mpirun for the second half
#   benches/throughput.sh step MODEL PYTHON [ROUNDS [STEPS]]  MODEL: gpt2-small.mlir; PYTHON: one that has torch and safetensors
#
# ALTIPLANO names the binary of `step` [default: target/release/altiplano].
set -euo pipefail
cd "$(dirname "$0")/.."
target="${CARGO_TARGET_DIR:-target}"
altiplano="${ALTIPLANO:-$target/release/altiplano}"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
median() { sort -n | awk '{ t[NR] = $1 } END { print t[int((NR + 1) / 2)] }'; }

case "${1:-}" in
    all-reduce)
        rounds="${2:-5}"
        if command -v mpicc > /dev/null; then mpicc -O2 benches/all_reduce.c -o "$scratch/all_reduce"; fi
        cargo bench --quiet --bench all_reduce -- 64 "$rounds"
        [ -x "$scratch/all_reduce" ] || exit 0
        for ranks in 2 4; do
            mpirun --allow-run-as-root --oversubscribe -q -n "$ranks" "$scratch/all_reduce" 64 "$((3 * rounds))"
        done
        ;;
    step)
        model="$2" python="$3" rounds="${4:-3}" steps="${5:-3}"
        "$python" benches/throughput.py prepare "$scratch"
        "$altiplano" plan "$model" --cluster local:1 --global-batch 1 --optimizer adamw --weight-decay 0 -o "$scratch/plan.json" > /dev/null
        for ((round = 0; round < rounds; round++)); do
            "$altiplano" run "$scratch/plan.json" --steps "$steps" --lr 0.001 --weights "$scratch/weights.safetensors" \
                --data "$scratch/data.safetensors" --metrics "$scratch/metrics" > /dev/null
            # The first step of a process fills its memory, on either side.
            sed -n 's/.*"step":\([0-9]*\),"loss":\([^,]*\),.*"seconds":\([^,}]*\).*/\1 \2 \3/p' "$scratch/metrics" > "$scratch/ours"
            rm "$scratch/metrics"
            "$python" benches/throughput.py train "$scratch" "$steps" |
                sed -n 's/^step *\([0-9]*\)  loss \([^ ]*\)  \([^ ]*\) s.*/\1 \2 \3/p' > "$scratch/theirs"
            paste -d ' ' "$scratch/ours" "$scratch/theirs" | awk -v "round=$((round + 1))" '{
                printf "round %d step %d: loss %.6f and %.6f, %.3f s and %.3f s\n", round, $1, $2, $5, $3, $6 }'
            awk '$1 > 1 { print $3 }' "$scratch/ours" >> "$scratch/all-ours"
            awk '$1 > 1 { print $3 }' "$scratch/theirs" >> "$scratch/all-theirs"
        done
        ours="$(median < "$scratch/all-ours")" theirs="$(median < "$scratch/all-theirs")"
        awk -v "o=$ours" -v "t=$theirs" 'BEGIN { printf "medians: %.3f s and PyTorch %.3f s, %.2f of it\n", o, t, o / t }'
        ;;
    *) sed -n '2,9p' "$0"; exit 2 ;;
esac
