#!/usr/bin/env bash
# Installs what the benchmarks of the path need beside vipd, where it is missing: what it is compared with, and
# what makes load. Nothing that it installs is started, now or at boot.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../../prepare.sh"

packages="haproxy:haproxy nginx:nginx-light iperf3:iperf3 gcc:gcc"
stream=/usr/lib/nginx/modules/ngx_stream_module.so
policy=/usr/sbin/policy-rc.d

require_root "tests/bench/path/prepare.sh"
missing=""
for pair in $run_packages $packages; do
    command -v "${pair%%:*}" >/dev/null || missing="$missing ${pair##*:}"
done
[ -e $stream ] || missing="$missing libnginx-mod-stream"
# The compiler is of no use without the C library's headers.
[ -e /usr/include/stdio.h ] || missing="$missing libc6-dev"
[ -n "$missing" ] || exit 0

step "Installing Debian packages:" $missing
command -v apt-get >/dev/null || fail "no apt-get here; install by hand:" $missing
if [ ! -e $policy ]; then
    # Debian's packages start their daemons when they are installed, unless this says no.
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    trap 'rm -f $policy' EXIT
fi
apt_install $missing
if command -v systemctl >/dev/null; then
    for package in $missing; do
        case $package in
            haproxy | iperf3) systemctl disable --quiet $package 2>/dev/null || true ;;
            nginx-light) systemctl disable --quiet nginx 2>/dev/null || true ;;
        esac
    done
fi
