#!/usr/bin/env bash
# A throw-away machine: a real systemd as its process 1, on a disk that is a layer over a root directory.
#
#   machine.sh start NAME ROOT [NETNS]   boot it, in a network namespace if one is named; returns when it is up
#   machine.sh start NAME                boot it again from the disk that it has
#   machine.sh run NAME COMMAND...       run a command in it, with that command's exit code
#   machine.sh leader NAME               the pid of its process 1, seen from here
#   machine.sh stop NAME                 power off in order; the disk stays
#   machine.sh delete NAME               power off, and remove the disk too
#
# ROOT is never written to. What is needed: root, systemd-nspawn, nsenter, overlayfs. Process 1 of this host may be
# anything: nspawn neither registers the machine nor asks for a unit.
set -euo pipefail

action=$1
name=$2
shift 2
place=/run/vipd-machines/$name
up_seconds=200
down_seconds=90

fail() {
    printf 'machine.sh: %s: %s\n' "$name" "$1" >&2
    exit 125
}

launcher_lives() { [ -e "$place/launcher" ] && kill -0 "$(<"$place/launcher")" 2>/dev/null; }

# Process 1 of the machine is the child of nspawn that lives in another pid namespace than we do.
first_process() {
    local nspawn child here
    nspawn=$(cat "$place/nspawn" 2>/dev/null) || return 1
    here=$(readlink /proc/self/ns/pid)
    for child in $(cat "/proc/$nspawn/task/$nspawn/children" 2>/dev/null); do
        if [ "$(readlink "/proc/$child/ns/pid")" != "$here" ]; then
            echo "$child"
            return
        fi
    done
    return 1
}

inside() {
    local first
    first=$(first_process) || return 125
    nsenter --target "$first" --mount --uts --ipc --net --pid --cgroup --root --wd -- \
        env --ignore-environment PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/ LANG=C.UTF-8 TERM=dumb "$@"
}

lay_disk() { # root directory
    mkdir -p "$place"
    mountpoint -q "$place" || mount -t tmpfs -o mode=755 vipd-machine "$place"
    mkdir -p "$place/changes" "$place/work" "$place/disk"
    mount -t overlay vipd-machine "$place/disk" -o "lowerdir=$1,upperdir=$place/changes,workdir=$place/work"
    # What comes by the clock would take apt's locks.
    local timer
    for timer in apt-daily.timer apt-daily-upgrade.timer; do
        ln -sfn /dev/null "$place/disk/etc/systemd/system/$timer"
    done
}

# Everything that nspawn leaves on a host whose /run and cgroups it does not manage is kept in a mount namespace and in
# cgroups of its own.
launch() {
    local group
    for group in /sys/fs/cgroup/unified /sys/fs/cgroup/systemd /sys/fs/cgroup; do
        [ -e "$group/cgroup.procs" ] && mkdir -p "$group/vipd-$name" 2>/dev/null &&
            echo $BASHPID >"$group/vipd-$name/cgroup.procs" || true
    done
    mount --make-rprivate /
    mkdir -p /run/systemd/nspawn
    mount -t tmpfs -o mode=755 vipd-machine /run/systemd/nspawn
    "$@" &
    echo $! >"$place/nspawn"
    wait $!
}

start() { # [root directory [network namespace]]
    ! launcher_lives || fail "is up already"
    [ $# = 0 ] || lay_disk "$1"
    [ $# -lt 2 ] || echo "$2" >"$place/netns"
    local network=--private-network
    [ ! -e "$place/netns" ] || network=--network-namespace-path=/run/netns/$(<"$place/netns")
    export -f launch
    export name place
    # Cgroups as on a Debian host, kernel settings of the network writable as there; of what a host's root may do only
    # what systemd and networks need, so that nothing in the machine reaches the clock or modules of this host.
    SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 SYSTEMD_NSPAWN_API_VFS_WRITABLE=network \
        setsid unshare --mount bash -c 'launch "$@"' launch \
        systemd-nspawn --quiet --boot --register=no --keep-unit --machine="$name" --directory="$place/disk" \
        --capability=CAP_NET_ADMIN,CAP_BPF,CAP_SYSLOG "$network" --resolv-conf=off --timezone=off --link-journal=no \
        --console=pipe </dev/null >>"$place/console" 2>&1 &
    echo $! >"$place/launcher"
    wait_until_up
}

wait_until_up() {
    local state= deadline=$((SECONDS + up_seconds))
    while [ $SECONDS -lt $deadline ]; do
        launcher_lives || { tail -n 20 "$place/console" >&2; fail "ended while it booted"; }
        state=$(inside systemctl is-system-running 2>/dev/null || true)
        case $state in running | degraded) return ;; esac
        sleep 0.1
    done
    fail "is not up after $up_seconds seconds, but ${state:-silent}"
}

stop() {
    launcher_lives || return 0
    inside systemctl poweroff >/dev/null 2>&1 || true
    local deadline=$((SECONDS + down_seconds))
    while launcher_lives; do
        [ $SECONDS -lt $deadline ] || kill -KILL "$(first_process)" "$(<"$place/nspawn")" 2>/dev/null || true
        sleep 0.1
    done
}

delete() {
    [ -d "$place" ] || return 0
    stop
    ! mountpoint -q "$place/disk" || umount "$place/disk"
    ! mountpoint -q "$place" || umount "$place"
    rmdir "$place"
    local group
    for group in /sys/fs/cgroup/unified /sys/fs/cgroup/systemd /sys/fs/cgroup; do
        find "$group/vipd-$name" -depth -type d -exec rmdir {} + 2>/dev/null || true
    done
}

case $action in
start) start "$@" ;;
run) inside "$@" ;;
leader) first_process ;;
stop) stop ;;
delete) delete ;;
*) fail "no such action: $action" ;;
esac
