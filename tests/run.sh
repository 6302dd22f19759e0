#!/usr/bin/env bash
# Sets up whatever is missing and runs every check and every test:
#
#     sudo bash tests/run.sh [arguments for pytest]
#     bash tests/run.sh --fast [arguments for pytest]
#     sudo bash tests/run.sh --nightly [arguments for pytest]
#
# With --fast: the quick tests of the pure parts, without root, half a minute; installs nothing but the project's own .venv.
# With --nightly: all tests, longer, and with a fresh seed for all that is random; prints it. SEED=N takes that one.
# All of them run, whichever fails; the exit code is 1 when any did, 2 when this is not root. Packets and processes
# share a machine that may stand still for seconds: up to twenty failed tests are tried again, with nothing beside them.
# The last line names those that passed only then; tried-again.log keeps the output of their first run.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/prepare.sh"

if [ "${1:-}" = --fast ]; then
    shift
    [ -x "$venv/bin/pytest" ] || make_venv dev
    cd "$project"
    exec "$venv/bin/pytest" -n 2 -m "not root and not slow" \
        tests/model tests/declaration tests/control tests/dataplane tests/test_architecture.py "$@"
fi

require_root "tests/run.sh"
if [ "${1:-}" = --nightly ]; then
    shift
    seed=${SEED:-$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}
    step "nightly, seed $seed; the same again: SEED=$seed bash tests/run.sh --nightly"
    export VIPD_SOAK=10000 VIPD_CHANGES=360 VIPD_OVERRIDES=1000
    export VIPD_TORTURE=300 VIPD_TORTURE_SEED=$seed VIPD_FUZZ=300 VIPD_FUZZ_SEED=$seed
    export VIPD_KERNELS="debian12 debian13"
    export VIPD_FORK_SERVER=no
    set -- --nightly --timeout=1800 --hypothesis-profile=fresh --hypothesis-seed="$seed" "$@"
fi
want_space "${TMPDIR:-/tmp}" 2000
install_packages $test_packages
# Root directories and the package for the booted machines are made while all else is prepared and run. Their tests, which
# say what fails, wait for it.
case $* in *tests/*) ;; *) bash "$project/tests/system/prepare.sh" >/dev/null 2>&1 & ;; esac
make_venv dev
bash "$project/tests/observe/metrics/prepare.sh" &
page_tools=$!
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
# It needs one core for half a minute, while the tests wait. What it knows of unchanged files, by their hashes, is kept
# for every checkout on this machine, one at a time.
types=$(mktemp) known=${VIPD_TEST_CACHE:-/var/cache/vipd-tests}/mypy
trap 'rm -f "$types"' EXIT
mkdir -p "$known"
flock "$known.lock" "$venv/bin/mypy" --cache-dir="$known" >"$types" 2>&1 &
mypy=$!
mypy_ended() {
    local code=0
    wait "$mypy" || code=$?
    cat "$types"
    return $code
}

# The list of vulnerabilities is on the network, and so no part of every run.
if command -v pip-audit >/dev/null; then
    for pins in debian/requirements*.txt; do
        check "pip-audit $pins" pip-audit --require-hashes --disable-pip --requirement "$pins"
    done
else
    step "pinned versions: not compared with known vulnerabilities, for pip-audit is not installed; see SECURITY.md"
fi

# pytest compiles each file of tests when it is first imported. Without this each of its processes would do so. What is
# wrong is told below.
compile_tests() { # arguments for pytest
    "$venv/bin/pytest" --collect-only -q -p no:cacheprovider "$@" >/dev/null || true
}
if ! compgen -G "tests/__pycache__/test_architecture*-pytest-*.pyc" >/dev/null; then
    if [ $# = 0 ]; then
        compile_tests tests/[a-f]*/ &
        compile_tests tests/[g-z]*/ tests/test_*.py
        wait $!
    else
        compile_tests "$@"
    fi
fi

last_failed=.pytest_cache/v/cache/lastfailed
first_output=$project/tried-again.log
most_tried_again=20
workers=$((3 * $(nproc))) # most of a test's time it waits for packets, checks and timers; a fourth gained nothing
[ "$workers" -le 16 ] || workers=16
unsteady=()
tests() { # arguments for pytest
    local code=0
    rm -f "$last_failed" "$first_output"
    # In the order of tests/conftest.py: by the number of their tests, the longest files would come last.
    "$venv/bin/pytest" -n "$workers" --dist loadfile --no-loadscope-reorder --durations=10 "$@" |
        tee "$first_output" || code=$?
    [ $code != 0 ] || rm "$first_output"
    [ $code = 1 ] && [ -e "$last_failed" ] || return $code # else it did not come to run tests
    # A test of a booted machine goes on where the one before it ended: the whole file runs again.
    mapfile -t unsteady < <("$venv/bin/python" - "$last_failed" <<'EOF'
import json
import sys

with open(sys.argv[1]) as file:
    failed = json.load(file)
print(*dict.fromkeys(test.partition("::")[0] if test.startswith("tests/system/") else test for test in failed), sep="\n")
EOF
    )
    [ ${#unsteady[@]} -ge 1 ] && [ ${#unsteady[@]} -le $most_tried_again ] || return 1
    step "pytest, once more, by themselves:" "${unsteady[@]}"
    "$venv/bin/pytest" "${unsteady[@]}"
}
wait "$page_tools" || step "tests of metrics and page will be skipped: their tools cannot be installed"
check "pytest" tests "$@"
check "mypy" mypy_ended

if [ ${#failed[@]} -gt 0 ]; then
    step "FAILED: $(printf '%s, ' "${failed[@]}" | sed 's/, $//')"
    exit 1
fi
if [ ${#unsteady[@]} -gt 0 ]; then
    step "All checks and tests passed, but ${#unsteady[@]} only when tried again (see $first_output): ${unsteady[*]}"
else
    step "All checks and tests passed"
fi
