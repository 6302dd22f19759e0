#!/usr/bin/env bash
# Prepares the system tests: root directories of Debian releases, and the package.
#
#     sudo bash tests/system/prepare.sh [RELEASE...]
#
# Installs the programs that it needs. Everything is kept in a cache ($VIPD_TEST_CACHE or /var/cache/vipd-tests) and
# made once: a root directory for each release, a package for each state of the source. Prints `RELEASE DIRECTORY`
# for each root and `package FILE`. Exit code 3, with the reason, where this machine cannot run such tests.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../prepare.sh"

cache=${VIPD_TEST_CACHE:-/var/cache/vipd-tests}
in_root=systemd,systemd-sysv,dbus,iproute2,nftables
# Not in the root, but beside it: what `apt install vipd` has to bring, and what debian/tests needs.
at_hand=(python3 iptables curl)
log=$(mktemp)
trap 'rm -f "$log"' EXIT

cannot() {
    printf '%s\n' "$1" >&2
    exit 3
}

install_tools() {
    local pair missing=()
    for pair in systemd-nspawn:systemd-container mmdebstrap:mmdebstrap dpkg-scanpackages:dpkg-dev; do
        command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    command -v apt-get >/dev/null || cannot "no apt-get to install ${missing[*]} with"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq >"$log" 2>&1 || true
    apt-get install -qq -y --no-install-recommends "${missing[@]}" >"$log" 2>&1 ||
        cannot "cannot install ${missing[*]}: $(tail -n 1 "$log")"
}

may_mount() {
    local scratch
    scratch=$(mktemp -d)
    unshare --mount bash -c "
        mount -t tmpfs none '$scratch' && cd '$scratch' && mkdir lower upper work disk &&
        mount -t overlay none disk -o lowerdir=lower,upperdir=upper,workdir=work" 2>"$log" ||
        cannot "cannot mount here: $(tail -n 1 "$log")"
    rmdir "$scratch"
}

# The Debian archive that this machine's apt is set up with.
mirror() {
    apt-get indextargets --format '$(ORIGIN)/$(LABEL)/$(COMPONENT) $(REPO_URI)' |
        awk '$1 == "Debian/Debian/main" && !found { print $2; found = 1 }'
}

apt_options() { # how this machine's apt reaches it
    apt-config dump | grep -E '^Acquire::(https?::Proxy|Check-Valid-Until|Check-Date|Retries) ' || true
}

make_root() { # release
    local root=$cache/$1 from options
    if [ ! -d "$root" ]; then
        from=$(mirror)
        [ -n "$from" ] || cannot "apt here is set up with no Debian archive to make $1 from"
        options=$(mktemp)
        apt_options >"$options"
        rm -rf "$root.new"
        mmdebstrap --quiet --mode=root --variant=minbase --include="$in_root" --aptopt="$options" \
            --customize-hook='chroot "$1" apt-get clean' \
            --customize-hook="chroot \"\$1\" apt-get install -qq -y --download-only --no-install-recommends ${at_hand[*]}" \
            --customize-hook='mkdir "$1/srv/packages" && mv "$1"/var/cache/apt/archives/*.deb "$1/srv/packages/"' \
            "$1" "$root.new" "$from" >"$root.log" 2>&1 ||
            { tail -n 5 "$root.log" >&2; fail "cannot make the root directory of $1"; }
        rm -f "$options" "$root.new/etc/resolv.conf"
        : >"$root.new/etc/machine-id"
        mv "$root.new" "$root"
    fi
    echo "$1 $root"
}

make_package() {
    local state file
    state=$(cd "$project" && tar --sort=name --mtime=@0 --owner=0 --group=0 --exclude=__pycache__ \
        -c debian docs examples systemd vipd pyproject.toml README.md CHANGELOG.md LICENSE | sha256sum | cut -c1-16)
    file=$cache/package-$state
    if [ ! -d "$file" ]; then
        rm -rf "$cache"/package-*
        mkdir "$file.new"
        bash "$project/debian/build.sh" "$file.new" >"$cache/package.log" 2>&1 ||
            { tail -n 30 "$cache/package.log" >&2; fail "cannot build the package"; }
        mv "$file.new" "$file"
    fi
    echo "package $(ls "$file"/vipd_*.deb)"
}

[ "$(id -u)" = 0 ] || cannot "root is needed to boot machines"
install_tools
may_mount
mkdir -p "$cache"
exec 9>"$cache/lock" # one run at a time makes things
flock 9
jobs=()
make_package &
jobs+=($!)
[ $# -gt 0 ] || set -- bookworm trixie
for release in "$@"; do
    make_root "$release" &
    jobs+=($!)
done
worst=0
for job in "${jobs[@]}"; do
    code=0
    wait "$job" || code=$?
    # What is broken counts more than what cannot be done here.
    if [ $code != 0 ] && { [ $worst = 0 ] || [ $worst = 3 ]; }; then worst=$code; fi
done
exit $worst
