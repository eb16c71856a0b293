#!/usr/bin/env bash
# Kills or stops a rank of a run at random moments, also while checkpoints are written, and counts what follows: whether all others
# noticed within 10 s with one message, whether a process or half a checkpoint was left, and whether the run that goes on from the
# newest checkpoint has the losses, to the bit, of one that nothing happened to.
#
#   benches/faults.sh [RUNS] [ALTIPLANO] [SEED]   default: 40 runs of target/debug/altiplano, built with --features mpi, seed 7
set -uo pipefail
cd "$(dirname "$0")/.."

runs="${1:-40}"
altiplano="$(realpath "${2:-${CARGO_TARGET_DIR:-target}/debug/altiplano}")"
seed="${3:-7}"
steps=200
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
# What there is so far is told where the campaign is ended early.
trap 'runs=0' TERM
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
RANDOM=$seed

ranks=4
plan="$scratch/plan.json"
"$altiplano" plan tests/models/moe-sorted.mlir --cluster local:4 --dp 2 --tp 2 -o "$plan" > "$scratch/log" || exit 1
start() { # metrics folder [options]
    local metrics="$1" folder="$2"
    shift 2
    exec mpirun --oversubscribe -q -n "$ranks" "$altiplano" run "$plan" --engine mpi --reduce-in-order --steps "$steps" \
        --metrics "$metrics" --checkpoint "$folder" --checkpoint-every 10 "$@"
}
losses() { sed -n 's/.*"step":\([0-9]*\),"loss":\([^,]*\),.*/\1 \2/p' "$1"; }
processes() { pgrep -f "$altiplano run $plan" || true; }
of_rank() {
    local pid
    for pid in $(processes); do
        tr '\0' '\n' < "/proc/$pid/environ" 2> /dev/null | grep -qx "OMPI_COMM_WORLD_RANK=$1" && echo "$pid"
    done
}

# How long training takes when nothing happens, so that signals come while it goes on, however fast the machine is.
(start "$scratch/whole" "$scratch/whole-checkpoints") > "$scratch/log" 2>&1 &
launcher=$!
until [ -s "$scratch/whole" ] || ! kill -0 "$launcher" 2> /dev/null; do sleep 0.02; done
from=$(date +%s%N)
wait "$launcher" || { cat "$scratch/log"; exit 1; }
whole_ms=$((($(date +%s%N) - from) / 1000000))
losses "$scratch/whole" > "$scratch/expected"
[ -s "$scratch/expected" ] || { echo "no losses in $(head -c 200 "$scratch/whole")"; exit 1; }

