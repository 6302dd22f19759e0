#!/usr/bin/env bash
# Prepares the system tests: root directories of Debian releases, and the package.
#
#     sudo bash tests/system/prepare.sh [RELEASE...]
#
# Installs the programs that it needs. Everything is kept in a cache ($VIPD_TEST_CACHE or /var/cache/vipd-tests) and
# made once, under another name until it is whole: a root directory for each release, a package for each state of the
# source, and for a week the packages of others that it carries. What fails by chance is tried again, and said. Prints
# `RELEASE DIRECTORY` for each root and `package FILE`. Exit code 3, with the reason, where this machine cannot run such
# tests.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../prepare.sh"

cache=${VIPD_TEST_CACHE:-/var/cache/vipd-tests}
in_root=systemd,systemd-sysv,dbus,iproute2,nftables
# Not in the root, but beside it: what `apt install vipd` has to bring, what debian/tests needs, firewalls, and Docker.
at_hand=(python3 iptables curl firewalld ufw docker.io)
log=$(mktemp)
trap 'rm -f "$log"' EXIT

cannot() {
    printf '%s\n' "$1" >&2
    exit 3
}

install_tools() {
    local pair missing=()
    for pair in systemd-nspawn:systemd-container mmdebstrap:mmdebstrap dpkg-scanpackages:dpkg-dev \
        apparmor_parser:apparmor strace:strace; do
        command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    command -v apt-get >/dev/null || cannot "no apt-get to install ${missing[*]} with"
    apt_install "${missing[@]}" || cannot "cannot install ${missing[*]}"
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
    local root=$cache/$1 from
    if [ "$(cat "$root/srv/packages/contents" 2>/dev/null)" != "$in_root ${at_hand[*]}" ]; then
        from=$(mirror)
        [ -n "$from" ] || cannot "apt here is set up with no Debian archive to make $1 from"
        want_space "$cache" 1000
        again "making the root directory of $1" bootstrap "$1" "$root.new" "$from" ||
            fail "cannot make the root directory of $1"
        rm -f "$root.new/etc/resolv.conf"
        : >"$root.new/etc/machine-id"
        echo "$in_root ${at_hand[*]}" >"$root.new/srv/packages/contents"
        rm -rf "$root"
        mv "$root.new" "$root"
    fi
    if [ ! -e "$root/srv/packages/Packages" ]; then
        (cd "$root/srv/packages" && dpkg-scanpackages --multiversion . >Packages.new 2>"$cache/$1.log") ||
            fail "cannot list the packages of $1: $(tail -n 1 "$cache/$1.log")"
        mv "$root/srv/packages/Packages.new" "$root/srv/packages/Packages"
    fi
    echo "$1 $root"
}

bootstrap() { # release directory archive
    local options=$2.options log=$cache/$1.log
    { apt_options; echo 'Acquire::Retries "5";'; } >"$options"
    rm -rf "$2"
    mmdebstrap --quiet --mode=root --variant=minbase --include="$in_root" --aptopt="$options" \
        --customize-hook='chroot "$1" apt-get clean' \
        --customize-hook="chroot \"\$1\" apt-get install -qq -y --download-only --no-install-recommends ${at_hand[*]}" \
        --customize-hook='mkdir "$1/srv/packages" && mv "$1"/var/cache/apt/archives/*.deb "$1/srv/packages/"' \
        "$1" "$2" "$3" >"$log" 2>&1 || {
        tail -n 5 "$log" >&2
        return 1
    }
    rm -f "$options"
}

# A sum over what the package is made of. Not over directories: others may compile modules in them at this moment.
state_of_source() {
    cd "$project"
    find debian docs examples systemd vipd pyproject.toml README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md LICENSE \
        -name __pycache__ -prune -o -type f -printf '%m %p\0' -o -type l -printf '%l %p\0' | LC_ALL=C sort -z
    find debian docs examples systemd vipd pyproject.toml README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md LICENSE \
        -name __pycache__ -prune -o -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
}

make_package() {
    local state file
    state=$(state_of_source | sha256sum | cut -c1-16)
    file=$cache/package-$state
    if [ ! -d "$file" ]; then
        # Not those of today: a run that has begun before may still be using one.
        find "$cache" -maxdepth 1 -name 'package-*' -mmin +720 -exec rm -rf {} +
        find "$cache" -maxdepth 1 -name 'bundle-*' -mtime +6 -exec rm -rf {} +
        again "building the package" build "$file.new" || fail "cannot build the package"
        mv "$file.new" "$file"
    fi
    echo "package $(ls "$file"/vipd_*.deb)"
}

build() { # directory
    rm -rf "$1"
    # Installed once and thrown away: it may be large. A nightly test has lintian look at one.
    local quick=(DPKG_DEB_COMPRESSOR_TYPE=gzip DPKG_DEB_COMPRESSOR_LEVEL=1 VIPD_LINTIAN=no)
    mkdir "$1" &&
        env VIPD_BUNDLE_CACHE="$cache" "${quick[@]}" bash "$project/debian/build.sh" "$1" >"$cache/package.log" 2>&1 || {
        tail -n 30 "$cache/package.log" >&2
        return 1
    }
}

[ "$(id -u)" = 0 ] || cannot "root is needed to boot machines"
mkdir -p "$cache"
exec 9>"$cache/lock" # one run at a time installs and makes things
flock 9
install_tools
may_mount
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
