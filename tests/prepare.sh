# Sourced by tests/run.sh and examples/quickstart.sh: Debian packages and the virtual environment.
# Installs only what is missing. Sets $project (the checkout), $venv, and $python, which the environment is made with.

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$project/.venv
PATH=$PATH:/usr/sbin:/sbin

# The distribution's interpreter, on which the Debian package runs, where it is new enough. Another one that comes first
# in PATH may be built without optimisation: tests that compute took a sixth longer with one that pyenv had built.
python=/usr/bin/python3
new_enough='import sys; sys.exit(sys.version_info < (3, 11))'
"$python" -c "$new_enough" 2>/dev/null || python=python3

step() { printf '\n==> %s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$1" >&2
    exit "${2:-1}"
}

# again WHAT COMMAND...: tries a command up to four times, for what fails by chance: a mirror that does not answer, a
# download cut off, somebody else's lock. Says so each time; its exit code is that of the last try.
again() {
    local what=$1 code pause
    shift
    for pause in ${VIPD_PAUSES:-5 20 60}; do
        code=0
        "$@" || code=$?
        [ $code != 0 ] || return 0
        printf '%s: failed (exit code %s), again in %s s\n' "$what" "$code" "$pause" >&2
        sleep "$pause"
    done
    "$@"
}

# apt_install PACKAGE...: from the archives of this machine's apt. Waits for others who install.
apt_install() { again "installing $*" apt_install_once "$@"; }

apt_install_once() ( # a subshell, for its trap
    options="-qq -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300" policy=/usr/sbin/policy-rc.d
    # No service of such a package starts: a routing daemon would announce this machine's routes.
    if [ ! -e "$policy" ]; then
        trap 'rm -f "$policy"' EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
    fi
    # One archive of several may be out of order, and none of these packages from it.
    DEBIAN_FRONTEND=noninteractive apt-get $options update || echo "apt-get update: exit code $?" >&2
    DEBIAN_FRONTEND=noninteractive apt-get $options install -y --no-install-recommends "$@" >/dev/null
)

want_space() { # directory megabytes
    local free
    mkdir -p "$1"
    free=$(df --output=avail -m "$1" | tail -n 1)
    [ "$free" -ge "$2" ] || step "warning: $1: $free MB free, up to $2 MB are used; make room there if this fails"
}

require_root() { # the command as the user would type it
    [ "$(id -u)" = 0 ] || fail "root is needed, for network namespaces and packages; run: sudo bash $1" 2
}

run_packages="iptables:iptables nft:nftables conntrack:conntrack ip:iproute2 sysctl:procps ping:iputils-ping python3:python3"
test_packages="tmux:tmux dig:bind9-dnsutils curl:curl mandoc:mandoc groff:groff-base man:man-db zsh:zsh fish:fish openssl:openssl etcd:etcd-server etcdctl:etcd-client dot:graphviz apparmor_parser:apparmor strace:strace bird:bird2 /usr/lib/frr/bgpd:frr exabgp:exabgp keepalived:keepalived dnsmasq:dnsmasq-base"

missing_packages() { # program:package ...
    local pair
    for pair in "$@"; do
        command -v "${pair%%:*}" >/dev/null || echo "${pair##*:}"
    done
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
}

# install_packages [program:package ...]: what vipd needs, and these.
install_packages() {
    local missing
    missing=$(missing_packages $run_packages "$@")
    if [ -n "$missing" ]; then
        step "Installing Debian packages:" $missing
        command -v apt-get >/dev/null || fail "no apt-get here; install by hand:" $missing
        apt_install $missing
    fi
    "$python" -c "$new_enough" ||
        fail "Python 3.11 or newer is needed (Debian 12, Ubuntu 24.04); this is $("$python" -V)"
}

# make_venv [EXTRA]: the project and what it needs, with the optional dependencies EXTRA. A stamp in the
# environment holds the checksum of pyproject.toml, so that an unchanged one costs nothing. One at a time makes it.
make_venv() {
    local lock
    exec {lock}<"$project"
    flock "$lock"
    make_venv_alone "$@"
    exec {lock}<&-
}

make_venv_alone() {
    local extra=${1:-} stamp=$venv/.vipd-stamp want
    want="$project $(sha256sum <"$project/pyproject.toml")"
    if ! "$venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        step "Making the virtual environment $venv"
        "$python" -c 'import ensurepip' 2>/dev/null || python=python3 # Debian's package python3-venv is not installed
        "$python" -m venv --clear "$venv"
    elif grep -qsxF -e "$want dev" -e "$want $extra" "$stamp"; then
        return
    fi
    step "Installing vipd and what it needs into $venv"
    rm -f "$stamp"
    # The pip that comes with Python 3.11 takes twice as long to choose versions.
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --upgrade pip || true
    # Python compiles what is imported; pip would compile all.
    again "pip install" "$venv/bin/pip" install -qq --disable-pip-version-check --no-compile \
        -e "$project${extra:+[$extra]}"
    echo "$want $extra" >"$stamp.new"
    mv "$stamp.new" "$stamp"
}
