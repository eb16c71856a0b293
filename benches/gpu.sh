#!/usr/bin/env bash
# What a machine with a GPU says of CUDA devices, in one go of less than twenty minutes: whether models compute there what is recorded of
# them and what one CPU device computes, alone and under plans of several devices (which share one GPU and exchange through the host where
# there are fewer GPUs than devices); how long steps of GPT-2 take, beside PyTorch where that is installed; and how both compare with
# the matrix products that the GPU reaches, and with what the plan predicts by its cluster's figures and by a profile that is measured
# first. Writes benches/results/NAME.md.
#
#   benches/gpu.sh [--emulate] [NAME]     default: gpu
#
# ALTIPLANO_CUDA names folders with NVRTC and cuBLASLt, ALTIPLANO_BINARY a program that is built already, ALTIPLANO_MODELS a folder of
# models with recorded numbers beside those of tests/models. With --emulate everything that is not about speed runs on the GPU that g++
# emulates for the tests, which shows that this script works.
set -euo pipefail
cd "$(dirname "$0")/.."
emulate=0
[ "${1:-}" != --emulate ] || { emulate=1; shift; }
name="${1:-gpu}"
result="benches/results/$name.md"
target="${CARGO_TARGET_DIR:-target}"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
# Nothing new begins after this many seconds, and nothing goes on for long beyond.
deadline=$((SECONDS + 1080))

altiplano="${ALTIPLANO_BINARY:-$target/release/altiplano}"
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

failed=0
# A command within what is left of the time.
within() {
    local left=$((deadline - SECONDS))
    [ "$left" -gt 0 ] || { echo 'no time is left' >&2; return 124; }
    timeout $((left + 60)) "$@"
}

# One line of a table: whether a plan of a model on GPUs gives what one CPU device gives, and what is recorded in FILE, if there is one.
verified() {
    local model="$1" expect="$2" words="$3"
    local options=()
    [ -z "$expect" ] || options=(--expect "$expect")
    # The options of a plan are several words.
    # shellcheck disable=SC2086
    if within "$altiplano" verify "$model" $words "${options[@]}" --optimizer sgd --device cuda > "$scratch/said" 2> "$scratch/stderr"; then
        local differences
        differences="$(sed -n 's/^  \(loss\|gradient\) *agrees *\([^ ]*\) \(relative\|absolute\).*/\2/p' "$scratch/said" | tr '\n' ' ')"
        echo "| $(basename "$model") | \`$words\` | agrees: $differences|"
    else
        # Written by a function in a pipeline, a variable would be lost.
        touch "$scratch/failed"
        echo "| $(basename "$model") | \`$words\` | FAILED: $(tail -1 "$scratch/stderr" | tr '|' '/') |"
    fi
}

