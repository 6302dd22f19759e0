# Sourced by tests/run.sh and examples/quickstart.sh: Debian packages and the virtual environment.
# Installs only what is missing. Sets $project (the checkout) and $venv.

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$project/.venv
PATH=$PATH:/usr/sbin:/sbin

step() { printf '\n==> %s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$1" >&2
    exit "${2:-1}"
}

require_root() { # the command as the user would type it
    [ "$(id -u)" = 0 ] || fail "root is needed, for network namespaces and packages; run: sudo bash $1" 2
}

run_packages="iptables:iptables nft:nftables conntrack:conntrack ip:iproute2 sysctl:procps ping:iputils-ping python3:python3"
test_packages="tmux:tmux dig:bind9-dnsutils curl:curl mandoc:mandoc groff:groff-base man:man-db zsh:zsh fish:fish openssl:openssl etcd:etcd-server etcdctl:etcd-client dot:graphviz"

missing_packages() { # program:package ...
    local pair
    for pair in "$@"; do
        command -v "${pair%%:*}" >/dev/null || echo "${pair##*:}"
    done
    python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
}

# install_packages [program:package ...]: what vipd needs, and these.
install_packages() {
    local missing
    missing=$(missing_packages $run_packages "$@")
    if [ -n "$missing" ]; then
        step "Installing Debian packages:" $missing
        command -v apt-get >/dev/null || fail "no apt-get here; install by hand:" $missing
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq
        apt-get install -qq -y --no-install-recommends $missing >/dev/null
    fi
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "Python 3.11 or newer is needed (Debian 12, Ubuntu 24.04); this is $(python3 -V)"
}

# make_venv [EXTRA]: the project and what it needs, with the optional dependencies EXTRA. A stamp in the
# environment holds the checksum of pyproject.toml, so that an unchanged one costs nothing.
make_venv() {
    local extra=${1:-} stamp=$venv/.vipd-stamp want
    want="$project $(sha256sum <"$project/pyproject.toml")"
    if ! "$venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        step "Making the virtual environment $venv"
        python3 -m venv --clear "$venv"
    elif grep -qsxF -e "$want dev" -e "$want $extra" "$stamp"; then
        return
    fi
    step "Installing vipd and what it needs into $venv"
    rm -f "$stamp"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -e "$project${extra:+[$extra]}"
    echo "$want $extra" >"$stamp"
}
