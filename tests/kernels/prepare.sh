#!/usr/bin/env bash
# Fetches what the kernels' lane needs, into a cache directory; installs nothing but qemu-system-x86, where it is missing:
#
#     sudo bash tests/kernels/prepare.sh [KERNEL...]       # default: debian12 debian13; also debian12-cloud, debian12-rt
#
# The packages are downloaded through apt's own configuration of sources and keys, checked by it, and only unpacked.
# VIPD_KERNELS_CACHE: the directory; default: /var/cache/vipd-kernels. What is there is not downloaded again: delete a
# kernel's folder for the newest one.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../prepare.sh"

cache=${VIPD_KERNELS_CACHE:-/var/cache/vipd-kernels}
# The Debian archive that this machine's apt is set up with.
mirror=${VIPD_KERNELS_MIRROR:-$(apt-get indextargets --format '$(ORIGIN)/$(LABEL)/$(COMPONENT) $(REPO_URI)' |
    awk '$1 == "Debian/Debian/main" && !found { print $2; found = 1 }')}
mirror=${mirror%/}
[ -n "$mirror" ] || fail "apt here is set up with no Debian archive; hint: set VIPD_KERNELS_MIRROR"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
limit="timeout 600"

# Lists of packages of one release, apart from this machine's own.
apt_of() { # release apt-program argument...
    local release=$1 program=$2
    shift 2
    $limit "$program" -qq -o Dir::Etc::sourcelist="$cache/apt/$release.list" -o Dir::Etc::sourceparts=/dev/null \
        -o Dir::State::lists="$cache/apt/$release" -o Dir::Cache="$cache/apt/$release-cache" \
        -o APT::Sandbox::User=root -o Acquire::Retries=3 "$@"
}

lists_of() { # release
    [ ! -e "$cache/apt/$1.ready" ] || return 0
    mkdir -p "$cache/apt/$1/partial" "$cache/apt/$1-cache/archives/partial"
    printf "deb [signed-by=$keyring] %s main\n" "$mirror $1" "$mirror-security $1-security" >"$cache/apt/$1.list"
    again "reading the lists of $1" apt_of "$1" apt-get update
    touch "$cache/apt/$1.ready"
}

# unpack RELEASE FOLDER PACKAGE...: the folder appears once it is whole.
unpack() {
    local release=$1 folder=$cache/$2 new package
    shift 2
    new=$(mktemp -d "$folder.XXXXXX")
    for package in "$@"; do
        (cd "$new" && again "downloading $package" apt_of "$release" apt-get download "$package")
    done
    for package in "$new"/*.deb; do
        dpkg-deb -x "$package" "$new"
    done
    rm "$new"/*.deb
    chmod 755 "$new"
    mv "$new" "$folder"
}

kernel() { # name
    local release meta package
    [ ! -e "$cache/$1" ] || return 0
    case $1 in
        debian12) release=bookworm meta=linux-image-amd64 ;;
        debian12-cloud) release=bookworm meta=linux-image-cloud-amd64 ;;
        debian12-rt) release=bookworm meta=linux-image-rt-amd64 ;;
        debian13) release=trixie meta=linux-image-amd64 ;;
        *) fail "unknown kernel $1; known: debian12 debian12-cloud debian12-rt debian13" 2 ;;
    esac
    lists_of "$release"
    # The metapackage depends on the image of the day.
    package=$(apt_of "$release" apt-cache depends $meta | sed -n 's/.*Depends: \(linux-image-.*\)/\1/p' | head -n 1)
    [ -n "$package" ] || fail "$meta of $release names no kernel; hint: delete $cache/apt"
    step "$1: $package"
    unpack "$release" "$1" "$package"
}

require_root "tests/kernels/prepare.sh"
want_space "$cache" 2000
if ! command -v qemu-system-x86_64 >/dev/null; then
    step "Installing qemu-system-x86"
    apt_install qemu-system-x86
fi
install_packages
exec 9>"$cache/lock"
flock -w 900 9 || fail "another $0 holds $cache/lock"
# Programs that this machine may lack: they run in the guest only, from the release of their libraries.
if [ ! -e "$cache/tools" ]; then
    lists_of bookworm
    unpack bookworm tools kmod libkmod2 ipvsadm libnl-3-200 libnl-genl-3-200 libpopt0
fi
[ $# -gt 0 ] || set -- debian12 debian13
for name in "$@"; do
    kernel "$name"
done
