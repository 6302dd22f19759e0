#!/usr/bin/env bash
# bundle.sh TARGET: vipd and every PyPI package that it needs as one directory for Python 3.11, 3.12 and 3.13.
#
# Extension modules carry the Python they are for in their names, so that those of all three stand side by side;
# the modules in Python must be the same for all, which is checked. Packages come from the index that pip is set up
# with, or, with PIP_NO_INDEX=1 PIP_FIND_LINKS=DIR, from a directory that holds them; none is taken, nor run to build
# another, whose hash is not in debian/requirements*.txt.
#
# With VIPD_BUNDLE_CACHE=DIR the packages are kept there, whole, for builds with the same pins, this script, Python and
# compiler; all else is done each time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pythons=(3.11 3.12 3.13)
newest_glibc=36 # of Debian 12, the oldest system that the package is for
target=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

main() {
    local kept=
    mkdir -p "$(dirname "$target")"
    [ -z "${VIPD_BUNDLE_CACHE:-}" ] || kept=$VIPD_BUNDLE_CACHE/bundle-$(inputs | sha256sum | cut -c1-16)
    if [ -n "$kept" ] && [ -d "$kept" ]; then
        cp -a "$kept" "$target"
    else
        add_packages
        [ -z "$kept" ] || keep "$kept"
    fi
    cp -a vipd "$target/"
    find "$target/vipd" -name README.md -delete
    find "$target" -name __pycache__ -prune -exec rm -rf {} +
    find "$target" -type f -exec chmod 644 {} +
    # Modules are no programs, whatever their first lines say.
    grep -rlZ --include='*.py' '^#!' "$target" | xargs -0r sed -i '1{/^#!/d}'
}

# What the packages in the target depend on, besides their hashed files.
inputs() {
    cat debian/bundle.sh debian/requirements*.txt debian/legacy/iptc.py
    /usr/bin/python3 -VV
    gcc --version
    echo "${CPPFLAGS:-} ${CFLAGS:-} ${LDFLAGS:-}" | sed "s|$PWD|.|g"
}

keep() { # directory
    cp -a "$target" "$1.$$"
    mv -T "$1.$$" "$1" 2>/dev/null || rm -rf "$1.$$" # another build was faster
}

add_packages() {
    local version
    /usr/bin/python3 -m venv "$work/venv"
    for version in "${pythons[@]}"; do fetch "$version" "$work/$version"; done
    cp -a "$work/${pythons[0]}" "$target"
    for version in "${pythons[@]:1}"; do merge "$work/$version"; done
    prune
    add_legacy
}

fetch() { # Python version, directory
    local tag=cp${1/./} options=(--platform manylinux2014_x86_64) minor
    for ((minor = 17; minor <= newest_glibc; minor++)); do options+=(--platform "manylinux_2_${minor}_x86_64"); done
    "$work/venv/bin/pip" install -qq --no-deps --no-compile --only-binary=:all: --require-hashes \
        --implementation cp --python-version "$1" --abi "$tag" --abi abi3 --abi none "${options[@]}" \
        --target "$2" --requirement debian/requirements.txt
}

# What tells of the installation itself, and of what was compiled in, differs between Pythons and files alike.
merge() { # directory
    local difference
    difference=$(diff -rq "$target" "$1" | grep -Ev '\.dist-info|: .*\.cpython-[0-9]+-[^ ]*\.so$' || true)
    if [ -n "$difference" ]; then
        printf 'error: packages differ between Pythons, so they cannot share a directory:\n%s\n' "$difference" >&2
        exit 1
    fi
    (cd "$1" && find . -name '*.cpython-*.so' -exec cp --parents {} "$OLDPWD/$target/" \;)
}

# Out goes what no run needs: sources of extension modules, types, programs, tests, lists of installed files.
prune() {
    rm -rf "$target/bin"
    find "$target" -type f \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.pxi' -o -name '*.[ch]' \
        -o -name '_testcapi.*' -o -path '*.dist-info/RECORD' -o -path '*.dist-info/WHEEL' \
        -o -path '*.dist-info/REQUESTED' -o -path '*.dist-info/INSTALLER' -o -path '*.dist-info/*.txt' \) -delete
    # Their texts stand in /usr/share/doc/vipd.
    find "$target" -path '*.dist-info/licenses' -prune -exec rm -rf {} +
    find "$target" -type d -empty -delete
}

# python-iptables has no wheel. Its library is plain C without any of Python, so one serves every Python. It stands
# apart, behind debian/legacy/iptc.py, which says when it can be used.
add_legacy() {
    local source
    # For its metadata pip runs setuptools: not the newest of an index, which build isolation would take.
    "$work/venv/bin/pip" install -qq --no-deps --only-binary=:all: --require-hashes \
        --requirement debian/requirements-build.txt
    "$work/venv/bin/pip" download -qq --no-deps --no-binary=python-iptables --no-build-isolation --require-hashes \
        --dest "$work/legacy" --requirement debian/requirements-legacy.txt
    tar -C "$work/legacy" -xzf "$work"/legacy/*.tar.gz
    source=$(echo "$work"/legacy/*/)
    mkdir "$target/legacy"
    cp -r "${source}iptc" "$target/legacy/"
    # The path of this build would be in the debug information, and so in the build-id, which stays.
    gcc ${CPPFLAGS:-} ${CFLAGS:--O2} -ffile-prefix-map="$work=." -shared -fPIC ${LDFLAGS:-} \
        -o "$target/legacy/libxtwrapper.so" "${source}libxtwrapper/wrapper.c"
    cp debian/legacy/iptc.py "$target/"
}

main
