#!/usr/bin/env bash
# What a machine with an NVIDIA GPU makes of plans: whether both engines, XLA through PJRT and our own for CUDA, compute there what one CPU
# device computes, how long their steps take beside the same models in JAX and in PyTorch, and what the plans predict. Everything is
# printed as it is known.
#
#   benches/gpu.sh [--seconds N] [-o FILE]     default: 540, benches/results/gpu.md
#   benches/gpu.sh --emulate                   the engine for CUDA on a GPU that g++ emulates, which shows that this script works
#
# Nothing new begins after N seconds. The libraries are those of the Python environment that VIRTUAL_ENV names, whose python3 runs JAX and
# PyTorch. ALTIPLANO_BINARY names a program that is built already.
set -euo pipefail
cd "$(dirname "$0")/.."
emulate=0 seconds=540 result=benches/results/gpu.md
while [ $# -gt 0 ]; do
    case "$1" in
    --emulate) emulate=1 ;;
    --seconds) seconds="$2" && shift ;;
    -o) result="$2" && shift ;;
    *) echo "gpu.sh: unknown argument $1" >&2 && exit 2 ;;
    esac
    shift
done
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
deadline=$((SECONDS + seconds))

altiplano="${ALTIPLANO_BINARY:-${CARGO_TARGET_DIR:-target}/release/altiplano}"
[ -n "${ALTIPLANO_BINARY:-}" ] || cargo build --release --quiet
if [ "$emulate" = 1 ]; then
    result="$scratch/result.md"
    mkdir "$scratch/emulated"
    g++ -w -std=c++17 -O1 -shared -fPIC -DGPUS=1 -o "$scratch/emulated/libcuda.so.1" runtime/tests/cuda/emulated.cpp
    for library in libnvrtc.so.13 libcublasLt.so.13 libnccl.so.2; do ln -s libcuda.so.1 "$scratch/emulated/$library"; done
    export ALTIPLANO_CUDA="$scratch/emulated" XDG_CACHE_HOME="$scratch/cache"
fi
"$altiplano" devices > "$scratch/devices"
grep -q '^cuda     usable' "$scratch/devices" || { cat "$scratch/devices"; exit 2; }
python="${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/}python3"
engines=(xla:cuda cuda)
[ "$emulate" = 0 ] || engines=(cuda)

# A command within its seconds and what is left of the time.
within() {
    local most="$1" left=$((deadline - SECONDS))
    shift
    [ "$left" -gt 0 ] || { echo 'no time is left' >&2; return 124; }
    timeout "$((left < most ? left : most))" "$@"
}

# The reason of a failure, in a cell of a table.
reason() { grep -m 1 '^error' "$scratch/stderr" | cut -c 1-200 | tr '|' '/' || tail -1 "$scratch/stderr" | cut -c 1-200 | tr '|' '/'; }

# One row for each engine: whether a model under a plan gives what one CPU device gives, and what is recorded in FILE, if there is one.
verified() {
    local model="$1" expect="$2" words="$3" engine options=()
    [ -z "$expect" ] || options=(--expect "$expect")
    for engine in "${engines[@]}"; do
        [ "$SECONDS" -lt "$deadline" ] || { echo "| $(basename "$model") | \`$words\` | $engine | no time was left |" && continue; }
        # Weights that did not move far say little of them.
        # shellcheck disable=SC2086
        if within 60 "$altiplano" verify "$model" $words "${options[@]}" --optimizer sgd --device "$engine" > "$scratch/said" 2> "$scratch/stderr"; then
            echo "| $(basename "$model") | \`$words\` | $engine | $(sed -n 's/^  \(loss\|gradient\) *agrees *\([^ ]*\) .*/\2/p' "$scratch/said" | tr '\n' ' ')|"
        else
            touch "$scratch/failed"
            echo "| $(basename "$model") | \`$words\` | $engine | FAILED: $(reason) |"
        fi
    done
}

correctness() {
    printf '\n## Correctness\n\nOff in loss and gradients, relative: against one CPU device, then against recorded values.\n\n'
    printf '| model | plan | device | off by |\n| --- | --- | --- | --- |\n'
    local small='"vocab_size": 64, "max_position_embeddings": 64, "num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2'
    echo '{"model_type": "gpt2", "vocab_size": 64, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}' > "$scratch/gpt2.json"
    echo "{\"model_type\": \"llama\", \"intermediate_size\": 96, \"num_key_value_heads\": 2, $small}" > "$scratch/llama.json"
    echo "{\"model_type\": \"mixtral\", \"intermediate_size\": 96, \"num_key_value_heads\": 2, \"num_local_experts\": 4, \"num_experts_per_tok\": 2, $small}" > "$scratch/mixtral.json"
    local on='--seq 64 --global-batch 4 --cluster dgx-h100:1/1'
    verified "$scratch/gpt2.json" "" "$on"
    [ "$emulate" = 0 ] || return 0
    verified "$scratch/gpt2.json" "" "$on --precision bf16"
    verified "$scratch/llama.json" "" "$on --precision bf16 --microbatch 2"
    verified "$scratch/llama.json" "" "$on --precision f16 --recompute full"
    verified "$scratch/mixtral.json" "" "$on"
    # Devices that share a GPU exchange through the host.
    engines=(cuda)
    verified "$scratch/gpt2.json" "" '--seq 64 --global-batch 4 --cluster local:4 --dp 2 --tp 2 --zero 3'
    verified "$scratch/gpt2.json" "" '--seq 64 --global-batch 4 --cluster local:2 --pp 2'
}

