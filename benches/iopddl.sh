#!/bin/sh
# Instances of the ASPLOS/EuroSys 2025 contest within the contest's own time limits: benches/iopddl.sh FOLDER [NAME...]
# FOLDER holds NAME.json or NAME.json.gz. One line each; what the example printed stays in OUT (default /tmp/iopddl).
set -e
folder=$1
shift
[ $# -gt 0 ] || set -- A B D G K M P S U
OUT=${OUT:-/tmp/iopddl}
EXAMPLE=${EXAMPLE:-target/release/examples/iopddl}
mkdir -p "$OUT"
echo "| | limit s | cost | lower bound | gap | peak | read s | total s |"
echo "|--|--:|--:|--:|--:|--:|--:|--:|"
for name in "$@"; do
    case $name in
        [A-F]) limit=60 ;;
        [G-J]) limit=120 ;;
        [K-O]) limit=180 ;;
        [P-T]) limit=240 ;;
        *) limit=300 ;;
    esac
    file=$(ls "$folder/$name".json* | head -1)
    start=$(date +%s.%N)
    "$EXAMPLE" "$file" --time-limit "$limit" > "$OUT/$name.txt"
    total=$(echo "$(date +%s.%N) $start" | awk '{printf "%.1f", $1 - $2}')
    awk -v name="$name" -v limit="$limit" -v total="$total" -F': ' '
        { value[$1] = $2 }
        END {
            printf "| %s | %s | %s | %s | %s | %s | %s | %s |\n", name, limit, value["cost"], value["lower_bound"],
                value["gap"], value["peak_usage"], value["read_s"], total
        }' "$OUT/$name.txt"
done
