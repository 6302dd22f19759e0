"""Names, arguments, interpreters and speed."""

from __future__ import annotations

import os
import re
import resource
import subprocess
from pathlib import Path

import pytest

import vipd
from tests.onefile.built import NOBODY, SYSTEM_PYTHON, Done, FreshHost, altered, bill, build, copy_sources
from tests.onefile.conftest import Build

DECLARATION = """\
apiVersion: vipd/v1
services:
  - {name: dns, address: 10.96.0.10, ports: [53/udp], backends: [10.244.0.5]}
"""


@pytest.mark.nightly
def test_same_sources_and_wheels_give_same_bytes(made: Build, tmp_path: Path) -> None:
    again = tmp_path / "of-another-name" / made.file.name
    sources = copy_sources(made.sources, tmp_path / "elsewhere")
    for path in sources.rglob("*"):
        os.utime(path, (10**9, 10**9))
        path.chmod(0o700)
    unpacked = tmp_path / "wheels"  # nothing that was packed before is in it
    unpacked.mkdir()
    for directory in filter(Path.is_dir, made.wheels.iterdir()):
        (unpacked / directory.name).symlink_to(directory)
    different = {"SOURCE_DATE_EPOCH": "1", "TZ": "Asia/Kathmandu", "LC_ALL": "C", "PYTHONHASHSEED": "1"}
    build(sources, again, unpacked, different)
    assert bill(again).read_bytes() == bill(made.file).read_bytes()
    done = subprocess.run(["cmp", str(made.file), str(again)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_first_word_says_which_program(warm: FreshHost) -> None:
    assert warm.run("vipd", "--version").stdout == f"vipd {vipd.__version__}\n"
    assert warm.run("vipd", "--help").stdout.startswith("usage: vipd [-h]")
    assert warm.run("vipctl", "--help").stdout.startswith("Usage: vipctl [OPTIONS] VERB")


def test_name_of_a_link_says_which_program(host: FreshHost, warm: FreshHost) -> None:
    vipd, vipctl = host.link("vipd"), host.link("vipctl")
    assert host.command(str(vipd), "--help", CACHE_DIRECTORY=warm.cache).stdout.startswith("usage: vipd [-h]")
    done = host.command(str(vipctl), "list", "--no-such-option", CACHE_DIRECTORY=warm.cache)
    assert (done.returncode, "hint: vipctl list -h" in done.stderr) == (2, True), done.stderr


def test_without_a_word_it_says_how_it_is_used(host: FreshHost) -> None:
    bare = host.run()
    assert (bare.returncode, bare.stderr) == (0, "")
    assert all(word in bare.stdout for word in ("vipd.pyz vipctl VERB", "vipd.pyz vipd [OPTION", "--unpack"))
    assert max(map(len, bare.stdout.splitlines())) < 80
    wrong = host.run("lst")
    assert (wrong.returncode, "'lst'" in wrong.stderr) == (2, True)
    assert host.run("--version").stdout.startswith(f"vipd {vipd.__version__}, one file ")
    assert not host.cache.exists()


@pytest.mark.root
@pytest.mark.nightly
def test_user_without_rights_checks_a_file(host: FreshHost) -> None:
    home = host.give("home", NOBODY, 0o700)
    declaration = host.directory / "dns.yaml"
    declaration.write_text(DECLARATION)

    def check() -> Done:
        return host.run("vipctl", "check", str(declaration), user=NOBODY, CACHE_DIRECTORY="", HOME=home)

    good = check()
    assert good.returncode == 0, good.stderr
    declaration.write_text(DECLARATION.replace("53/udp", "53/udq"))
    bad = check()
    assert (bad.returncode, "udq" in bad.stdout + bad.stderr) == (1, True)
    assert (home / ".cache" / "vipd").stat().st_uid == NOBODY


def test_variables_and_packages_of_the_python_around_do_not_matter(warm: FreshHost, tmp_path: Path) -> None:
    for module in ("click", "typing", "vipd"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('imported from PYTHONPATH')\n")
    for argv in ((str(warm.file),), (SYSTEM_PYTHON, str(warm.file))):
        done = warm.command(*argv, "vipctl", "--help", PYTHONPATH=tmp_path, CACHE_DIRECTORY=warm.cache)
        assert done.stdout.startswith("Usage: vipctl"), done.stderr


@pytest.mark.nightly
def test_later_starts_are_much_faster_than_the_first(host: FreshHost) -> None:
    def seconds() -> float:
        """Of processor time: what else this machine does is not in it."""
        begin = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = host.run("vipctl", "--help")
        assert done.returncode == 0, done.stderr
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        return end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime

    first = seconds()
    later = min(seconds() for _ in range(5))
    print(f"first run {first:.2f} s, later runs {later:.3f} s")
    assert later < first / 4
    assert not [
        path for path in host.lib.rglob("*.py") if not list(path.parent.glob(f"__pycache__/{path.stem}.*"))
    ]


@pytest.mark.parametrize(
    ("known", "instead", "hint"),
    [(b"-3", b"-9", "name a Python that fits"), (b"x86_64", b"s390x", "build.sh --platform x86_64")],
    ids=["version", "machine"],
)
def test_another_python_reports_what_the_file_needs(
    host: FreshHost, known: bytes, instead: bytes, hint: str
) -> None:
    # The file is altered, not the Python: such an interpreter need not be on this machine.
    def change(contents: bytes) -> bytes:
        return b"\n".join(line.replace(known, instead) for line in contents.splitlines())

    other = altered(host.file, host.directory / "other.pyz", "contents.py", change)
    done = host.command(str(other), "vipctl", "--help", CACHE_DIRECTORY=host.cache)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(r"this file is for Python 3\.11, 3\.12 or 3\.13 on \w+", done.stderr)
    assert "is Python 3." in done.stderr
    assert hint in done.stderr
    assert not host.cache.exists()
