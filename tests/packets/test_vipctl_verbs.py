"""What `vipctl add`, `set` and `edit` say is what packets meet."""

from __future__ import annotations

import sys

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.packets.services import backend_text

pytestmark = pytest.mark.root

FLOWS = 20
VIPS = {4: "10.96.0.10", 6: "fd00:96::10"}


@pytest.fixture(scope="module")
def dataplane() -> str:
    """One is enough: vipctl is the same for both."""
    return "nftables"


def test_a_service_of_two_families_and_ports_is_added_changed_and_edited(lab: Lab, daemon: Daemon) -> None:
    first, spare, third = lab.backends
    serving = [backend_text(first, family) for family in VIPS]
    backups = [f"--backup={backend_text(spare, family)}" for family in VIPS]
    words = (",".join(VIPS.values()), "-p", "80/tcp", "-p", "53/udp", *serving, *backups, "--name", "all")
    dry = daemon.vipctl("add", *words, "--check", "tcp", "--dry-run").stdout
    assert "+ check: tcp\n" in dry
    assert daemon.get("services")["services"] == []
    daemon.vipctl("add", *words, "--check", "tcp")
    for vip in VIPS.values():
        for port, protocol in ((80, "tcp"), (53, "udp")):
            result = lab.client.send(vip, port, protocol, count=FLOWS)
            assert set(result.all_answered().backends) == {"b1"}, "b2 is a backup"

    daemon.vipctl("set", f"all/{backend_text(spare)}", "--backup", "false")
    daemon.vipctl("set", f"all/{backend_text(first)}", "--weight", "0")
    assert set(lab.client.send(VIPS[4], 80, count=FLOWS).all_answered().backends) == {"b2"}
    daemon.vipctl("set", "all", "-p", "81", "--check", "none")
    assert set(lab.client.send(VIPS[4], 81, count=FLOWS).all_answered().backends) == {"b2"}
    lab.client.send(VIPS[4], 80, count=FLOWS).all_failed("refused")

    editor = f"sed -i 's/{spare.address(4)}/{third.address(4)}/'"
    program = (sys.executable, "-m", "vipd.cli.main", "--socket", str(daemon.socket))
    lab.host.run("env", "-u", "VISUAL", f"EDITOR={editor}", *program, "edit", "all")
    assert set(lab.client.send(VIPS[4], 81, count=FLOWS).all_answered().backends) == {"b3"}
