#!/usr/bin/env bash
# What recognising composites does: nodes of the graph, seconds of `altiplano plan` (median of RUNS=3 whole processes, baselines
# included) and predicted seconds per step, with the ops as the file has them (--as-written) and rewritten.
#
#   benches/rewriting.sh [CLUSTER] [MODEL...]        default: dgx-a100:1, every model of ${ALTIPLANO_SHARED:-../shared}/models and
#                                                    of benches/configs (8 sequences of 512)
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release --quiet
altiplano="${CARGO_TARGET_DIR:-target}/release/altiplano"
cluster="${1:-dgx-a100:1}"
shift || true
models=("$@")
[ "${#models[@]}" -gt 0 ] || models=("${ALTIPLANO_SHARED:-../shared}"/models/*.{mlir,pt2,onnx} benches/configs/*.json)

nodes() { "$altiplano" show "$@" 2> /dev/null | grep -E '^  %' | grep -vcE '= (parameter|input) ' || true; }
# Seconds of a whole process, and the predicted step of the plan it prints.
planned() {
    local times=() start end step=-
    for _ in $(seq "${RUNS:-3}"); do
        start=$(date +%s.%N)
        step=$(timeout 300 "$altiplano" plan "$@" --cluster "$cluster" 2> /dev/null | awk '$1 == "chosen" { print $2 }') || step=-
        end=$(date +%s.%N)
        times+=("$(echo "$end - $start" | bc)")
    done
    printf '%.2f s | %s s' "$(printf '%s\n' "${times[@]}" | sort -n | sed -n "$(( (${RUNS:-3} + 1) / 2 ))p")" "${step:--}"
}
echo "| model | nodes as written | rewritten | plan as written | predicted step | plan rewritten | predicted step |"
echo "| --- | --- | --- | --- | --- | --- | --- |"
for model in "${models[@]}"; do
    options=() batch=()
    case "$model" in
        *.pt2 | *.onnx) options=(--loss cross-entropy) ;;
        *.json) options=(--seq 512) batch=(--global-batch 8) ;;
        *flax-dropout-unnamed*) options=(--params 0-53) ;;
    esac
    echo "| $(basename "$model") | $(nodes "$model" "${options[@]}" --as-written) | $(nodes "$model" "${options[@]}") | $(planned "$model" "${options[@]}" "${batch[@]}" --as-written) | $(planned "$model" "${options[@]}" "${batch[@]}") |"
done
