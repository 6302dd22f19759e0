"""Any file of the state directory may be damaged or something else: vipd says so, and serves."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.lab.examples import some
from tests.lab.node import Node
from tests.sources.host import GOOD, OTHER, Host, QuickHost

pytestmark = pytest.mark.root

STORED = {"name": "stored", "address": "10.96.0.20", "ports": [80], "backends": ["10.244.0.7"]}
CHECKED = {**STORED, "name": "checked", "address": "10.96.0.21", "check": "tcp"}
LEFT_OUT = ("lock", "host-changes.json")
"""Nobody reads the one; without the other nothing is done to a host, which has tests of its own."""


def _write(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def _replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


DAMAGES: dict[str, Callable[[Path], object]] = {
    "garbage": _write(b"\x00\xff\xfe\x80garbage\n\n\xff"),
    "empty": _write(b""),
    "null": _write(b"null"),
    "deep": _write(b"[" * 100_000),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "huge": lambda path: os.truncate(path, 2**40),
    "directory": _replace(Path.mkdir),
    "pipe": _replace(os.mkfifo),
    "unreadable": _replace(lambda path: path.symlink_to(path.name)),
}


def _live(host: Host) -> None:
    """Have vipd write every file that it may write."""
    host.put("a.yaml", GOOD)
    host.put("b.yaml", OTHER)
    host.step()
    for spec in (STORED, CHECKED):
        assert host.ask("POST", "services", {"service": spec})[0] == 200
    host.vipctl("drain", "stored/10.244.0.7")
    host.vipctl("host", "drain")
    host.ask("POST", "dataplane", {"name": "nftables"})
    host.remove("b.yaml")
    host.step()
    host.wait_until(lambda: "unhealthy" in str(host.service("checked")), True)


@pytest.fixture(scope="module")
def lived(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state directory of a vipd that has done all that is kept."""
    kept = tmp_path_factory.mktemp("lived") / "state"
    with Host(node) as host:
        _live(host)
        host.stop()
        shutil.copytree(host.state_dir, kept)
    return kept


def _files(directory: Path) -> list[str]:
    """The names of the files that are read."""
    paths = (path for path in directory.rglob("*") if path.is_file() and path.name not in LEFT_OUT)
    return sorted(str(path.relative_to(directory)) for path in paths)


def _bytes(directory: Path) -> set[bytes]:
    """How all regular files begin."""
    return {path.read_bytes()[:64] for path in directory.rglob("*") if path.is_file()}


def _memory(host: Host) -> dict[str, object]:
    """What a vipd knows that the files of services.d do not say."""
    status = host.status()
    return {
        "services": host.names(),
        "overrides": host.get("overrides")["overrides"],
        "history": host.get("history")["entries"],
        "maintenance": host.get("host").get("maintenance"),
        "dataplane": status["dataplane"]["name"],
    }


def what_is_wrong(host: Host, lived: Path, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Damages that vipd misses something for and does not tell of, and those for which it loses bytes. One
    file after the other, each in the directory as it was."""
    silent, lost = list[str](), list[str]()
    host.put("a.yaml", GOOD)
    host.stop()
    shutil.rmtree(host.state_dir)
    shutil.copytree(lived, host.state_dir)
    host.start()
    memory = _memory(host)
    for name in names:
        for damage in some(list(DAMAGES), name):
            host.stop()
            shutil.rmtree(host.state_dir)
            shutil.copytree(lived, host.state_dir)
            (host.directory / "log").write_text("")
            path = host.state_dir / name
            DAMAGES[damage](path)
            before = path.read_bytes()[:64] if path.is_file() and damage != "huge" else b""
            host.start()
            assert "dns" in host.names(), (name, damage)
            same = _memory(host) == memory
            host.put("b.yaml", OTHER)
            assert {"dns", "web"} <= host.step(), (name, damage)
            host.remove("b.yaml")
            said = host.log + str(host.status())
            assert "Traceback" not in said, (name, damage)
            if not same and name not in said:
                silent.append(f"{name}, {damage}")
            if not same and before and before not in _bytes(host.state_dir):
                lost.append(f"{name}, {damage}")
    return silent, lost


def test_vipd_says_which_file_it_cannot_use_unless_it_misses_nothing_and_loses_no_byte(
    node: Node, lived: Path
) -> None:
    files = _files(lived)
    files.remove("dataplane")
    with QuickHost() as host:
        assert what_is_wrong(host, lived, files) == ([], [])
    with Host(node) as daemon:  # the other one has no dataplane that it could switch
        assert what_is_wrong(daemon, lived, ["dataplane"]) == ([], [])


def test_vipd_serves_what_files_declare_with_all_of_them_damaged(lived: Path) -> None:
    for damage in ("garbage", "directory", "pipe", "huge", "unreadable"):
        host = QuickHost()
        shutil.copytree(lived, host.state_dir)
        for name in _files(lived):
            DAMAGES[damage](host.state_dir / name)
        host.put("a.yaml", GOOD)
        with host:
            assert "dns" in host.names()
            host.put("b.yaml", OTHER)
            assert {"dns", "web"} <= host.step()
            assert "Traceback" not in host.log


def test_copies_that_are_kept_aside_have_an_end(lived: Path) -> None:
    with QuickHost() as host:
        host.stop()
        for attempt in range(12):
            for name in _files(lived):
                (host.state_dir / name).parent.mkdir(exist_ok=True)
                (host.state_dir / name).write_text(f"garbage {attempt}")
            host.start()
            host.stop()
        assert len(_files(host.state_dir)) < 8 * len(_files(lived))
