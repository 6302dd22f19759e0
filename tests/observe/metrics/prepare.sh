#!/usr/bin/env bash
# Puts what the tests of metrics and status page judge by onto this machine, where it is missing: Chromium as a
# Debian package, and Prometheus' promtool, taken out of its package so that no Prometheus is started here.
# Without these the tests are skipped, each with its reason.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../../prepare.sh"
tools=$venv/bin

if ! command -v chromium >/dev/null; then
    apt_install chromium fonts-dejavu-core
fi
if ! command -v promtool >/dev/null && ! [ -x "$tools/promtool" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    chown _apt "$work" 2>/dev/null || true
    cd "$work"
    again "downloading prometheus" apt-get download -qq -o Acquire::Retries=3 prometheus >/dev/null
    dpkg-deb --fsys-tarfile "$work"/prometheus_*.deb | tar -xO ./usr/bin/promtool >"$work/promtool"
    install -m 755 "$work/promtool" "$tools/.promtool.new"
    mv "$tools/.promtool.new" "$tools/promtool"
fi
