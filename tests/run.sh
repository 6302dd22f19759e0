#!/usr/bin/env bash
# Sets up whatever is missing and runs every check and every test:
#
#     sudo bash tests/run.sh [arguments for pytest]
#
# All of them run, whichever fails; the exit code is 1 when any did, 2 when this is not root.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/prepare.sh"

require_root "tests/run.sh"
require_space "${TMPDIR:-/tmp}" 2000
install_packages $test_packages
make_venv dev
bash "$project/tests/metrics/prepare.sh" || step "tests of metrics and page will be skipped: their tools cannot be installed"
cd "$project"

failed=()
check() { # name, command
    local name=$1
    shift
    step "$name"
    "$@" || failed+=("$name")
}

check "ruff check" "$venv/bin/ruff" check
check "ruff format" "$venv/bin/ruff" format --check
check "mypy" "$venv/bin/mypy"
check "pytest" "$venv/bin/pytest" -n 3 --dist loadfile "$@"

if [ ${#failed[@]} -gt 0 ]; then
    step "FAILED: $(printf '%s, ' "${failed[@]}" | sed 's/, $//')"
    exit 1
fi
step "All checks and tests passed"
