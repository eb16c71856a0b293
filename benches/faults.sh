#!/usr/bin/env bash
# Kills, stops or cuts off ranks of a run at random moments, also while checkpoints are written, and counts what follows: whether all
# others noticed within 10 s with one message, whether a process or half a checkpoint was left, and whether the run that goes on from the
# newest checkpoint has the losses, to the bit, of one that nothing happened to.
#
#   benches/faults.sh [--engine mpi|processes] [--hosts] [--late] [RUNS] [ALTIPLANO] [SEED]
#
# Default: 40 runs of target/debug/altiplano, built with --features mpi, seed 7. Processes have GPUs, which are emulated here (it needs
# g++), with files in NCCL's place. --hosts runs two ranks on each of two hosts, which benches/hosts.sh plays, and cuts links too. With --late
# gradients are reduced while ranks compute the next step (over MPI, since GPUs do not).
set -uo pipefail
cd "$(dirname "$0")/.."

engine=mpi on_hosts="" update=()
while [[ "${1:-}" == --* ]]; do
    case "$1" in
        --engine) engine="$2"; shift 2 ;;
        --hosts) on_hosts=1; shift ;;
        --late) update=(--update stale); shift ;;
        *) sed -n '6p' "$0"; exit 2 ;;
    esac
done
runs="${1:-40}"
altiplano="$(realpath "${2:-${CARGO_TARGET_DIR:-target}/debug/altiplano}")"
seed="${3:-7}"
scratch="$(mktemp -d)"
export ALTIPLANO_HOSTS="fault$$"
trap 'benches/hosts.sh down 2> /dev/null; rm -rf "$scratch"' EXIT
# What there is so far is told where the campaign is ended early.
trap 'runs=0' TERM
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
RANDOM=$seed

ranks=4
plan="$scratch/plan.json"
case "$engine" in
    mpi) steps=200 every=10 devices=(--engine mpi --reduce-in-order --ranks-anywhere) number=OMPI_COMM_WORLD_RANK ;;
    processes)
        steps=30 every=3 devices=(--engine processes --device cuda --ranks-anywhere --rendezvous "$scratch/meeting") number=RANK
        g++ -w -std=c++17 -O1 -shared -fPIC -DGPUS=1 -o "$scratch/libcuda.so.1" runtime/tests/cuda/emulated.cpp || exit 1
        for library in libnvrtc.so.13 libcublasLt.so.13 libnccl.so.2; do ln -s libcuda.so.1 "$scratch/$library"; done
        export ALTIPLANO_CUDA="$scratch" EMULATED_NCCL="$scratch/nccl" XDG_CACHE_HOME="$scratch/cache"
        ;;
    *) sed -n '6p' "$0"; exit 2 ;;
esac
signals=(KILL STOP)
if [ -n "$on_hosts" ]; then
    benches/hosts.sh up 2 || exit
    signals+=(CUT)
    # Messages between hosts take longer than those in memory.
    [ "$engine" = processes ] || steps=60 every=5
fi
"$altiplano" plan tests/models/moe-sorted.mlir --cluster local:4 --dp 2 --tp 2 "${update[@]}" -o "$plan" > "$scratch/log" || exit 1
start() { # metrics folder [options]
    local metrics="$1" folder="$2"
    shift 2
    local command=("$altiplano" run "$plan" "${devices[@]}" --steps "$steps" --metrics "$metrics" --checkpoint "$folder" --checkpoint-every "$every" "$@")
    [ "$engine" = mpi ] || { rm -rf "$EMULATED_NCCL"; mkdir -p "$EMULATED_NCCL"; }
    case "$engine$on_hosts" in
        mpi) exec mpirun --oversubscribe -q -n "$ranks" "${command[@]}" ;;
        mpi1) exec benches/hosts.sh mpi 2 "${command[@]}" ;;
        processes1) exec benches/hosts.sh start 2 "${command[@]}" ;;
        processes)
            for ((rank = 0; rank < ranks; rank++)); do RANK=$rank WORLD_SIZE=$ranks "${command[@]}" & done
            local code=0
            for ((rank = 0; rank < ranks; rank++)); do wait -n || code=$?; done
            exit "$code"
            ;;
    esac
}
losses() { sed -n 's/.*"step":\([0-9]*\),"loss":\([^,]*\),.*/\1 \2/p' "$1"; }
processes() { pgrep -f "^$altiplano run $plan" || true; }
of_rank() {
    local pid
    for pid in $(processes); do
        tr '\0' '\n' < "/proc/$pid/environ" 2> /dev/null | grep -qx "$number=$1" && echo "$pid"
    done
}
# Ranks that still run, of those that nothing was done to. One that is stopped is there until its launcher or somebody ends it.
running() {
    local pid left=0
    for pid in $(processes); do [ "$pid" = "$1" ] || left=1; done
    ((left))
}
launcher_runs() { kill -0 "$launcher" 2> /dev/null; }
# How long training takes when nothing happens, so that signals come while it goes on, however fast the machine is.
(start "$scratch/whole" "$scratch/whole-checkpoints") > "$scratch/log" 2>&1 &
launcher=$!
until [ -s "$scratch/whole" ] || ! launcher_runs; do sleep 0.02; done
from=$(date +%s%N)
wait "$launcher" || { cat "$scratch/log"; exit 1; }
whole_ms=$((($(date +%s%N) - from) / 1000000))
losses "$scratch/whole" > "$scratch/expected"
[ -s "$scratch/expected" ] || { echo "no losses in $(head -c 200 "$scratch/whole")"; exit 1; }
echo "a run of $steps steps takes $whole_ms ms" >&2

