#!/usr/bin/env bash
# Builds vipd as one executable file that needs nothing but Python and iptables:
#
#     bash debian/onefile/build.sh [--platform x86_64|aarch64]... [--wheels DIR] [OUT]
#
# OUT is dist/vipd.pyz unless named. The wheels of debian/requirements.txt come from where pip is set up to take them;
# they are for the Pythons of Debian 12, Ubuntu 24.04 and Debian 13, whichever Python builds: $PYTHON, else python3.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
if ! "$python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    made=$(mktemp -d)
    trap 'rm -rf "$made"' EXIT
    "$python" -m venv "$made" || {
        echo "error: $python has neither pip nor venv; hint: apt-get install python3-venv" >&2
        exit 1
    }
    python=$made/bin/python
fi
"$python" "$here/build.py" "$@"
