"""Root's tools in a state directory of another user, who has planted there what may do harm.

The daemon's user owns that directory, and a check that it runs, or a hole in vipd, may be somebody else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab.node import Node
from tests.model.samples import HEAD, block
from tests.sources.host import namespace

pytestmark = pytest.mark.root

NOBODY = 65534
SECRET = "root's own\n"
RECORD = "host-changes.json"
STATE_FILES = (
    *(
        "lock",
        "services.yaml",
        "state.db",
        "state.db-journal",
        "state.db.last-good",
        "cache.db",
        "cache.db-journal",
        "dataplane",
        RECORD,
    ),
)


@pytest.fixture
def node() -> Iterator[Node]:
    with namespace() as made:
        yield made


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """One that other users reach, as they do /var/lib."""
    with tempfile.TemporaryDirectory(prefix="vipd-planted-") as path:
        Path(path).chmod(0o755)
        yield Path(path)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory that belongs to another user."""
    path = tmp_path / "state"
    path.mkdir(mode=0o750)
    os.chown(path, NOBODY, NOBODY)
    return path


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text(SECRET)
    return path


def link(path: Path, target: Path) -> None:
    path.symlink_to(target)
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)
    os.chown(path, NOBODY, NOBODY)


def huge(path: Path, _: Path) -> None:
    with path.open("wb") as file:
        file.truncate(20 * 2**30)
    os.chown(path, NOBODY, NOBODY)


def deep(path: Path, _: Path) -> None:
    path.write_text("[" * 100_000)
    os.chown(path, NOBODY, NOBODY)


PLANTS: dict[str, Callable[[Path, Path], object]] = {
    "a pipe": pipe,
    "a link": link,
    "a second name": lambda path, victim: path.hardlink_to(victim),
    "a link to nothing": lambda path, victim: link(path, victim.with_name("missing")),
    "a huge file": huge,
    "a deep file": deep,
}


