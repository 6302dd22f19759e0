#!/usr/bin/env bash
# vipd in a minute: builds a small lab of network namespaces, balances real requests in it, and removes it.
#
#     sudo bash examples/quickstart.sh
#
#     client 10.10.0.2 --- 10.10.0.1 host 10.244.0.1 --- bridge --- b1, b2, b3  10.244.0.11, .12, .13
#                              (vipd runs here)
#
# No packet leaves the namespaces. Exit code 0 when every request was answered as declared.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../tests/prepare.sh"

lab=vipd-quickstart-$$
client=$lab-client
host=$lab-host
backends=(b1 b2 b3)
work=
pids=()
requests=300

main() {
    require_root "examples/quickstart.sh"
    install_packages
    make_venv
    trap clean_up EXIT
    trap 'exit 130' INT TERM HUP PIPE

    build_lab
    start_servers
    start_vipd

    step "One more virtual IP, by command: the third backend gets three of four connections"
    run_vipctl add 10.96.0.20:80/tcp 10.244.0.12:8080 10.244.0.13:8080@3 --name shop/api

    step "$requests connections from the client to each TCP service, and $requests datagrams"
    expect 10.96.0.10 80 tcp b1:2 b2:1 b3:1
    expect 10.96.0.20 80 tcp b2:1 b3:3
    expect_one_backend 10.96.0.53 53 udp

    step "vipctl list"
    run_vipctl list
    step "vipctl describe shop/web"
    run_vipctl describe shop/web
}

build_lab() {
    step "Building a lab: a client, the host, ${#backends[@]} backends"
    work=$(mktemp -d /tmp/vipd-quickstart.XXXXXX)
    local name number=10
    for name in client host "${backends[@]}"; do
        ip netns add "$lab-$name"
        ip -n "$lab-$name" link set lo up
    done
    ip -n "$host" link add to-client type veth peer name eth0 netns "$client"
    ip -n "$host" link add cluster type bridge
    set_address "$host" to-client 10.10.0.1/24
    set_address "$host" cluster 10.244.0.1/24
    set_address "$client" eth0 10.10.0.2/24
    ip -n "$client" route add default via 10.10.0.1
    for name in "${backends[@]}"; do
        number=$((number + 1))
        ip -n "$host" link add "$name" type veth peer name eth0 netns "$lab-$name"
        ip -n "$host" link set "$name" master cluster up
        set_address "$lab-$name" eth0 "10.244.0.$number/24"
        ip -n "$lab-$name" route add default via 10.244.0.1
        echo "$name is 10.244.0.$number"
    done
}

set_address() { # namespace, device, address/length
    ip -n "$1" address add "$3" dev "$2"
    ip -n "$1" link set "$2" up
}

start_servers() {
    step "Starting a server in each backend: TCP port 8080, UDP port 5353"
    # A server ends when its standard input does: this pipe's only writer is this script.
    mkfifo "$work/alive"
    exec 9<>"$work/alive"
    local name
    for name in "${backends[@]}"; do
        ip netns exec "$lab-$name" "$venv/bin/python" -I "$project/tests/lab/server.py" \
            --name "$name" --tcp 8080 --udp 5353 <"$work/alive" >"$work/$name" 9>&- &
        pids+=($!)
    done
    for name in "${backends[@]}"; do
        wait_for "the server $name" grep -qs READY "$work/$name"
    done
}

start_vipd() {
    step "Starting vipd in the host namespace on examples/quickstart.yaml"
    mkdir "$work/services.d"
    cp "$project/examples/quickstart.yaml" "$work/services.d/"
    cat >"$work/vipd.yaml" <<EOF
services_dir: $work/services.d
state_dir: $work/state
socket: $work/vipd.sock
EOF
    ip netns exec "$host" "$venv/bin/vipd" --config "$work/vipd.yaml" </dev/null 2>"$work/log" 9>&- &
    vipd=$!
    pids+=("$vipd")
    wait_for "vipd" in_sync
    run_vipctl status
}

in_sync() {
    kill -0 "$vipd" 2>/dev/null || { cat "$work/log" >&2; fail "vipd ended"; }
    run_vipctl status -o json 2>/dev/null | grep -q '"state": "in-sync"'
}

run_vipctl() { ip netns exec "$host" "$venv/bin/vipctl" --socket "$work/vipd.sock" "$@"; }

wait_for() { # what, command
    local what=$1 tries
    shift
    for tries in {1..100}; do
        ! "$@" || return 0
        sleep 0.1
    done
    cat "$work/log" >&2 2>/dev/null || true
    fail "$what is not ready after 10 seconds"
}

send() { # address, port, protocol: lines of "outcome times"
    ip netns exec "$client" "$venv/bin/python" -I "$project/tests/lab/client.py" burst \
        --to "$1" --port "$2" --protocol "$3" --count "$requests" --tally
}

expect() { # address, port, protocol, backend:weight...
    local target=$1:$2/$3 tally total=0 answered=0 pair got
    tally=$(send "$1" "$2" "$3")
    shift 3
    for pair in "$@"; do total=$((total + ${pair#*:})); done
    printf '\n%s\n  %-8s %6s %9s %5s\n' "$target" BACKEND WEIGHT EXPECTED GOT
    for pair in "$@"; do
        got=$(awk -v name="${pair%:*}" '$1 == name {print $2}' <<<"$tally")
        printf '  %-8s %6d %9d %5d\n' "${pair%:*}" "${pair#*:}" $((requests * ${pair#*:} / total)) "${got:-0}"
        [ "${got:-0}" -gt 0 ] || fail "$target: ${pair%:*} got nothing"
        answered=$((answered + got))
    done
    [ "$answered" = "$requests" ] || fail "$target: only $answered of $requests were answered as declared: $tally"
}

expect_one_backend() { # address, port, protocol
    local target=$1:$2/$3 tally
    tally=$(send "$1" "$2" "$3")
    printf '\n%s\n  %-8s %22s\n  %-8s %22s\n' "$target" BACKEND "GOT (client affinity)" $tally
    [[ $tally =~ ^b[12]\ $requests$ ]] || fail "$target: one backend should have answered all: $tally"
}

clean_up() {
    local code=$? pid name left
    trap '' INT TERM HUP PIPE
    set +e
    step "Cleaning up"
    if [ -n "${vipd:-}" ]; then
        kill "$vipd" 2>/dev/null
        wait "$vipd" 2>/dev/null
        run_vipctl cleanup --state-dir "$work/state" || code=1
    fi
    for pid in "${pids[@]}"; do
        kill "$pid" 2>/dev/null
        wait "$pid" 2>/dev/null
    done
    for name in client host "${backends[@]}"; do
        ip netns delete "$lab-$name" 2>/dev/null
    done
    [ -z "$work" ] || rm -rf "$work"
    left=$(ip netns list | grep "^$lab-")
    [ -z "$left" ] || { echo "left behind: $left" >&2; code=1; }
    [ -n "$left" ] || echo "no namespace, process or rule is left; $venv is kept for the next run"
    case $code in
        0) step "Every request was answered as declared" ;;
        130) step "Interrupted" ;;
        *) step "FAILED" ;;
    esac
    exit "$code"
}

main "$@"
