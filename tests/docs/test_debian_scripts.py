"""The package's scripts, run on directories of the test's own by commands of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "debian/vipd.postrm"
PLACES = ("/etc/vipd", "/var/lib/vipd", "/var/cache/vipd", "/run/vipd", "/etc/systemd")


@pytest.mark.parametrize("number", [0, 2])
def test_a_purge_says_that_declarations_go(tmp_path: Path, number: int) -> None:
    text = SCRIPT.read_text()
    for place in PLACES:
        text = text.replace(place, f"{tmp_path}{place}")
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("rm", "rmdir", "find", "wc"):
        (commands / name).symlink_to(f"/usr/bin/{name}")
    (commands / "userdel").write_text("#!/bin/sh\n")
    (commands / "userdel").chmod(0o755)
    services = tmp_path / "etc/vipd/services.d"
    services.mkdir(parents=True)
    for each in range(number):
        (services / f"{each}.yaml").write_text("services: []")
    argv = ["/bin/sh", "-e", "-c", text, "postrm", "purge"]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=True, env={**os.environ, "PATH": str(commands)}
    )
    assert done.stderr == (
        f"vipd: removing {services}; files of declarations in it: {number}\n" if number else ""
    )
    assert not services.parent.exists()