# Every model with recorded numbers on one device, and some under plans.
models() {
    echo '| model | plan | loss and gradients against one CPU device, then against the recorded ones |'
    echo '| --- | --- | --- |'
    local one='--cluster local:1' folder file
    for folder in tests/models "${ALTIPLANO_MODELS:-../shared/models}"; do
        for file in "$folder"/*.mlir; do
            local expect="${file%.mlir}.safetensors"
            [ -f "$expect" ] || expect="${file%.mlir}.expected.safetensors"
            [ -f "$expect" ] || continue
            case "$emulate$(basename "$file")" in 1state-space.mlir | 0*) verified "$file" "$expect" "$one" ;; esac
        done
    done
    local small='"vocab_size": 64, "max_position_embeddings": 16, "num_attention_heads": 4, "hidden_size": 16, "num_hidden_layers": 2'
    echo '{"model_type": "gpt2", "vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}' > "$scratch/gpt2.json"
    echo "{\"model_type\": \"llama\", \"intermediate_size\": 32, \"num_key_value_heads\": 2, $small}" > "$scratch/llama.json"
    echo "{\"model_type\": \"mixtral\", \"intermediate_size\": 32, \"num_key_value_heads\": 2, \"num_local_experts\": 4, \"num_experts_per_tok\": 2, $small}" > "$scratch/mixtral.json"
    # On devices of the catalogue attention is one kernel.
    local plans=("$one" '--cluster dgx-h200:1/1' '--cluster dgx-h200:1/1 --precision bf16' '--cluster dgx-h200:1/2 --tp 2' '--cluster local:2 --dp 2' '--cluster local:2 --tp 2' '--cluster local:2 --pp 2' '--cluster local:4 --dp 2 --tp 2 --zero 3'
        "$one --precision bf16")
    local shapes=(gpt2 llama mixtral)
    [ "$emulate" = 0 ] || { plans=("${plans[1]}" '--cluster local:2 --dp 2'); shapes=(gpt2); }
    local shape words
    for shape in "${shapes[@]}"; do
        for words in "${plans[@]}"; do
            verified "$scratch/$shape.json" "" "--seq 16 --global-batch 8 $words"
        done
    done
}

# How far PyTorch's bf16 is from its f32, for the last table's rows of bf16.
rounding() {
    local said
    said="$(within "$python" benches/gpu_torch.py error 2 16 4 8 16 64 2> /dev/null)" || { echo 'PyTorch could not say how far its bf16 is from f32.'; return; }
    echo "PyTorch's bf16 differs from its f32 by ${said% *} in the loss and by ${said#* } in gradients, for the same sizes as those of GPT-2 here: two"
    echo "ways to compute in bf16, as a GPU's and a CPU's in the rows above with \`--precision bf16\`, may differ by twice that."
}

# The median of the last half of numbers, one a line.
median() { tail -n +$(($(wc -l < "$1") / 2 + 1)) "$1" | sort -g | awk '{ a[NR] = $1 } END { if (NR) print a[int((NR + 1) / 2)]; else print "failed" }'; }

python="${ALTIPLANO_PYTHON:-python3}"
torch() { "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2> /dev/null; }

# Milliseconds that a plan says its step takes.
step_ms() { sed -n 's/.*"step_time_s": *\([0-9.eE+-]*\).*/\1/p' "$1" | head -1 | awk '{ printf "%.2f", 1000 * $1 }'; }

# What kernels take here, measured once.
profiled() {
    local options=()
    [ "$emulate" = 0 ] || options=(--quick)
    if within "$altiplano" profile --device cuda "${options[@]}" -o "$scratch/profile.json" > /dev/null 2> "$scratch/stderr"; then
        echo "What kernels take here: $(grep -o 'measured [0-9]* series in .*' "$scratch/stderr" | tail -1)."
    else
        touch "$scratch/failed"
        echo "What kernels take here could not be measured: $(tail -1 "$scratch/stderr")."
    fi
}

# A plan for the emulated GPU, predicted by what was measured of it.
emulated_plan() {
    local said
    printf 'name = "emulated"\n[[group]]\nnodes = 1\ndevices_per_node = 1\ndevice = "Emulated"\nintra_node = { kind = "pcie", bytes_per_s = 2.5e10, latency_s = 1e-5 }\n' > "$scratch/emulated.toml"
    printf '[device."Emulated"]\nmemory_bytes = 1e9\nmemory_bytes_per_s = 9e11\npeak_flops = { f32 = 4e13, f16 = 1.6e14, bf16 = 1.6e14 }\n' >> "$scratch/emulated.toml"
    if "$altiplano" plan "$scratch/gpt2.json" --seq 16 --global-batch 8 --cluster "$scratch/emulated.toml" -o "$scratch/emulated.plan.json" > /dev/null 2> "$scratch/stderr"; then
        said="$(by_profile "$scratch/emulated.plan.json" 0)"
        echo "By it a step of gpt2.json is predicted to take $said ms."
        [ -n "$said" ] || touch "$scratch/failed"
    else
        touch "$scratch/failed"
        tail -1 "$scratch/stderr"
    fi
}

# What the profile predicts of the step of a plan, and how far from so many milliseconds that is.
by_profile() {
    local plan="$1" ms="$2" said
    [ -f "$scratch/profile.json" ] || { echo '-'; return; }
    said="$(within "$altiplano" simulate "$plan" --profile "$scratch/profile.json" 2> "$scratch/stderr")" || { echo "failed: $(tail -1 "$scratch/stderr" | tr '|' '/')"; return; }
    # The first line ends with `: 112 ms a step of ...`.
    printf '%s\n' "$said" | sed -n '1s/.*: \([0-9.]*\) \(s\|ms\|us\) a step of.*/\1 \2/p' | awk -v ms="$ms" '{
        at = $1 * ($2 == "s" ? 1000 : $2 == "us" ? 0.001 : 1)
        if (ms + 0 > 0) printf "%.2f (%+.1f %%)", at, 100 * (at / ms - 1); else printf "%.2f", at }'
}

