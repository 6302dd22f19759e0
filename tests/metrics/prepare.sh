#!/usr/bin/env bash
# Puts what the tests of metrics and status page judge by onto this machine, where it is missing: Chromium as a
# Debian package, and Prometheus' promtool, taken out of its package so that no Prometheus is started here.
# Without these the tests are skipped, each with its reason.
set -euo pipefail
tools=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/.venv/bin

export DEBIAN_FRONTEND=noninteractive
if ! command -v chromium >/dev/null; then
    apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null
fi
if ! command -v promtool >/dev/null && ! [ -x "$tools/promtool" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    chown _apt "$work" 2>/dev/null || true
    (cd "$work" && apt-get download -qq prometheus >/dev/null)
    dpkg-deb --fsys-tarfile "$work"/prometheus_*.deb | tar -xO ./usr/bin/promtool >"$work/promtool"
    install -m 755 "$work/promtool" "$tools/promtool"
fi
