"""Pythons beside the system's own: what this machine happens to have, and those of other Debian releases."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.onefile.built import SYSTEM_PATH, SYSTEM_PYTHON, FreshHost

pytestmark = pytest.mark.nightly

SUPPORTED = ("3.11", "3.12", "3.13")
RELEASES = {"bookworm": "3.11", "trixie": "3.13"}
ROOTS = Path(os.environ.get("VIPD_TEST_CACHE", "/var/cache/vipd-tests"))
"""Where tests/system keeps root directories of releases, with packages beside them."""

FROM_PACKAGES = """
set -e
mount -t tmpfs none "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay none -o "lowerdir=$2,upperdir=$1/upper,workdir=$1/work" "$1/root"
for package in "$2"/srv/packages/*.deb; do
    case ${package##*/} in
    *python3*|libexpat1_*|libffi8_*|libssl3*|libsqlite3-0_*)
        dpkg-deb --fsys-tarfile "$package" | tar -C "$1/root" -x --keep-directory-symlink ;;
    esac
done
cp "$3" "$1/root/vipd.pyz"
mount -t proc none "$1/root/proc"
chroot "$1/root" /usr/bin/python3 -c 'import platform; print(platform.python_version())'
chroot "$1/root" /vipd.pyz vipctl check /dev/null
chroot "$1/root" /vipd.pyz vipd --version
"""


def interpreter(version: str) -> str:
    """A CPython of that version on this machine; empty when there is none."""
    found = [*Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")]
    on_path = shutil.which(f"python{version}")
    for candidate in [*map(str, found), *([on_path] if on_path else [])]:
        done = subprocess.run([candidate, "-c", "import lzma, ssl"], capture_output=True, check=False)
        if done.returncode == 0:
            return candidate
    return ""


def own_version() -> str:
    """Of the system's Python, as in `3.11`."""
    asked = [SYSTEM_PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("version", SUPPORTED)
def test_supported_python_runs_the_file(host: FreshHost, version: str) -> None:
    python = interpreter(version)
    if version == own_version():
        pytest.skip(f"{version} is this machine's own Python, which every other test uses")
    if not python:
        pytest.skip(f"NOT TESTED WITH PYTHON {version}: this machine has none")
    # All of vipd is imported for that, and the extension modules with it.
    done = host.command(python, str(host.file), "vipd", "--version", CACHE_DIRECTORY=host.cache)
    assert done.returncode == 0, done.stderr
    assert host.trees[0].name.endswith(f"-cp{version.replace('.', '')}_x86_64")


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.14"])
def test_unsupported_python_is_refused(host: FreshHost, version: str) -> None:
    python = interpreter(version)
    if not python:
        pytest.skip(f"NOT TESTED WITH PYTHON {version}: this machine has none")
    done = host.command(python, str(host.file), "vipctl", "--help", CACHE_DIRECTORY=host.cache)
    assert done.returncode == 1
    assert f"is Python {version}" in done.stderr


@pytest.mark.root
@pytest.mark.parametrize("release", RELEASES)
def test_file_runs_on_a_bare_debian(host: FreshHost, release: str) -> None:
    if RELEASES[release] == own_version():
        pytest.skip(f"{release} has the Python of this machine, which every other test uses")
    if not (ROOTS / release / "srv" / "packages").is_dir():
        pytest.skip(f"NOT TESTED ON {release}: no root directory of it; tests/system/prepare.sh makes one")
    argv = ("unshare", "--mount", "sh", "-c", FROM_PACKAGES, "sh")
    mount = host.give("machine")
    done = host.command(*argv, str(mount), str(ROOTS / release), str(host.file), PATH=SYSTEM_PATH)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(RELEASES[release]), done.stdout
