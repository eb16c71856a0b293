#!/usr/bin/env bash
# Runs a command on two "hosts" of one machine: network namespaces with names of their own, joined by a bridge whose speed and delay
# can be set, with an agent for mpirun that takes the place of ssh. Needs root and iproute2.
#
#   benches/hosts.sh up [RATE DELAY]     makes them, e.g. up 1gbit 0.2ms
#   benches/hosts.sh run N COMMAND...    mpirun with N ranks on each
#   benches/hosts.sh cut | mend          takes the link of the second host down, or up again
#   benches/hosts.sh down                removes them
set -euo pipefail
names=(alti-a alti-b)
bridge=alti-br
agent="/tmp/$bridge-agent"

case "${1:-}" in
    up)
        ip link add "$bridge" type bridge
        ip link set "$bridge" up
        for i in 0 1; do
            name="${names[i]}"
            ip netns add "$name"
            ip link add "$name" type veth peer name eth0 netns "$name"
            ip link set "$name" master "$bridge" up
            ip -n "$name" addr add "10.77.0.$((i + 1))/24" dev eth0
            ip -n "$name" link set eth0 up
            ip -n "$name" link set lo up
            [ -z "${2:-}" ] || tc -n "$name" qdisc add dev eth0 root netem rate "$2" delay "${3:-0ms}"
        done
        # mpirun gives the host and then what to run there.
        cat > "$agent" << 'AGENT'
#!/bin/sh
host="$1"
shift
exec ip netns exec "alti-$(echo "$host" | sed 's/10.77.0.1/a/; s/10.77.0.2/b/')" unshare -u sh -c "hostname $(echo "$host" | sed 's/10.77.0.1/alti-a/; s/10.77.0.2/alti-b/'); $*"
AGENT
        chmod +x "$agent"
        ;;
    run)
        ranks="$2"
        shift 2
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        exec ip netns exec alti-a unshare -u sh -c 'hostname alti-a; exec "$@"' sh mpirun -q --oversubscribe \
            --mca plm_rsh_agent "$agent" --mca oob_tcp_keepalive_time 2 --mca oob_tcp_keepalive_intvl 1 \
            --mca oob_tcp_keepalive_probes 3 --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 \
            --host "10.77.0.1:$ranks,10.77.0.2:$ranks" --map-by "ppr:$ranks:node" "$@"
        ;;
    cut) ip link set alti-b down ;;
    mend) ip link set alti-b up ;;
    down)
        for name in "${names[@]}"; do ip netns del "$name" 2> /dev/null || true; done
        ip link del "$bridge" 2> /dev/null || true
        rm -f "$agent"
        ;;
    *) sed -n '2,9p' "$0"; exit 2 ;;
esac
