#!/usr/bin/env bash
# Builds the Debian package, boots a systemd of each Debian release, and uses the package there:
#
#     sudo bash tests/system/run.sh [arguments for pytest]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../prepare.sh"

require_root "tests/system/run.sh"
install_packages
make_venv dev
cd "$project"
exec "$venv/bin/pytest" tests/system "$@"
