#!/usr/bin/env bash
# Boots one kernel in qemu, without KVM, and prints the results of tests/kernels/guest.py in it:
#
#     sudo bash tests/kernels/prepare.sh KERNEL && bash tests/kernels/run.sh KERNEL [LOG]
#
# KERNEL is a folder of the cache, such as debian12. LOG: where the whole console goes. VIPD_PYTHON: the Python whose
# packages the guest gets; default: that of .venv. VIPD_KERNELS_SET: guest (default) or fast_path, the set to run, or the
# full name of another module of the tests. VIPD_KERNELS_PROGRAMS: a directory of further programs for the guest.
# VIPD_KERNELS_ICOUNT: not empty: the guest's nanoseconds are instructions. Exit code 0: all passed; 1: some failed;
# 2: the guest did not end.
set -euo pipefail
cache=${VIPD_KERNELS_CACHE:-/var/cache/vipd-kernels}
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${VIPD_PYTHON:-$project/.venv/bin/python}
seconds=${VIPD_KERNELS_SECONDS:-1500}
[ $# -ge 1 ] || { echo "usage: bash tests/kernels/run.sh KERNEL [LOG]" >&2; exit 2; }
kernel=$1
[ -e "$cache/$kernel" ] || { echo "no $cache/$kernel; hint: sudo bash tests/kernels/prepare.sh $kernel" >&2; exit 2; }

work=$(mktemp -d "${TMPDIR:-/tmp}/vipd-kernel.XXXXXX")
trap 'rm -rf "$work"' EXIT
log=${2:-$work/console}
cd "$project"
began=$SECONDS
timeout 600 "$python" -m tests.kernels.build_initramfs "$cache" "$kernel" "$work/initramfs" ${VIPD_KERNELS_PROGRAMS:-}
set=${VIPD_KERNELS_SET:-guest}
case $set in *.*) ;; *) set=tests.kernels.$set ;; esac
echo "# initramfs: $(du -m "$work/initramfs" | cut -f1) MB, $((SECONDS - began)) s"
began=$SECONDS
code=0
# Under icount the guest's clock counts instructions, on one processor: what it measures depends on no other program.
processor="-accel tcg,thread=multi -smp 2"
[ -z "${VIPD_KERNELS_ICOUNT:-}" ] || processor="-accel tcg,thread=single -icount shift=0,sleep=off -smp 1"
# In the foreground of timeout, so that ctrl-C ends both; no network card: the guest reaches nothing.
timeout --foreground --kill-after=10 "$seconds" qemu-system-x86_64 $processor -cpu Nehalem -m 2560 \
    -kernel "$cache/$kernel"/boot/vmlinuz-* -initrd "$work/initramfs" \
    -append "console=ttyS0 rdinit=/init panic=1 loglevel=4 mitigations=off random.trust_bootloader=on VIPD_SET=$set" \
    -nodefaults -no-reboot -display none -serial stdio -nic none </dev/null 2>&1 | sed -u 's/\r//g' | tee "$log" |
    grep --line-buffered '^VIPD ' || code=$?
echo "# guest: $((SECONDS - began)) s"
last=$(grep '^VIPD done ' "$log" | tail -n 1 || true)
if [ -z "$last" ]; then
    echo "the guest did not end within $seconds s, or the kernel failed; the end of its console:" >&2
    tail -n 40 "$log" >&2
    exit 2
fi
! grep -q '^VIPD FAIL ' "$log"
