#!/usr/bin/env bash
# Measures vipd beside what it is compared with, on this machine, in network namespaces of its own:
#
#     sudo bash tests/bench/run.sh [--quick|--full] [--only GROUP]... [--out DIR]
#
# Installs what is missing. --quick, the default: some 12 minutes, results in dist/bench. --full: about 35 minutes
# on two cores, results in docs/performance, where the tables and plots of docs/performance.md are made of them.
# --only programming, path, control, daemon or balance: that group alone, and the others' results stay. --only ipvs,
# which nothing else includes: IPVS beside vipd in a guest, some 12 minutes; downloads a kernel.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../prepare.sh"

require_root "tests/bench/run.sh"
# Some packages start a daemon of their own when they are installed; here theirs run in namespaces.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    trap 'rm -f $policy' EXIT
fi
install_packages etcd:etcd-server etcdctl:etcd-client unshare:util-linux nsenter:util-linux
bash "$project/tests/bench/path/prepare.sh"
make_venv dev
if ! "$venv/bin/python" -c 'import matplotlib' 2>/dev/null; then
    step "Installing matplotlib for the plots"
    again "pip install" "$venv/bin/pip" install --quiet --disable-pip-version-check -e "$project[bench]" ||
        step "no plots: matplotlib cannot be installed"
fi
cd "$project"
"$venv/bin/python" -m tests.bench "$@"
