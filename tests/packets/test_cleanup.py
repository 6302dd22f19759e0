"""`vipctl cleanup` leaves the host as vipd found it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import Lab, Wiring
from tests.packets.services import SERVED_PORT, Services
from vipd.model.service import Frontend

pytestmark = pytest.mark.root

FORWARDING = ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding")
FOREIGN_RULES = """*filter
:FORWARD DROP
:THEIRS -
-A INPUT -p tcp --dport 22 -j ACCEPT
-A FORWARD -j THEIRS
-A THEIRS -p tcp -m mark --mark 0x4000/0x4000 -j ACCEPT
COMMIT
*nat
:THEIRS-NAT -
-A PREROUTING -p tcp --dport 2222 -j THEIRS-NAT
-A THEIRS-NAT -p tcp -j REDIRECT --to-ports 22
COMMIT
"""
"""Rules of somebody else in the tables that vipd writes to."""
HELD = {"iptables": "VIPD-SERVICES", "nftables": "table ip vipd"}
"""What a dry run names of each dataplane."""
REMOVED = {"iptables": "remove the empty table", "nftables": "remove table ip vipd"}


@pytest.fixture
def lab() -> Iterator[Lab]:
    """A lab of each test's own: what is compared is the whole state of its host."""
    with Lab(Wiring(backends=2)) as built:
        built.serve_everywhere(SERVED_PORT)
        yield built


def state(lab: Lab) -> dict[str, list[str]]:
    """Every rule of the host without counters, the tables that exist, and whether it forwards."""
    found = {name: [lab.host.sysctl(name)] for name in FORWARDING}
    for tool in ("iptables-save", "ip6tables-save"):
        lines = lab.host.run(tool).stdout.splitlines()
        found[tool] = [line.partition(" [")[0] for line in lines if not line.startswith("#")]
    # Tables only: iptables makes an empty built-in chain whenever it looks into one, and leaves it there.
    ruleset = lab.host.run("nft", "list", "tables").stdout
    return found | {"nft list tables": sorted(ruleset.splitlines())}


def use(lab: Lab, daemon: Daemon) -> Frontend:
    """Have services of all kinds, with traffic; one of them."""
    services = Services(daemon)
    for family in (4, 6):
        vip = services.add(lab.backends, "--affinity", "1m", family=family)
        lab.client.send(*vip, count=20).all_answered()
        services.add([], family=family, protocol="udp")
    return vip


@pytest.mark.parametrize("ending", [Daemon.stop, Daemon.kill])
@pytest.mark.parametrize("foreign", ["nothing else", "foreign rules"])
def test_everything_is_as_before_and_as_a_dry_run_foretells(
    lab: Lab, dataplane: str, foreign: str, ending: Callable[[Daemon], None]
) -> None:
    if foreign == "foreign rules":
        for tool in ("iptables-restore", "ip6tables-restore"):
            lab.host.run(tool, text=FOREIGN_RULES)
    before = state(lab)
    with Daemon(lab.host, dataplane=dataplane) as daemon:
        vip = use(lab, daemon)
        in_use = state(lab)
        assert in_use != before
        refused = daemon.cleanup(check=False)
        assert refused.returncode == 1
        assert "would put its rules back" in refused.stderr
        assert state(lab) == in_use
        ending(daemon)
        foretold = daemon.cleanup("--dry-run").stdout
        assert HELD[dataplane] in foretold
        assert state(lab) == in_use
        done = daemon.cleanup().stdout
        assert state(lab) == before
        assert daemon.cleanup().stdout == "there was nothing of vipd in the kernel\n"
        assert state(lab) == before
        lab.client.send(*vip, timeout=0.5).all_failed("timeout")
        daemon.start()
        lab.client.send(*vip, count=20).all_answered()
    said = [line.removeprefix("would ") for line in foretold.splitlines() if line.startswith("would ")]
    output = [
        re.sub("^(removed|removing) ", "remove ", line).replace("deleted", "delete")
        for line in done.splitlines()
    ]
    assert said == [line for line in output if line.startswith(("remove ", "delete ", "set "))]
    if foreign == "nothing else":
        assert any(line.startswith(REMOVED[dataplane]) for line in said)


def test_forwarding_that_was_on_stays_on(lab: Lab) -> None:
    for name in FORWARDING:
        lab.host.sysctl(name, 1)
    with Daemon(lab.host) as daemon:
        use(lab, daemon)
        daemon.stop()
        daemon.cleanup()
    assert [lab.host.sysctl(name) for name in FORWARDING] == ["1", "1"]


def test_with_the_last_service_the_rules_are_gone_and_cleanup_says_what_was_left(
    lab: Lab, dataplane: str
) -> None:
    with Daemon(lab.host, dataplane=dataplane) as daemon:
        vip = "10.96.9.9:80/tcp"
        daemon.vipctl("add", vip, "10.244.1.1")
        daemon.vipctl("remove", vip)
        daemon.stop()
        output = daemon.cleanup().stdout
    if dataplane == "iptables":
        assert "removed the empty table ip nat" in output
    assert "set net.ipv4.ip_forward = 0" in output
    assert output.splitlines()[-1] == "nothing of vipd is left in the kernel"
