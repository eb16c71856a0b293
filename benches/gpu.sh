#!/usr/bin/env bash
# What a machine with a GPU says of CUDA devices, in one go of some minutes: whether kernels compile for it, whether plans train there as
# on CPU workers (several devices of a plan on one GPU exchange through the host), and how long steps take. Writes
# benches/results/NAME.md.
#
#   benches/gpu.sh [NAME]     default: gpu; ALTIPLANO_CUDA names folders with NVRTC and cuBLASLt
set -euo pipefail
cd "$(dirname "$0")/.."
name="${1:-gpu}"
result="benches/results/$name.md"
target="${CARGO_TARGET_DIR:-target}"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

cargo build --release --quiet
altiplano="$target/release/altiplano"
"$altiplano" devices > "$scratch/devices"
grep -q '^cuda     usable' "$scratch/devices" || { cat "$scratch/devices"; exit 2; }

small='"vocab_size": 1000, "max_position_embeddings": 128, "num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2'
echo '{"model_type": "gpt2", "vocab_size": 1000, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}' > "$scratch/gpt2.json"
echo "{\"model_type\": \"llama\", \"intermediate_size\": 160, \"num_key_value_heads\": 2, $small}" > "$scratch/llama.json"
echo "{\"model_type\": \"mixtral\", \"intermediate_size\": 160, \"num_key_value_heads\": 2, \"num_local_experts\": 4, \"num_experts_per_tok\": 2, $small}" > "$scratch/mixtral.json"
echo '{"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}' > "$scratch/gpt2-124m.json"

failed=0
# Losses of five steps, one a line.
losses() { "$altiplano" run "$@" --steps 5 --lr 0.001 2> "$scratch/stderr" | sed -n 's/.*loss \([^ ]*\).*/\1/p'; }
agrees() {
    local model="$1" plan="$2"
    # The options of a plan are several words.
    # shellcheck disable=SC2086
    if ! losses "$scratch/$model.json" --seq 64 --global-batch 8 $plan > "$scratch/cpu"; then
        echo "| $model | \`$plan\` | not on the CPU: $(tail -1 "$scratch/stderr") |"
    # shellcheck disable=SC2086
    elif ! losses "$scratch/$model.json" --seq 64 --global-batch 8 $plan --device cuda > "$scratch/gpu"; then
        failed=1
        echo "| $model | \`$plan\` | FAILED: $(tail -1 "$scratch/stderr") |"
    else
        local worst
        worst="$(paste "$scratch/cpu" "$scratch/gpu" | awk '{ d = ($1 - $2) / $1; d = d < 0 ? -d : d; if (d > w) w = d } END { print w + 0, NR }')"
        # Losses are printed with seven digits; rounding grows from step to step.
        if awk -v worst="${worst% *}" -v steps="${worst#* }" 'BEGIN { exit !(steps == 5 && worst <= 1e-4) }'; then
            echo "| $model | \`$plan\` | agrees, within ${worst% *} |"
        else
            failed=1
            echo "| $model | \`$plan\` | DIFFERS by ${worst% *} in ${worst#* } steps |"
        fi
    fi
}

{
    echo "# Plans on GPUs, $(date -u +%F)"
    printf '\n`benches/gpu.sh %s` on\n\n```\n%s\n```\n' "$name" "$(cat "$scratch/devices")"
    printf '\n## Losses of five steps, on GPUs against CPU workers\n\n| model | plan | |\n| --- | --- | --- |\n'
    for model in gpt2 llama mixtral; do
        for plan in "--cluster local:1" "--cluster local:2 --dp 2" "--cluster local:2 --tp 2" "--cluster local:2 --pp 2" "--cluster local:4 --dp 2 --tp 2 --zero 3"; do
            agrees "$model" "$plan"
        done
    done
    printf '\n## Seconds of a step\n\nThe last of ten, one device on one GPU, as `altiplano run` says it.\n\n'
    for options in "--global-batch 1 --precision f32" "--global-batch 1 --precision bf16" "--global-batch 8 --precision bf16"; do
        # shellcheck disable=SC2086
        said="$("$altiplano" run "$scratch/gpt2-124m.json" --seq 1024 --cluster dgx-h100:1/1 $options --steps 10 --device cuda 2>&1 | grep '^step' | tail -1 || true)"
        echo "* GPT-2 124M, \`$options\`: ${said:-failed}"
    done
} > "$result"
cat "$result"
exit "$failed"
