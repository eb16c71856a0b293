#!/usr/bin/env bash
# How well a measured profile predicts steps on the CPU workers of this machine: for each pair of a model and a plan, the predicted
# seconds per step beside measured ones, in a table, with the machine's load at the time.
#
#   benches/cpu_fidelity.sh [TABLE.md]        STEPS=8 steps a pair at least, and SECONDS_EACH=2; EVERY=5 pairs until the machine is
#                                             profiled again, since other work on it comes and goes; ONLY='name' or '@(name|other)' alone
#   CORE=0 benches/cpu_fidelity.sh            on that core alone, by processor time: for machines that others use too
#
# The speed of a machine that others share changes within minutes, by half and more. So the same few steps are timed after each profile, and
# before and after each pair: while they differ from those after the profile by more than DRIFT=10 percent the pair is run again, up to
# TRIES=2 times, then the machine is profiled anew and the pair predicted again, up to PROFILES=3 times. The column `speed` is how much
# slower than after the profile they were when the pair counted (the larger of both).
#
# By the clock, the median of the later half of the steps counts: the first find cold caches. With CORE, all devices share one core,
# which is never idle during a step, so that a step takes the processor time that all of them use: that of a run, less that of a run
# of one step.
#
# Models are those of the tests and small ones by Hugging Face configs, which are written here.
set -euo pipefail
cd "$(dirname "$0")/.."
altiplano="${ALTIPLANO:-}"
if [ -z "$altiplano" ]; then
    cargo build --release --quiet
    altiplano="${CARGO_TARGET_DIR:-target}/release/altiplano"
fi
drift="${DRIFT:-10}" tries="${TRIES:-2}" profiles="${PROFILES:-3}"
least="${STEPS:-8}" seconds_each="${SECONDS_EACH:-2}" core="${CORE:-}" every="${EVERY:-5}" only="${ONLY:-}"
table="${1:-/dev/stdout}"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

config() { mkdir -p "$scratch/$1" && printf '%s\n' "$2" > "$scratch/$1/config.json"; }
config gpt2 '{"model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 256, "n_positions": 256, "vocab_size": 2048}'
config llama '{"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 256, "intermediate_size": 688, "vocab_size": 2048, "max_position_embeddings": 256}'
config t5 '{"model_type": "t5", "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "d_model": 256, "d_kv": 64, "d_ff": 1024, "vocab_size": 2048}'
config bert '{"model_type": "bert", "num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 2048, "max_position_embeddings": 256}'
config mixtral '{"model_type": "mixtral", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 192, "intermediate_size": 512, "vocab_size": 2048, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 256}'
config vit '{"model_type": "vit", "num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 192, "intermediate_size": 768, "image_size": 64, "patch_size": 8, "num_channels": 3}'

one="--cluster local:1"
dp2="--cluster local:2 --dp 2 --tp 1 --pp 1 --zero 0" tp2="--cluster local:2 --dp 1 --tp 2 --pp 1"
pp2="--cluster local:2 --dp 1 --tp 1 --pp 2" fsdp2="--cluster local:2 --dp 2 --tp 1 --pp 1 --zero 3"
four="--cluster local:4 --dp 2 --tp 1 --pp 2" again="--cluster local:2 --dp 2 --tp 1 --pp 1 --recompute full"
demo="examples/models/gpt-small-demo.mlir"
pairs=(
    "gpt demo|$demo|$one" "gpt demo|$demo|$dp2" "gpt demo|$demo|$tp2" "gpt demo|$demo|$pp2" "gpt demo|$demo|$four"
)
for name in gpt2 llama bert t5 mixtral; do
    model="$scratch/$name/config.json --seq 128 --global-batch 8"
    for plan in "$one" "$dp2" "$tp2" "$pp2"; do pairs+=("$name|$model|$plan"); done
done
for name in gpt2 llama; do
    model="$scratch/$name/config.json --seq 128 --global-batch 8"
    for plan in "$four" "$fsdp2" "$again"; do pairs+=("$name|$model|$plan"); done
done
for plan in "$one" "$dp2"; do pairs+=("vit|$scratch/vit/config.json --global-batch 16|$plan"); done
for model in resnet unet moe-sorted state-space; do
    for plan in "$one" "$dp2"; do pairs+=("$model|tests/models/$model.mlir|$plan"); done
done

pinned=()
[ -z "$core" ] || pinned=(taskset -c "$core")

