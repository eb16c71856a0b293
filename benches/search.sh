#!/bin/bash
# How long `altiplano plan` takes from model file to plan file, as a whole process: GPTs of 16 to 1,024 layers on 256 devices, one of 96
# layers on 8 to 16,384 devices, and, where their files are given, the models that the project states times for. Three runs each (RUNS says another number);
# the median counts.
#
#     benches/search.sh ALTIPLANO [FOLDER_OF_MODELS]
set -eu
bin=$1
models=${2:-}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

gpt() {
    printf '{"model_type": "gpt2", "n_layer": %s, "n_embd": 4096, "n_head": 32, "n_positions": 1024, "vocab_size": 50257}' "$1"
}

# what, model file, cluster, options...
measure() {
    local what=$1 file=$2 cluster=$3
    shift 3
    local runs=""
    for _ in $(seq "${RUNS:-3}"); do
        local start end
        start=$(date +%s.%N)
        "$bin" plan "$file" --cluster "$cluster" "$@" -o "$folder/plan.json" > "$folder/report.txt" 2> "$folder/errors.txt" ||
            { echo "| $what | $cluster | $(tail -1 "$folder/errors.txt" | cut -c1-80) | |"; return; }
        end=$(date +%s.%N)
        runs="$runs $(echo "$start $end" | awk '{printf "%.2f", $2 - $1}')"
    done
    local median step
    median=$(echo "$runs" | tr ' ' '\n' | grep . | sort -n | sed -n "$(( (${RUNS:-3} + 1) / 2 ))p")
    step=$(sed -n 's/^  predicted step  *//p' "$folder/report.txt" | cut -d'=' -f1)
    echo "| $what | $cluster | $median | $step |"
}

echo "| model | cluster | plan s | predicted step |"
echo "|---|---|--:|--:|"
for layers in 16 64 256 1024; do
    gpt "$layers" > "$folder/gpt-$layers.json"
    measure "GPT, $layers layers" "$folder/gpt-$layers.json" dgx-a100:32 --precision bf16 --global-batch 1024
done
gpt 96 > "$folder/gpt-96.json"
for nodes in 1 8 64 512 2048; do
    measure "GPT, 96 layers" "$folder/gpt-96.json" "dgx-h100:$nodes" --precision bf16 --global-batch 2048
done
cat > "$folder/llama-405b.json" << 'CONFIG'
{"model_type": "llama", "num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128,
 "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}
CONFIG
measure "Llama 3 405B" "$folder/llama-405b.json" dgx-h100:2048 --seq 8192 --global-batch 2048
if [ -n "$models" ]; then
    measure gpt3-39b "$models/gpt3-39b.mlir" p3.16xlarge:8 --global-batch 1024
    measure gpt3-2.6b "$models/gpt3-2.6b.mlir" p3.16xlarge:8 --global-batch 1024
    measure moe-2.4b "$models/moe-2.4b.mlir" p3.16xlarge:2
    measure wresnet50-1b "$models/wresnet50-1b.mlir" p3.16xlarge:2
fi
