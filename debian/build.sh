#!/usr/bin/env bash
# Builds the Debian package and has lintian look at it:
#
#     sudo bash debian/build.sh [OUTDIR]        vipd_VERSION_amd64.deb in OUTDIR, dist/ unless given
#
# What building needs is installed if it is missing (that is what root is for). The checkout stays as it is: the package
# is built in a copy. VIPD_LINTIAN=no does without lintian, which takes as long as the build.
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "${1:-$project/dist}"
out=$(cd "${1:-$project/dist}" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/vipd-build.XXXXXX")
trap 'rm -rf "$work"' EXIT

missing() {
    local pair
    [ "${VIPD_LINTIAN:-}" = no ] || command -v lintian >/dev/null || echo lintian
    command -v dpkg-buildpackage >/dev/null || echo dpkg-dev
    command -v dh >/dev/null || echo debhelper
    command -v dh_apparmor >/dev/null || echo dh-apparmor
    command -v gcc >/dev/null || echo build-essential
    # dpkg's list may say less than what is there: Python can be installed without Debian's packages.
    /usr/bin/python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
}

needed=$(missing)
if [ -n "$needed" ]; then
    echo "installing:" $needed
    [ "$(id -u)" = 0 ] || { echo "error: root is needed to install:" $needed >&2; exit 2; }
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -qq -y --no-install-recommends $needed >/dev/null
fi

mkdir "$work/vipd"
tar -C "$project" --exclude=./.git --exclude=./.venv --exclude=./dist --exclude=./build --exclude=__pycache__ \
    --exclude='./.*_cache' --exclude=./.hypothesis --exclude='*.egg-info' --exclude=./tests -c . | tar -C "$work/vipd" -x
cd "$work/vipd"
# -d: see above.
dpkg-buildpackage -us -uc -b -d >"$work/log" 2>&1 || { tail -n 50 "$work/log" >&2; exit 1; }
[ "${VIPD_LINTIAN:-}" = no ] ||
    lintian --fail-on error,warning --tag-display-limit 0 --allow-root "$work"/vipd_*.deb
mv "$work"/vipd_*.deb "$out/"
ls "$out"/vipd_*.deb
