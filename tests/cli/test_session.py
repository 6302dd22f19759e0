"""Where the user of vipctl is logged in by SSH: a change says it, so that vipd cuts nobody off."""

from __future__ import annotations

import sys

import pytest

from tests.cli.conftest import Spawn, Vipctl
from tests.cli.fake_daemon import FakeDaemon

HEADER = "Vipd-Session"


ENDS = {
    "198.51.100.7 50000 192.0.2.1 22": "192.0.2.1:22",
    "2001:db8::7 50000 2001:db8::1 2222": "[2001:db8::1]:2222",
    "fe80::7%eth0 50000 fe80::1%eth0 22": "[fe80::1]:22",
    "::ffff:198.51.100.7 50000 ::ffff:192.0.2.1 22": "192.0.2.1:22",
}


def test_a_change_says_the_end_on_this_host(
    vipctl: Vipctl, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, address in ENDS.items():
        monkeypatch.setenv("SSH_CONNECTION", value)
        vipctl("remove", "web")
        assert daemon.last.headers[HEADER] == address


@pytest.mark.parametrize(
    "value", ["", "one two", "a b c d", "198.51.100.7 50000 host 22", "198.51.100.7 50000 192.0.2.1 99999"]
)
def test_what_is_no_connection_says_nothing(spawn: Spawn, daemon: FakeDaemon, value: str) -> None:
    # Above a process of init there is nobody whose environment could be read.
    spawn("remove", "web", SSH_CONNECTION=value).wait(60)
    assert daemon.last.headers.get(HEADER, "") == ""


def test_a_process_above_is_asked_where_sudo_has_removed_the_variable(
    spawn: Spawn, daemon: FakeDaemon
) -> None:
    above = f"env -u SSH_CONNECTION sh -c '{sys.executable} -m vipd.cli.main remove web; :'; :"
    spawn(above, program=("sh", "-c"), SSH_CONNECTION="198.51.100.7 50000 192.0.2.1 22").wait(60)
    assert daemon.last.headers[HEADER] == "192.0.2.1:22"
