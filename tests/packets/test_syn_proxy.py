"""Why vipd sets up no SYNPROXY, and that one in front of it works: docs/declaration.md, Flow limits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.packets.outside import SILENCE
from tests.packets.services import Services, backend_text
from vipd.model.service import Frontend

pytestmark = pytest.mark.root

LOOSE = "net.netfilter.nf_conntrack_tcp_loose"
RULES = """
table ip in_front {{
  chain first {{
    type filter hook prerouting priority raw;
    ip daddr {0} tcp dport {1} tcp flags syn / fin,syn,rst,ack notrack
  }}
  chain others {{
    type filter hook forward priority filter - 10;
    ip daddr {0} tcp dport {1} ct state invalid,untracked synproxy mss 1460 wscale 7 timestamp sack-perm
  }}
}}
"""


@pytest.fixture
def vip(lab: Lab, daemon: Daemon, services: Services) -> Iterator[Frontend]:
    found = services.add(lab.backends)
    rules = daemon.directory / "synproxy.nft"
    rules.write_text(RULES.format(found.address, found.port))
    before = lab.host.run("sysctl", "-n", LOOSE).stdout.strip()
    done = lab.host.run("nft", "-f", str(rules), check=False)
    if "Operation not supported" in done.stderr or "No such file" in done.stderr:
        pytest.skip("this kernel has no SYNPROXY")
    assert not done.returncode, done.stderr
    yield found
    lab.host.run("nft", "delete", "table", "ip", "in_front")
    lab.host.run("sysctl", "-qw", f"{LOOSE}={before}")


def test_it_works_where_connection_tracking_takes_up_no_open_connection(
    lab: Lab, daemon: Daemon, vip: Frontend
) -> None:
    address, port, _ = vip
    lab.host.run("sysctl", "-qw", f"{LOOSE}=0")
    assert set(lab.client.send(address, port, count=30).all_answered().backends) == {"b1", "b2", "b3"}
    # The client is connected before a backend is asked, and a refusal comes too late to be one.
    for backend in lab.backends:
        daemon.vipctl("disable", f"{address}:{port}/tcp/{backend_text(backend)}")
    daemon.wait_in_sync()
    lab.client.send(address, port, count=2, timeout=SILENCE).all_failed("timeout")


def test_with_the_kernels_default_it_ends_every_connection(lab: Lab, vip: Frontend) -> None:
    address, port, _ = vip
    lab.host.run("sysctl", "-qw", f"{LOOSE}=1")
    lab.client.send(address, port, count=5).all_failed("ECONNRESET")
