"""Where the user of vipctl is logged in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vipd.cli.session import session_address


@pytest.mark.parametrize(
    ("value", "address"),
    [
        ("198.51.100.7 50000 192.0.2.1 22", "192.0.2.1:22"),
        ("2001:db8::7 50000 2001:db8::1 2222", "[2001:db8::1]:2222"),
        ("fe80::7%eth0 50000 fe80::1%eth0 22", "[fe80::1]:22"),
        ("::ffff:198.51.100.7 50000 ::ffff:192.0.2.1 22", "192.0.2.1:22"),
        ("", ""),
        ("one two", ""),
        ("a b c d", ""),
        ("198.51.100.7 50000 host 22", ""),
        ("198.51.100.7 50000 192.0.2.1 99999", ""),
    ],
)
def test_the_end_on_this_host_is_taken_from_the_environment(tmp_path: Path, value: str, address: str) -> None:
    assert session_address({"SSH_CONNECTION": value}, str(tmp_path)) == address


def process(proc: Path, pid: int, parent: int, environment: bytes = b"") -> None:
    """A process as /proc shows it."""
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "environ").write_bytes(environment)
    (proc / str(pid) / "stat").write_text(f"{pid} (a ) b) S {parent} 1 1")


def test_processes_above_are_looked_at_as_far_as_they_may_be(tmp_path: Path) -> None:
    above = os.getppid()
    process(tmp_path, above, 4711, b"HOME=/root\0PATH=/bin\0")
    assert session_address({}, str(tmp_path)) == ""
    process(tmp_path, 4711, 1, b"A=b\0SSH_CONNECTION=198.51.100.7 50000 192.0.2.1 22\0C=d\0")
    assert session_address({}, str(tmp_path)) == "192.0.2.1:22"
    (tmp_path / "4711/stat").unlink()
    assert session_address({}, str(tmp_path)) == ""


def test_a_circle_of_processes_ends(tmp_path: Path) -> None:
    process(tmp_path, os.getppid(), os.getppid())
    assert session_address({}, str(tmp_path)) == ""