hit=0 noticed=0 messages=0 orphans=0 damaged=0 lost=0 resumed=0 equal=0 writing=0 early=0 late=0 sides=0 unstarted=0
declare -A taken=([KILL]="" [STOP]="" [CUT]="")
# What was waited after a fault: median, 90th percentile, slowest, count.
waited() {
    tr ' ' '\n' <<< "${taken[$1]}" | grep . | sort -n | awk '
        { t[++n] = $1 }
        END { if (n) printf "%.1f, %.1f, %.1f s (%d)", t[int((n + 1) / 2)] / 1000, t[int((9 * n + 9) / 10)] / 1000, t[n] / 1000, n; else printf "none" }'
}
for ((i = 0; hit < runs && i < 2 * runs; i++)); do
    hit_writing=0
    folder="$scratch/run-$i" metrics="$scratch/metrics-$i"
    signal="${signals[i % ${#signals[@]}]}"
    victim=$((RANDOM % ranks))
    (start "$metrics" "$folder") > "$scratch/out" 2> "$scratch/err" &
    launcher=$!
    # mpirun itself may hang where it starts, on a machine that is busy.
    patience=3000
    until [ -s "$metrics" ] || ! launcher_runs || ((patience-- == 0)); do sleep 0.02; done
    if [ ! -s "$metrics" ]; then
        ((unstarted++))
        sed 's/^/  not started: /' "$scratch/err" | head -3 >&2
        kill -KILL "$launcher" $(processes) $([ -z "$on_hosts" ] || benches/hosts.sh pids) 2> /dev/null
        wait "$launcher" 2> /dev/null
        continue
    fi
    if ((i / ${#signals[@]} % 2)); then
        # While a checkpoint is written its folder has another name.
        for ((t = 0; t < 500; t++)); do
            compgen -G "$folder/*part*" > /dev/null && { hit_writing=1; break; }
            sleep 0.002
        done
    else
        sleep "$(awk -v "ms=$((whole_ms * 8 / 10 * (RANDOM % 1000) / 1000))" 'BEGIN { print ms / 1000 }')"
    fi
    pid="$(of_rank "$victim" | head -1)"
    if [ -z "$pid" ]; then
        ((early++))
        wait "$launcher"
        continue
    fi
    if [ "$signal" = CUT ]; then
        benches/hosts.sh cut "$((victim / 2))"
        pid=none
    elif ! kill "-$signal" "$pid" 2> /dev/null; then
        ((early++))
        wait "$launcher"
        continue
    fi
    ((hit++))
    from=$(date +%s%N)
    # The others, and mpirun; a process that is stopped ends with that.
    while { running "$pid" || { [ "$engine" = mpi ] && launcher_runs; }; } && (($(date +%s%N) - from < 20000000000)); do sleep 0.02; done
    took=$((($(date +%s%N) - from) / 1000000))
    [ "$engine" = mpi ] || kill -KILL $pid 2> /dev/null
    [ "$signal" != CUT ] || benches/hosts.sh mend "$((victim / 2))"
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
    # What is cut off may need a moment more than mpirun, which is not on its side.
    for ((t = 0; t < 100; t++)); do [ -n "$(processes)" ] || [ "$(benches/hosts.sh pids | wc -l)" -gt 0 ] || break; sleep 0.05; done
    left="$(processes) $([ -z "$on_hosts" ] || benches/hosts.sh pids | tr '\n' ' ')"
    [ -z "${left// /}" ] || { ((orphans++)); ps -o pid,stat,args -p "$(echo $left | tr ' ' ',')" | cut -c1-150 >&2; kill -KILL $left 2> /dev/null; }
    kill -KILL "$launcher" 2> /dev/null
    wait "$launcher" 2> /dev/null
    # Of a host that is cut off all ranks are named, or it is the first rank's, and each side speaks of the other, of which mpirun hears one.
    case "$signal" in
        CUT) named="^error: rank [0-9] on " ;;
        *) named="^error: rank $victim on " ;;
    esac
    said="$(grep -c '^error: ' "$scratch/err")"
    if grep '^error: ' "$scratch/err" | grep -qv "$named"; then said=0; fi
    case "$engine $signal $said" in
        *" 1") ((messages++)) ;;
        "processes CUT 2") ((sides++)) ;;
        *) sed 's/^/  said: /' "$scratch/err" | head -5 >&2 ;;
    esac
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
        after="$(sed -n 's/^resuming after step \([0-9]*\) .*/\1/p' "$scratch/log")"
        ((${after:-0} < ${told:-0})) && { ((lost++)); echo "  lost: step $told was written, and it went on after ${after:-none}" >&2; }
        if cmp -s "$scratch/found" "$scratch/expected"; then ((equal++)); else diff "$scratch/found" "$scratch/expected" | head -4; fi
    else
        cat "$scratch/log"
    fi
    rm -rf "$folder"
    echo "run $((i + 1)): $signal rank $victim, ended after $took ms; of $hit: noticed $noticed, one message a side $((messages + sides)), equal $equal" >&2
done
echo "| faults (during a checkpoint) | ended within 10 s | after a kill: median, 90th percentile, slowest | after a stop | after a cut | one message that names the rank | one of each side of a cut | processes left | checkpoints damaged, lost | resumed | losses equal to the bit |"
echo "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
echo "| $hit ($writing) | $noticed | $(waited KILL) | $(waited STOP) | $(waited CUT) | $messages | $sides | $orphans | $damaged, $lost | $resumed | $equal |"
((early + late == 0)) || echo "In $((early + late)) more runs all steps were done, and their checkpoint was written, before the signal."
((unstarted == 0)) || echo "$unstarted more runs did not start."
[ "$hit" = "$noticed" ] && [ "$hit" = "$((messages + sides))" ] && [ "$orphans" = 0 ] && [ "$damaged" = 0 ] && [ "$lost" = 0 ] && [ "$hit" = "$equal" ]