# Models with recorded values.
recorded() {
    printf '\n## Recorded values\n\n| model | plan | device | off by |\n| --- | --- | --- | --- |\n'
    local file expect
    engines=(xla:cuda cuda)
    for file in tests/models/*.mlir "${ALTIPLANO_MODELS:-../shared/models}"/*.mlir; do
        for expect in "${file%.mlir}.safetensors" "${file%.mlir}.expected.safetensors"; do
            [ ! -f "$expect" ] || verified "$file" "$expect" '--cluster local:1'
        done
    done
}

# The median of the later half of numbers, one a line.
median() { tail -n +$(($(wc -l < "$1") / 2 + 1)) "$1" | sort -g | awk '{ a[NR] = $1 } END { if (NR) printf "%.2f", a[int((NR + 1) / 2)] }'; }

# Milliseconds and GB of a step by an engine.
engine_step() {
    rm -f "$scratch/metrics"
    within 150 "$altiplano" run "$scratch/step.plan.json" --steps 20 --lr 0.0001 --device "$1" --metrics "$scratch/metrics" > "$scratch/said" 2> "$scratch/stderr" || true
    sed -n 's/.*"seconds": *\([0-9.eE+-]*\).*/\1/p' "$scratch/metrics" 2> /dev/null | awk '{ print 1000 * $1 }' > "$scratch/ms" || true
    local ms held
    ms="$(median "$scratch/ms")"
    held="$(awk '$2 == "stage0" { print $3 }' "$scratch/said" | head -1)"
    if [ -n "$ms" ]; then echo "$ms / $held"; else touch "$scratch/failed" && echo "FAILED: $(reason)"; fi
}

python_step() { within 150 "$python" "$@" 2> "$scratch/stderr" | sed 's: : / :' || echo 'failed'; }

# A row of the table of steps: GPT-2's architecture by layers, width, heads, batch and precision.
step() {
    local title="$1" layers="$2" width="$3" heads="$4" batch="$5" precision="$6" length=1024 predicted
    [ "$SECONDS" -lt "$deadline" ] || { echo "| $title | no time was left |" && return; }
    echo "{\"model_type\": \"gpt2\", \"vocab_size\": 50257, \"n_positions\": $length, \"n_embd\": $width, \"n_layer\": $layers, \"n_head\": $heads}" > "$scratch/step.json"
    within 60 "$altiplano" plan "$scratch/step.json" --seq "$length" --cluster "$cluster" --global-batch "$batch" --precision "$precision" -o "$scratch/step.plan.json" \
        > /dev/null 2> "$scratch/stderr" || { echo "| $title | no plan: $(reason) |"; return; }
    predicted="$(sed -n 's/.*"step_time_s": *\([0-9.eE+-]*\).*/\1/p' "$scratch/step.plan.json" | head -1 | awk '{ printf "%.2f", 1000 * $1 }')"
    printf '| %s | %s ' "$title" "$predicted"
    local sizes="$layers $width $heads $batch $length $precision" kernels=cudnn
    # cuDNN's attention takes 16-bit types.
    [ "$precision" = bf16 ] || kernels=xla
    printf '| %s ' "$(engine_step xla:cuda)"
    # shellcheck disable=SC2086
    printf '| %s ' "$(python_step benches/gpu_jax.py $sizes $kernels)"
    # shellcheck disable=SC2086
    printf '| %s ' "$(python_step benches/gpu_torch.py step $sizes compile)"
    printf '| %s |\n' "$(engine_step cuda)"
}

steps() {
    printf '\n## Steps\n\nMilliseconds of a step (median of the later half) and GB of memory. Sequences of 1024 tokens, AdamW; with bf16, weights and state are\n'
    printf 'kept in f32. JAX has attention by cuDNN in bf16, and by XLA in f32.\n\n'
    echo '| model | predicted | `--device xla:cuda` | JAX | torch.compile | `--device cuda` |'
    echo '| --- | --- | --- | --- | --- | --- |'
    step 'GPT-2 124M, bf16, batch 8' 12 768 12 8 bf16
    step 'GPT 1.3B, bf16, batch 4' 24 2048 32 4 bf16
    step 'GPT-2 124M, f32, batch 4' 12 768 12 4 f32
}

mkdir -p "$(dirname "$result")"
{
    echo "# Plans on a GPU, $(date -u +%F)"
    # shellcheck disable=SC2016
    printf '\n`benches/gpu.sh` on\n\n```\n%s\n```\n' "$(cat "$scratch/devices")"
    correctness
    if [ "$emulate" = 0 ]; then
        # The catalogue's device for the figures that plans predict.
        case "$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)" in *H200*) cluster=dgx-h200:1/1 ;; *A100*) cluster=dgx-a100:1/1 ;; *B200*) cluster=dgx-b200:1/1 ;; *) cluster=dgx-h100:1/1 ;; esac
        steps
        recorded
    fi
    printf '\nTook %d s.\n' "$SECONDS"
} | tee "$result"
[ ! -e "$scratch/failed" ]
