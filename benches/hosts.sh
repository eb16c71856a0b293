#!/usr/bin/env bash
# Runs a command on several "hosts" of one machine: network namespaces with names and addresses of their own, joined by a bridge whose
# links can be slowed down and cut, with an agent for mpirun that takes the place of ssh. Needs root and iproute2; what it cannot make is
# said, with exit code 3.
#
#   benches/hosts.sh up N [RATE [DELAY]]   makes N hosts, e.g. up 2 1gbit 0.2ms; a delay needs a kernel with netem
#   benches/hosts.sh limit RATE            what each link carries at most each way, from now on
#   benches/hosts.sh mpi N COMMAND...      mpirun with N ranks on each
#   benches/hosts.sh start N COMMAND...    N processes on each, told their numbers as torchrun tells them; fails as the first of them does
#   benches/hosts.sh on I COMMAND...       a command on the host of that number, counted from 0
#   benches/hosts.sh pids                  processes that are left on the hosts
#   benches/hosts.sh cut I | mend I        takes the link of a host down, or up again
#   benches/hosts.sh down                  removes all of it
#
# ALTIPLANO_HOSTS is what names begin with (alti), for several networks at once.
set -euo pipefail
prefix="${ALTIPLANO_HOSTS:-alti}"
bridge="$prefix-br"
agent="/tmp/$prefix-agent"
address() { echo "10.77.0.$(($1 + 1))"; }
hosts() { ip netns list | awk '{ print $1 }' | grep -x "$prefix-[0-9]*" | sort -t- -k2 -n; }
count() { hosts | wc -l; }
# What a host is called is its own affair too.
on() {
    local host="$prefix-$1"
    shift
    exec nsenter "--net=/run/netns/$host" unshare -u sh -c 'hostname "$0"; exec "$@"' "$host" "$@"
}
# Both ends of a link send through a bucket, so that a host neither sends nor gets more. What is sent at once is small beside what is measured.
limited() {
    local host="$1" rate="$2" delay="${3:-}"
    if [ -n "$delay" ]; then
        tc -n "$host" qdisc replace dev eth0 root netem rate "$rate" delay "$delay"
    else
        tc -n "$host" qdisc replace dev eth0 root tbf rate "$rate" burst 64kb latency 50ms
    fi
    tc qdisc replace dev "$host" root tbf rate "$rate" burst 64kb latency 50ms
}

case "${1:-}" in
    up)
        made() {
            ip link add "$bridge" type bridge && ip link set "$bridge" up || return
            for ((i = 0; i < $1; i++)); do
                host="$prefix-$i"
                ip netns add "$host" && ip link add "$host" type veth peer name eth0 netns "$host" &&
                    ip link set "$host" master "$bridge" up && ip -n "$host" addr add "$(address "$i")/24" dev eth0 &&
                    ip -n "$host" link set eth0 up && ip -n "$host" link set lo up || return
                [ -z "${2:-}" ] || limited "$host" "$2" "${3:-}" || return
            done
        }
        shift
        made "$@" || { "$0" down; echo "these hosts cannot be made here: it needs root, network namespaces, and qdiscs (tbf; netem for a delay)" >&2; exit 3; }
        # mpirun gives the address of a host, and then what to run there in a shell.
        cat > "$agent" << AGENT
#!/bin/sh
host="$prefix-\$((\${1##*.} - 1))"
shift
exec nsenter "--net=/run/netns/\$host" unshare -u sh -c "hostname \$host; \$*"
AGENT
        chmod +x "$agent"
        ;;
    limit) for host in $(hosts); do limited "$host" "$2" "${3:-}"; done ;;
    mpi)
        ranks="$2"
        shift 2
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        list=""
        for ((i = 0; i < $(count); i++)); do list+="$(address "$i"):$ranks,"; done
        # They have the cores of one machine between them, which mpirun does not know. It is to miss a host before ranks end, since it
        # does not once it waits for an answer of the daemon there, but to end them, two seconds later, only when they have said which.
        on 0 mpirun -q --oversubscribe --mca mpi_yield_when_idle 1 --mca plm_rsh_agent "$agent" \
            --mca oob_tcp_keepalive_time 1 --mca oob_tcp_keepalive_intvl 1 --mca oob_tcp_keepalive_probes 4 \
            --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 --host "${list%,}" --map-by "ppr:$ranks:node" "$@"
        ;;
    start)
        each="$2"
        shift 2
        all=$(($(count) * each)) pids=()
        for ((rank = 0; rank < all; rank++)); do
            RANK="$rank" WORLD_SIZE="$all" "$0" on "$((rank / each))" "$@" &
            pids+=("$!")
        done
        trap 'kill -TERM "${pids[@]}" 2> /dev/null' TERM INT
        code=0
        for _ in "${pids[@]}"; do
            wait -n || { failed=$?; ((code > 0)) || code=$failed; }
        done
        exit "$code"
        ;;
    on)
        shift
        on "$@"
        ;;
    pids) for host in $(hosts); do ip netns pids "$host"; done ;;
    cut) ip link set "$prefix-$2" down ;;
    mend) ip link set "$prefix-$2" up ;;
    down)
        for host in $(hosts); do ip netns del "$host" || true; done
        # A link goes with its other end, a moment after the host.
        for ((i = 0; i < 64; i++)); do ip link del "$prefix-$i" 2> /dev/null || true; done
        ip link del "$bridge" 2> /dev/null || true
        rm -f "$agent"
        ;;
    *) sed -n '2,17p' "$0"; exit 2 ;;
esac
