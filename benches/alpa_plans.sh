#!/bin/bash
# The plans that Alpa published for GPT on p3.16xlarge (Zheng et al. 2022, artifact: configurations of section 8.1 and their throughput) beside
# those that `altiplano plan` finds for the same models, batch and GPUs. Seconds of theirs follow from the published TFLOP/s by their formula,
# 96 B s l h^2 (1 + s / 6h) + 6 B s h V FLOP a step with recomputation; where their stages are equal our predictor prices them as well.
#
#     benches/alpa_plans.sh ALTIPLANO
set -eu
bin=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
batch=1024 seq=1024 vocab=51200

# name, layers, hidden, heads, GPUs, cluster, their microbatches, their plan, their TFLOP/s a GPU, and the plan as a baseline
row() {
    local name=$1 layers=$2 hidden=$3 heads=$4 gpus=$5 cluster=$6 micro=$7 theirs=$8 tflops=$9 baseline=${10}
    local measured ours how same ratio
    printf '{"model_type": "gpt2", "n_layer": %s, "n_embd": %s, "n_head": %s, "n_positions": %s, "vocab_size": %s}' \
        "$layers" "$hidden" "$heads" "$seq" "$vocab" > "$folder/$name.json"
    measured=$(awk -v B=$batch -v s=$seq -v V=$vocab -v l="$layers" -v h="$hidden" -v n="$gpus" -v t="$tflops" \
        'BEGIN {printf "%.1f", (96 * B * s * l * h * h * (1 + s / (6 * h)) + 6 * B * s * h * V) / (n * t * 1e12)}')
    "$bin" plan "$folder/$name.json" --cluster "$cluster" --precision f16 --global-batch $batch -o "$folder/plan.json" > "$folder/report.txt"
    ours=$(sed -n 's/^  predicted step  *\([0-9.]*\) s .*/\1/p' "$folder/report.txt")
    how=$(sed -n 's/^  chosen .*yes  //p' "$folder/report.txt")
    same=-
    if [ "$baseline" != - ]; then
        same=$("$bin" compare "$folder/plan.json" --baseline "$baseline" --json | sed -n 's/^ *"step_time_s": \([0-9.]*\),*/\1/p' | tail -1)
        same=$(awk -v s="$same" 'BEGIN {printf "%.1f", s}')
    fi
    ratio=$(awk -v a="$ours" -v b="$measured" 'BEGIN {printf "%.2f", a / b}')
    echo "| $name, $gpus | $theirs, $micro microbatches | $measured | $same | $how | $ours | $ratio |"
}

echo "| GPT, GPUs | Alpa's plan | s/step, measured | s/step, predicted | our plan | s/step, predicted | ours / measured |"
echo "|---|---|--:|--:|---|--:|--:|"
row 350M 24 1024 16 1 p3.16xlarge:1/1 512 "1 GPU" 45.07 "tp=1 pp=1 dp=1 mbs=2 recompute target=altiplano"
row 760M 24 1536 16 2 p3.16xlarge:1/2 128 "2 stages of 1" 57.92 "tp=1 pp=2 dp=1 mbs=8 recompute target=altiplano"
row 1.3B 24 2048 32 4 p3.16xlarge:1/4 128 "2 stages of 2 (data)" 58.21 "tp=1 pp=2 dp=2 mbs=4 recompute target=altiplano"
row 2.6B 32 2560 32 8 p3.16xlarge:1 128 "3 stages of 2, 2, 4" 61.61 -
row 6.7B 32 4096 32 16 p3.16xlarge:2 64 "2 stages of 8 (2 x 4)" 60.0 "tp=4 pp=2 dp=2 mbs=8 recompute target=altiplano"
row 15B 48 5120 40 32 p3.16xlarge:4 128 "4 stages of 8 (2 x 4)" 59.9 "tp=4 pp=4 dp=2 mbs=4 recompute target=altiplano"
row 39B 48 8192 64 64 p3.16xlarge:8 1024 "16 stages of 4 (1 x 4)" 57.0 "tp=4 pp=16 dp=1 mbs=1 recompute target=altiplano"