# Lines `80.5 ms/step` as milliseconds.
in_ms() { awk '{ split($2, unit, "/"); u = unit[1]; print u == "us" ? $1 / 1000 : u == "ms" ? $1 : $1 * 1000 }'; }
median() { sort -g | awk '{ all[NR] = $1 } END { print all[int((NR + 1) / 2)] }'; }
# Processor seconds of a run of a plan for so many steps; what it says is in out.
spent() {
    local TIMEFORMAT='%U %S'
    { time "${pinned[@]}" "$altiplano" run "$scratch/$1.json" --steps "$2" > "$scratch/out" 2> "$scratch/err"; } 2>&1 |
        awk '{ print $1 + $2 }'
}
# Milliseconds of the later half of a run's steps.
later_half() { awk -v n="$1" '$1 == "step" && $2 > 1 + n / 2 { print $5, $6 }' "$scratch/out" | in_ms | median; }
# Milliseconds of the steps by which speed is told.
probe() {
    spent probe 41 > "$scratch/spent"
    later_half 40
}
# How much slower the second is than the first, in percent, and whether that is little.
slower() { awk -v a="$1" -v b="$2" 'BEGIN { print 100 * (b / a - 1) }'; }
is_little() { awk -v s="$1" -v d="$drift" 'BEGIN { exit !(s < d && s > -d) }'; }
# Profiles the machine, again if its speed has changed meanwhile.
profile() {
    local before turn
    for ((turn = 1; turn <= profiles; turn++)); do
        before="$(probe)"
        "${pinned[@]}" "$altiplano" profile -o "$scratch/profile.json" 2>&1 | sed "s/^/before pair $((count + 1)): /" >&2
        base="$(probe)"
        if is_little "$(slower "$before" "$base")"; then return; fi
    done
}
# shellcheck disable=SC2086
"$altiplano" plan $demo $dp2 -o "$scratch/probe.json" > /dev/null
count=0
{
    echo "| model | plan | predicted ms | measured ms | error | speed |"
    echo "| --- | --- | ---: | ---: | ---: | ---: |"
    for pair in "${pairs[@]}"; do
        IFS='|' read -r name model plan <<< "$pair"
        # A pattern.
        # shellcheck disable=SC2053
        if [ -n "$only" ] && [[ "$name" != $only ]]; then continue; fi
        if [ $((count % every)) = 0 ]; then profile; fi
        for ((turn = 1; turn <= profiles * tries; turn++)); do
            if [ "$turn" -gt 1 ] && [ $(((turn - 1) % tries)) = 0 ]; then profile; fi
            # shellcheck disable=SC2086
            if ! "$altiplano" plan $model $plan --profile "$scratch/profile.json" -o "$scratch/pair.json" > "$scratch/out" 2> "$scratch/err"; then
                echo "$name $plan: $(tail -1 "$scratch/err")" >&2
                count=$((count + 1))
                continue 2
            fi
            [ "$turn" -gt 1 ] || grep -h '^warning: .*profile' "$scratch/err" | sed "s/^/$name $plan: /" >&2 || true
            predicted="$(awk '/^  predicted step/ { print $3, $4 }' "$scratch/out" | in_ms)"
            steps="$(awk -v p="$predicted" -v s="$seconds_each" -v n="$least" 'BEGIN { w = int(1000 * s / p); if (w < n) w = n; print w }')"
            before="$(slower "$base" "$(probe)")"
            first="$(spent pair 1)"
            all="$(spent pair $((steps + 1)))"
            if [ -n "$core" ]; then
                measured="$(awk -v a="$first" -v b="$all" -v n="$steps" 'BEGIN { print 1000 * (b - a) / n }')"
            else
                measured="$(later_half "$steps")"
            fi
            after="$(slower "$base" "$(probe)")"
            speed="$(awk -v x="$before" -v y="$after" 'BEGIN { print (x * x > y * y ? x : y) }')"
            if is_little "$speed"; then break; fi
            echo "$name $plan: predicted $predicted ms, measured $measured, but the machine is $speed % slower than when it was profiled" >&2
        done
        count=$((count + 1))
        awk -v n="$name" -v p="${plan#--cluster }" -v a="$predicted" -v b="$measured" -v l="$speed" \
            'BEGIN { printf "| %s | %s | %.3g | %.3g | %+.1f %% | %+.1f %% |\n", n, p, a, b, 100 * (a / b - 1), l }'
    done
} | tee "$scratch/table" > "$table"
awk -F'|' 'NR > 2 { e = $6 + 0; print e < 0 ? -e : e }' "$scratch/table" | sort -g | awk '
    { all[NR] = $1; within += $1 <= 15 }
    END { if (NR) printf "\n%d pairs: median error %.1f %%, worst %.1f %%, within 15 %%: %d\n", NR, all[int((NR + 1) / 2)], all[NR], within }' >> "$table"