def vipd(node: Node, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program of vipd's to its end, without a fault in it."""
    done = node.run(sys.executable, "-m", module, *arguments, check=False, timeout=120)
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("plant", PLANTS)
def test_root_cleans_up_and_applies_where_everything_is_planted(
    node: Node, state: Path, victim: Path, tmp_path: Path, plant: str
) -> None:
    """What is written aside replaces a link, and nothing is made, read or truncated behind one."""
    services = tmp_path / "services.d"
    services.mkdir()
    (services / "a.yaml").write_text(HEAD + block("10.96.0.1", "a", "10.244.0.1"))
    for name in STATE_FILES:
        for each in (name, f".{name}.new"):
            PLANTS[plant](state / each, victim)
    flags = ("--state-dir", str(state), "--services-dir", str(services), "--socket", str(tmp_path / "s"))
    once = vipd(node, "vipd", *flags, "--once")
    if plant not in ("a huge file", "a deep file"):
        assert "lock: " in once.stderr, once.stderr
        assert "10.96.0.1" not in node.run("iptables-save").stdout
    (state / "lock").unlink()
    vipd(node, "vipd", *flags, "--once")
    (state / RECORD).unlink(missing_ok=True)
    once = vipd(node, "vipd", *flags, "--once")
    assert "10.96.0.1" in node.run("iptables-save").stdout, once.stderr
    assert (state / RECORD).is_file()
    assert not (state / RECORD).is_symlink()
    assert (state / RECORD).stat().st_uid == NOBODY, "the daemon must be able to read what root has written"
    vipd(node, "vipd.cli.main", "cleanup", "--state-dir", str(state))
    assert "10.96.0.1" not in node.run("iptables-save").stdout
    assert victim.read_text() == SECRET
    assert {path.name for path in tmp_path.iterdir()} <= {"state", "victim", "services.d"}


def test_links_of_root_lead_where_they_lead(node: Node, state: Path, tmp_path: Path) -> None:
    (tmp_path / "moved").symlink_to("state")
    flags = ("--state-dir", str(tmp_path / "moved" / "deep" / "er"), "--services-dir", str(tmp_path))
    (tmp_path / "a.yaml").write_text(HEAD + block("10.96.0.1", "a", "10.244.0.1"))
    assert vipd(node, "vipd", *flags, "--socket", str(tmp_path / "s"), "--once").returncode == 0
    assert (state / "deep" / "er" / RECORD).is_file()
    assert (state / "deep").stat().st_uid == NOBODY


RECORDS: dict[str, dict[str, object]] = {
    "absolute": {"sysctls": {"/VICTIM": {"was": "changed", "set": SECRET.strip()}}},
    "upwards": {"sysctls": {"../../VICTIM": {"was": "changed", "set": SECRET.strip()}}},
    "another setting": {"sysctls": {"net/ipv4/conf/all/log_martians": {"was": "1", "set": "0"}}},
    "upwards to another": {"sysctls": {"net/ipv4/neigh/../conf/all/log_martians": {"was": "1", "set": "0"}}},
    "another value": {"sysctls": {"net/ipv4/ip_forward": {"was": "7", "set": "0"}}},
    "commands for nft": {"tables": ["ipv4 nat;add table ip planted"]},
    "one word for two": {"tables": ["nat"]},
    "no prefix": {"prefixes": ["-"]},
    "no device": {"devices": {"../../x": "made"}},
    "no state of a device": {"devices": {"planted": "gone"}},
}


def test_a_record_names_nothing_but_what_vipd_does(node: Node, state: Path, victim: Path) -> None:
    node.run("ip", "link", "add", "planted", "type", "bridge")
    node.sysctl("net.ipv4.conf.all.log_martians", 0)
    node.sysctl("net.ipv4.ip_forward", 0)
    foreign = "*nat\n:KEPT - [0:0]\n-A POSTROUTING -j KEPT\nCOMMIT\n"
    node.run("iptables-restore", "--noflush", text=foreign)

    def kernel() -> str:
        settings = ("net.ipv4.conf.all.log_martians", "net.ipv4.ip_forward")
        looks = (
            ("sysctl", *settings),
            ("iptables-save", "-t", "nat"),
            ("nft", "list", "tables"),
            ("ip", "link"),
        )
        lines = [line for look in looks for line in node.run(*look).stdout.splitlines()]
        return "\n".join(line for line in lines if not line.startswith("#"))

    before = kernel()
    for name, planted in RECORDS.items():
        record: dict[str, object] = {"sysctls": {}, "tables": [], "prefixes": [], **planted}
        (state / RECORD).write_text(json.dumps(record).replace("/VICTIM", str(victim)))
        vipd(node, "vipd.cli.main", "cleanup", "--state-dir", str(state))
        assert kernel() == before, name
        assert victim.read_text() == SECRET, name


def test_the_database_that_root_makes_belongs_to_the_user_of_its_directory(node: Node, state: Path) -> None:
    (state / "services.yaml").write_text(HEAD + block("10.96.0.1", "a", "10.244.0.1"))
    (state / "services.d").mkdir()
    flags = (
        "--state-dir",
        str(state),
        "--services-dir",
        str(state / "services.d"),
        "--socket",
        str(state / "s"),
    )
    assert vipd(node, "vipd", *flags, "--once").returncode == 0
    assert "10.96.0.1" in node.run("iptables-save").stdout
    for name in ("state.db", "state.db.last-good"):
        status = (state / name).stat()
        assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (NOBODY, NOBODY, 0o640), name
    (state / "state.db").chmod(0)  # what its own user may not read, root does not read for that user
    os.chown(state / "state.db", 0, 0)
    once = vipd(node, "vipd", *flags, "--once")
    assert once.returncode == 1
    assert "state.db: cannot be read: Permission denied; its last good copy goes on serving" in once.stderr
    assert "chown --reference" in once.stderr