# A step of GPT-2's architecture here and in PyTorch: name, layers, width, heads, batch, sequence, precision.
step() {
    local title="$1" layers="$2" width="$3" heads="$4" batch="$5" length="$6" precision="$7"
    local config="$scratch/step.json" plan="$scratch/step.plan.json" metrics="$scratch/metrics" ms held predicted predicted_ms measured_ms flop rate
    echo "{\"model_type\": \"gpt2\", \"vocab_size\": 50257, \"n_positions\": $length, \"n_embd\": $width, \"n_layer\": $layers, \"n_head\": $heads}" > "$config"
    within "$altiplano" plan "$config" --seq "$length" --cluster dgx-h200:1/1 --global-batch "$batch" --precision "$precision" -o "$plan" \
        > /dev/null 2> "$scratch/stderr" || { echo "| $title | no plan: $(tail -1 "$scratch/stderr") |"; return; }
    rm -f "$metrics"
    within "$altiplano" run "$plan" --steps 12 --lr 0.0001 --device cuda --metrics "$metrics" > "$scratch/said" 2> "$scratch/stderr" || true
    sed -n 's/.*"seconds": *\([0-9.eE+-]*\).*/\1/p' "$metrics" 2> /dev/null | awk '{ print 1000 * $1 }' > "$scratch/ms" || true
    ms="$(median "$scratch/ms")"
    held="$(awk '$2 == "stage0" { print $3, $4 }' "$scratch/said" | head -1)"
    predicted="$(awk '$2 == "stage0" { print $5, $6 }' "$scratch/said" | head -1)"
    predicted_ms="$(step_ms "$plan")"
    measured_ms="$(by_profile "$plan" "$ms")"
    flop="$(sed -n 's/.*"model_flop": *\([0-9.eE+-]*\).*/\1/p' "$plan" | head -1)"
    rate="$(awk -v flop="${flop:-0}" -v ms="$ms" -v peak="$peak" 'BEGIN { if (ms + 0 > 0) printf "%.1f TFLOP/s", flop / ms / 1e9; if (ms + 0 > 0 && peak + 0 > 0) printf ", %.1f %% of the peak", flop / ms / 1e7 / peak }')"
    [ "$ms" != failed ] || { touch "$scratch/failed"; ms="failed: $(tail -1 "$scratch/stderr" | tr '|' '/')"; }
    local eager=- compiled=-
    if torch; then
        eager="$(within "$python" benches/gpu_torch.py step "$layers" "$width" "$heads" "$batch" "$length" "$precision" eager 2> /dev/null || echo failed)"
        compiled="$(within "$python" benches/gpu_torch.py step "$layers" "$width" "$heads" "$batch" "$length" "$precision" compile 2> /dev/null || echo failed)"
    fi
    echo "| $title | $ms | $predicted_ms | $measured_ms | $rate | ${held:-?} | ${predicted:-?} | $eager | $compiled |"
}

# What of a step is spent in kernels, where Nsight Systems is there.
outside() {
    command -v nsys > /dev/null || { echo 'Time outside kernels: not measured, since there is no nsys (Nsight Systems).'; return; }
    within nsys profile --force-overwrite true --cuda-graph-trace=node -o "$scratch/nsys" "$altiplano" run "$scratch/step.plan.json" --steps 12 --device cuda \
        --metrics "$scratch/nsys.metrics" > /dev/null 2>&1 || { echo 'Time outside kernels: nsys failed.'; return; }
    local kernels steps
    kernels="$(nsys stats --report cuda_gpu_kern_sum --format csv "$scratch/nsys.nsys-rep" 2> /dev/null | awk -F, '$2 ~ /^[0-9]+$/ { s += $2 } END { print s / 1e9 }')"
    steps="$(sed -n 's/.*"seconds": *\([0-9.eE+-]*\).*/\1/p' "$scratch/nsys.metrics" | awk '{ s += $1 } END { print s }')"
    awk -v k="$kernels" -v s="$steps" 'BEGIN { printf "Kernels take %.3f s of %.3f s in all steps of the last row under `nsys`: %.1f %% are outside.\n", k, s, 100 * (1 - k / s) }'
}

peak=""
{
    echo "# Plans on GPUs, $(date -u +%F)"
    # The backquotes are the page's.
    # shellcheck disable=SC2016
    printf '\n`benches/gpu.sh %s` on\n\n```\n%s\n```\n' "$name" "$(cat "$scratch/devices")"
    printf '\n## What models compute\n\n'
    models
    printf '\n'
    profiled
    if [ "$emulate" = 1 ]; then
        # Times of an emulation say nothing; that a plan is predicted by them does.
        emulated_plan
    fi
    if [ "$emulate" = 0 ]; then
        if torch; then
            printf '\n'
            rounding
            peak="$(within "$python" benches/gpu_torch.py peak || true)"
            printf '\nMatrix products of bf16 reach %s TFLOP/s at most (square ones up to 16384, by PyTorch).\n' "${peak:-?}"
        else
            printf '\nPyTorch is not installed with CUDA, so that there is no peak and nothing to compare steps with.\n'
        fi
        printf '\n## Steps\n\nMedian of the later half of 12 steps in milliseconds, sequences of 1024 tokens, AdamW. PyTorch says milliseconds and GB of memory.\n\n'
        echo '| model | ms | predicted | by the profile | rate | memory | predicted | PyTorch eager | torch.compile |'
        echo '| --- | --- | --- | --- | --- | --- | --- | --- | --- |'
        step 'GPT-2 124M, f32, batch 4' 12 768 12 4 1024 f32
        step 'GPT-2 124M, bf16, batch 8' 12 768 12 8 1024 bf16
        step 'GPT 1.3B, bf16, batch 4' 24 2048 32 4 1024 bf16
        printf '\n'
        outside
    fi
    printf '\nTook %d s.\n' "$SECONDS"
} > "$result"
cat "$result"
[ ! -e "$scratch/failed" ] || failed=1
exit "$failed"