hit=0 noticed=0 messages=0 orphans=0 damaged=0 lost=0 resumed=0 equal=0 writing=0 early=0 late=0
declare -A taken=([KILL]="" [STOP]="")
# Median and slowest of what was waited after a signal.
waited() { tr ' ' '\n' <<< "${taken[$1]}" | sort -n | awk 'NF { t[++n] = $1 } END { if (n) printf "%.1f s, %.1f s (%d)", t[int((n + 1) / 2)] / 1000, t[n] / 1000, n; else printf "none" }'; }
for ((i = 0; hit < runs && i < 2 * runs; i++)); do
    hit_writing=0
    folder="$scratch/run-$i" metrics="$scratch/metrics-$i"
    signal=KILL
    ((i % 2)) && signal=STOP
    victim=$((RANDOM % ranks))
    (start "$metrics" "$folder") > "$scratch/out" 2> "$scratch/err" &
    launcher=$!
    until [ -s "$metrics" ] || ! kill -0 "$launcher" 2> /dev/null; do sleep 0.02; done
    if ((i % 4 >= 2)); then
        # While a checkpoint is written its folder has another name.
        for ((t = 0; t < 500; t++)); do
            compgen -G "$folder/*part*" > /dev/null && { hit_writing=1; break; }
            sleep 0.002
        done
    else
        sleep "$(awk -v "ms=$((whole_ms * 8 / 10 * (RANDOM % 1000) / 1000))" 'BEGIN { print ms / 1000 }')"
    fi
    pid="$(of_rank "$victim" | head -1)"
    if [ -z "$pid" ] || ! kill "-$signal" "$pid" 2> /dev/null; then
        ((early++))
        wait "$launcher"
        continue
    fi
    ((hit++))
    from=$(date +%s%N)
    # The others and the launcher; a process that is stopped ends with the launcher.
    while kill -0 "$launcher" 2> /dev/null && (($(date +%s%N) - from < 20000000000)); do sleep 0.02; done
    took=$((($(date +%s%N) - from) / 1000000))
    told="$(sed -n 's/^checkpoint of step \([0-9]*\):.*/\1/p' "$scratch/out" | tail -1)"
    if ((${told:-0} == steps)); then
        # The last checkpoint was written before the signal came: there was nothing left to lose, nor anybody to notice.
        ((hit--, late++))
        kill -KILL "$launcher" $(processes) 2> /dev/null
        wait "$launcher" 2> /dev/null
        "$altiplano" checkpoint "$(ls -d "$folder"/step-* | tail -1)" > "$scratch/log" 2>&1 || ((damaged++))
        continue
    fi
    ((writing += hit_writing))
    taken[$signal]+=" $took"
    ((took <= 10000)) && ((noticed++))
    kill -KILL "$launcher" 2> /dev/null
    wait "$launcher" 2> /dev/null
    if [ "$(grep -c '^error: ' "$scratch/err")" = 1 ] && grep -q "^error: rank $victim on " "$scratch/err"; then
        ((messages++))
    else
        sed 's/^/  said: /' "$scratch/err" | head -5 >&2
    fi
    left="$(processes)"
    [ -n "$left" ] && { ((orphans++)); kill -KILL $left; }
    for checkpoint in "$folder"/step-*; do
        [ -d "$checkpoint" ] || continue
        case "$checkpoint" in *part*) continue ;; esac
        "$altiplano" checkpoint "$checkpoint" > "$scratch/log" 2>&1 || ((damaged++))
    done
    # The file of metrics goes on where the checkpoint was.
    if (start "$metrics" "$folder" --resume) > "$scratch/log" 2>&1; then
        ((resumed++))
        losses "$metrics" | awk '{ last[$1] = $2 } END { for (s in last) print s, last[s] }' | sort -n > "$scratch/found"
        # What was told to be written is what it goes on from, or a later one.
        after="$(sed -n 's/^going on after step \([0-9]*\),.*/\1/p' "$scratch/log")"
        ((${after:-0} < ${told:-0})) && { ((lost++)); echo "  lost: step $told was written, and it went on after ${after:-none}" >&2; }
        if cmp -s "$scratch/found" "$scratch/expected"; then ((equal++)); else diff "$scratch/found" "$scratch/expected" | head -4; fi
    else
        cat "$scratch/log"
    fi
    rm -rf "$folder"
    echo "run $((i + 1)): $signal rank $victim, ended after $took ms; of $hit: noticed $noticed, one message $messages, equal $equal" >&2
done
echo "| ranks hit (during a checkpoint) | ended within 10 s | after a kill, median and slowest | after a stop, median and slowest | one message that names the rank | processes left | checkpoints damaged, lost | resumed | losses equal to the bit |"
echo "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
echo "| $hit ($writing) | $noticed | $(waited KILL) | $(waited STOP) | $messages | $orphans | $damaged, $lost | $resumed | $equal |"
((early + late == 0)) || echo "In $((early + late)) more runs all steps were done, and their checkpoint was written, before the signal."
[ "$hit" = "$noticed" ] && [ "$hit" = "$messages" ] && [ "$orphans" = 0 ] && [ "$damaged" = 0 ] && [ "$lost" = 0 ] && [ "$hit" = "$equal" ]
