"""What an administrator refuses stays refused: vipd's accept never overrules his rules.

Each story runs with both dataplanes beside a policy DROP, where vipd has to accept its flows itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import Lab, Wiring
from tests.packets.services import SERVED_PORT, Services
from vipd.model.service import Frontend

pytestmark = pytest.mark.root

FIREWALLS = Path(__file__).parent / "firewalls"
NFT_CHAIN = """table inet site {
    chain forward {
        type filter hook forward priority filter; policy drop;
        ct state established,related accept
    }
}
"""
JUMP = '-m comment --comment "vipd translated flows" -j VIPD-FORWARD'


@dataclass(frozen=True)
class Refusal:
    """A way to refuse the client. `{client}` and `{backend}` in its commands are their addresses."""

    firewall: str
    """The rules that are there before: `drop` (a policy), `ufw`, `nft`, or `nft reject` (its last rule)."""
    refuse: str
    allow: str


REFUSALS = {
    "client": Refusal(
        "drop", "iptables -I FORWARD 1 -s {client} -j DROP", "iptables -D FORWARD -s {client} -j DROP"
    ),
    "backend": Refusal(
        "drop", "iptables -I FORWARD 1 -d {backend} -j DROP", "iptables -D FORWARD -d {backend} -j DROP"
    ),
    "fail2ban": Refusal(
        "drop",
        "iptables -N f2b-web; iptables -A f2b-web -j RETURN; iptables -I FORWARD -p tcp -j f2b-web; "
        "iptables -I f2b-web 1 -s {client} -j REJECT",
        "iptables -D FORWARD -p tcp -j f2b-web; iptables -F f2b-web; iptables -X f2b-web",
    ),
    "ufw route deny": Refusal(
        "ufw",
        "iptables -A ufw-user-forward -s {client} -j DROP",
        "iptables -D ufw-user-forward -s {client} -j DROP",
    ),
    "nft": Refusal(
        "nft",
        "nft insert rule inet site forward ip saddr {client} drop",
        "nft flush chain inet site forward; "
        "nft add rule inet site forward ct state established,related accept",
    ),
    "nft reject": Refusal(
        "nft reject",
        "nft insert rule inet site forward ip saddr {client} drop",
        "nft flush chain inet site forward; "
        "nft add rule inet site forward ct state established,related accept; "
        "nft add rule inet site forward reject",
    ),
}


NFT = ("nft", "nft reject")


@pytest.fixture(scope="module")
def lab(dataplane: str) -> Iterator[Lab]:
    with Lab(Wiring(backends=1)) as built:
        built.serve_everywhere(SERVED_PORT)
        yield built


@dataclass
class Host:
    lab: Lab

    def run(self, script: str) -> str:
        """Commands, separated by semicolons; the output of the last one."""
        output = ""
        for command in script.format(client=self.lab.client.ipv4, backend=self.lab.backends[0].ipv4).split(
            "; "
        ):
            output = self.lab.host.run(*command.split()).stdout
        return output

    def set_up(self, firewall: str) -> None:
        if firewall == "ufw":
            self.lab.host.run("iptables-restore", "-n", text=(FIREWALLS / "ufw.ipv4").read_text())
        elif firewall == "nft":
            self.lab.host.run("nft", "-f", "-", text=NFT_CHAIN)
        elif firewall == "nft reject":
            text = NFT_CHAIN.replace("policy drop;", "").replace("related accept", "related accept; reject")
            self.lab.host.run("nft", "-f", "-", text=text)
        elif firewall == "docker":
            text = (FIREWALLS / "docker.ipv4").read_text().replace("docker0", "cluster")
            self.lab.host.run("iptables-restore", "-n", text=text)
        elif firewall:
            self.lab.host.run("iptables", "-P", "FORWARD", "DROP")

    def forward(self) -> list[str]:
        lines = self.lab.host.run("iptables", "-S", "FORWARD").stdout.splitlines()
        return [line.removeprefix("-A FORWARD ") for line in lines if line.startswith("-A")]

    def passes(self, vip: Frontend) -> bool:
        return not self.lab.client.send(*vip, count=2, timeout=0.4).failures


@pytest.fixture
def host(lab: Lab) -> Iterator[Host]:
    lab.host.run("nft", "flush", "ruleset")
    yield Host(lab)
    lab.host.run("nft", "flush", "ruleset")


def settled(daemon: Daemon) -> None:
    """vipd has seen every change of the rules, and is done with it."""
    daemon.vipctl("reload")
    daemon.wait_in_sync()


@pytest.mark.parametrize("form", REFUSALS)
def test_a_refusal_is_effective_whether_it_came_before_vipd_or_after(
    lab: Lab, host: Host, dataplane: str, form: str
) -> None:
    refusal = REFUSALS[form]
    host.set_up(refusal.firewall)
    with Daemon(lab.host, dataplane=dataplane) as daemon:
        services = Services(daemon)
        vip = services.add(lab.backends)
        daemon.wait_until(lambda: host.passes(vip), True)
        host.run(refusal.refuse)
        settled(daemon)
        assert not host.passes(vip)
        warnings = [w for w in daemon.status()["warnings"] if "may refuse" in w]
        # Rules of nft are not interpreted.
        assert ["accept_forwarded: first" in warning for warning in warnings] == [True] * (form not in NFT)
        added = daemon.vipctl("add", "10.96.1.1:80/tcp", f"{lab.backends[0].ipv4}:{SERVED_PORT}")
        assert ("accept_forwarded: first" in added.stderr + added.stdout) is (form not in NFT)
        other = Frontend("10.96.1.1", 80, vip.protocol)
        assert not host.passes(other)
        daemon.stop()
        daemon.start()
        assert not host.passes(vip)
        # A write for vipctl while vipd looks at the refusal is taken for a repair.
        assert daemon.log.count("rules repaired") <= 1
        daemon.stop()
        daemon.cleanup()
        daemon.start()
        assert not host.passes(vip)
        for source, named in ((lab.client.ipv4, form not in NFT), ("198.51.100.77", form == "backend")):
            explained = daemon.vipctl("explain", "--from", source, str(vip)).stdout
            assert ("may refuse flows" in " ".join(explained.split())) is named, source
        host.run(refusal.allow)
        daemon.wait_until(lambda: host.passes(vip), True)
        assert host.passes(other)
        daemon.wait_until(lambda: [w for w in daemon.status()["warnings"] if "may refuse" in w], [])


@pytest.mark.parametrize("form", ["client", "nft"])
def test_first_is_before_every_refusal(lab: Lab, host: Host, dataplane: str, form: str) -> None:
    refusal = REFUSALS[form]
    host.set_up(refusal.firewall)
    host.run(refusal.refuse)
    with Daemon(lab.host, dataplane=dataplane, accept_forwarded="first") as daemon:
        vip = Services(daemon).add(lab.backends)
        assert host.passes(vip)
        host.run(refusal.refuse)
        daemon.wait_until(lambda: host.passes(vip), True)
        assert [w for w in daemon.status()["warnings"] if "may refuse" in w] == []


def test_a_deleted_accept_comes_back_behind_what_was_before_it(lab: Lab, host: Host, dataplane: str) -> None:
    host.set_up("drop")
    host.run("iptables -A FORWARD -s 198.51.100.9 -j DROP")
    with Daemon(lab.host, dataplane=dataplane) as daemon:
        vip = Services(daemon).add(lab.backends)
        host.run("iptables -A FORWARD -s 198.51.100.7 -j DROP")
        settled(daemon)
        before = host.forward()
        assert before[-3:] == ["-s 198.51.100.9/32 -j DROP", JUMP, "-s 198.51.100.7/32 -j DROP"]
        number = before.index(JUMP) + 1
        host.run(f"iptables -D FORWARD {number}")
        daemon.wait_until(host.forward, before)
        assert host.passes(vip)


def test_what_ufw_denies_is_told_where_a_service_lets_it_in(lab: Lab, host: Host, dataplane: str) -> None:
    host.set_up("ufw")
    host.run("iptables -A ufw-user-input -p tcp -m tcp --dport 443 -j DROP")
    with Daemon(lab.host, dataplane=dataplane) as daemon:
        vip = Services(daemon).add(lab.backends)

        def told() -> list[str]:
            return [warning for warning in daemon.status()["warnings"] if "ufw" in warning]

        assert host.passes(vip)
        assert told() == []
        host.run("iptables -A ufw-user-input -s {client} -j DROP")
        daemon.wait_until(lambda: len(told()), 1)
        assert "ufw route deny" in told()[0]
        doctor = " ".join(daemon.vipctl("doctor", check=False).stdout.split())
        assert "ufw denies what services let in" in doctor
