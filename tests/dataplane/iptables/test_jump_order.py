"""Where vipd's accept stands among the rules of others in FORWARD: at the first write, and after changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.dataplane.declared import numbered
from tests.dataplane.iptables.fake_kernel import FakeKernel
from tests.lab.inside import synced

FIREWALLS = Path(__file__).parents[2] / "packets/firewalls"
SERVICES = [numbered(1, "10.244.0.1")]
ACCEPT = "vipd"
"""Stands for vipd's jump in lists of rules."""
BANNED = "-s 10.0.0.9/32 -j DROP"
ANSWERS = "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
NEW_ONES = "-m conntrack --ctstate NEW -j REJECT"
INVALID = "-m conntrack --ctstate INVALID -j DROP"
ALL = "-j REJECT"


class Host:
    """A kernel with rules of others, and vipd."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.kernel = FakeKernel()
        self.vipd = synced("iptables", self.kernel.run, directory, **settings)

    def has(self, *lines: str) -> None:
        """Another program runs these lines of a restore."""
        self.kernel.restore("\n".join(("*filter", *lines, "COMMIT", "")))

    def step(self) -> None:
        """vipd hears that something has changed."""
        self.vipd.doubt()
        self.vipd.step()
        assert self.vipd.drift() == ""

    def forward(self, chain: str = "FORWARD", accept: str = "VIPD-FORWARD") -> list[str]:
        """The chain's rules, without vipd's jumps to refusals."""
        rules = self.kernel.chains("filter")[chain]
        named = [ACCEPT if rule.endswith(accept) else rule for rule in rules]
        return [rule for rule in named if "VIPD-" not in rule]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize(
    ("chains", "expected"),
    [
        ({}, [ACCEPT]),
        ({}, [ACCEPT, ANSWERS, ALL]),
        ({}, [BANNED, ACCEPT]),
        ({}, [ACCEPT, ANSWERS, "-i lo -j ACCEPT", "-p tcp -j REJECT", ALL]),
        ({}, ["-p udp -j DROP", ACCEPT]),
        ({}, ["-p udp -j DROP", BANNED, ACCEPT, NEW_ONES]),
        ({}, [ANSWERS, INVALID, BANNED, "-i eth1 -o eth2 -j ACCEPT", "-i eth3 -j DROP", ACCEPT, ALL]),
        ({}, ["-m set --match-set bad src -j DROP", ACCEPT, ALL, BANNED]),
        ({}, ["-s 10.0.0.9/32 -j RETURN", ACCEPT]),
        ({}, ["-j NFQUEUE --queue-num 1", ACCEPT]),
        ({}, ["-m comment --comment \"-j ACCEPT of x\" -s 10.0.0.9/32 -j DROP", ACCEPT]),
        ({}, [ACCEPT, '-m comment --comment "the rest" -j DROP']),
        ({"f2b": []}, ["-p tcp -j f2b", ACCEPT]),
        ({"f2b": ["-j RETURN"]}, ["-j f2b", ACCEPT]),
        ({"f2b": ["-s 10.0.0.9/32 -j REJECT", "-j RETURN"]}, ["-j f2b", ACCEPT, ALL]),
        ({"notes": ["-j LOG"], "end": ["-j notes", "-j DROP"]}, [ACCEPT, "-j notes", "-j end"]),
        ({"end": ["-s 10.0.0.0/8 -j RETURN", "-j DROP"]}, ["-j end", ACCEPT]),
        ({"end": ["-j DROP"]}, ["-s 10.0.0.9/32 -j end", ACCEPT]),
        ({"site": ["-j inner"], "inner": [BANNED]}, ["-j site", ACCEPT]),
        (
            {"DOCKER-USER": ["-j RETURN"], "DOCKER-FORWARD": [ALL]},
            ["-j DOCKER-USER", ACCEPT, "-j DOCKER-FORWARD"],
        ),
        ({"LIBVIRT_FWI": ["-o virbr0 -j REJECT"]}, [ACCEPT, "-j LIBVIRT_FWI"]),
        ({"DOCKER-FORWARD": []}, ["-j DOCKER-FORWARD", BANNED, ACCEPT]),
    ],
)  # fmt: skip
def test_first_write(host: Host, chains: dict[str, list[str]], expected: list[str]) -> None:
    host.has(*(f":{name} - [0:0]" for name in chains))
    host.has(*(f"-A {name} {rule}" for name, rules in chains.items() for rule in rules))
    host.has(*(f"-A FORWARD {rule}" for rule in expected if rule != ACCEPT))
    host.vipd.become(*SERVICES)
    assert host.forward() == expected
    host.vipd.restart()
    host.vipd.become(*SERVICES)
    assert host.forward() == expected


@pytest.mark.parametrize("end", ["", "-A ufw-reject-forward -j REJECT"])
def test_beside_ufw_it_is_behind_what_its_administrator_says(host: Host, end: str) -> None:
    host.kernel.restore((FIREWALLS / "ufw.ipv4").read_text().replace("COMMIT", f"{end}\nCOMMIT"))
    host.vipd.become(*SERVICES)
    names = [rule.removeprefix("-j ufw-") for rule in host.forward()]
    before, after = names[: names.index(ACCEPT)], names[names.index(ACCEPT) + 1 :]
    assert before == ["before-logging-forward", "before-forward", "after-forward"]
    assert after == ["after-logging-forward", "reject-forward", "track-forward"]


def test_health_ports_are_open_behind_what_an_administrator_refuses(host: Host) -> None:
    host.has(":INPUT DROP [0:0]", f"-A INPUT {ANSWERS}", f"-A INPUT {BANNED}", "-A INPUT -j REJECT")
    host.vipd.become(*SERVICES)
    assert host.forward("INPUT", "VIPD-NODEPORTS") == [ANSWERS, BANNED, ACCEPT, ALL]


@pytest.mark.parametrize(
    ("before", "change", "after"),
    [
        # What an administrator inserts stays where he put it.
        ([], [f"-I FORWARD 1 {BANNED}"], [BANNED, ACCEPT]),
        ([], ["-I FORWARD 1 -j DROP"], ["-j DROP", ACCEPT]),
        ([ALL], [f"-I FORWARD 1 {BANNED}"], [BANNED, ACCEPT, ALL]),
        ([], [f"-A FORWARD {BANNED}"], [ACCEPT, BANNED]),
        # What is deleted is put back where it was.
        ([BANNED, ALL], ["-D FORWARD {jump}"], [BANNED, ACCEPT, ALL]),
        ([BANNED, ALL], ["-D FORWARD {jump}", "-I FORWARD 1 -s 10.0.0.8/32 -j DROP"],
         ["-s 10.0.0.8/32 -j DROP", BANNED, ACCEPT, ALL]),
        ([BANNED, ALL], ["-D FORWARD {jump}", "-I FORWARD 6 -s 10.0.0.8/32 -j DROP"],
         [BANNED, "-s 10.0.0.8/32 -j DROP", ACCEPT, ALL]),
        ([BANNED], ["-F FORWARD", f"-A FORWARD {ANSWERS}", f"-A FORWARD {BANNED}"],
         [ANSWERS, BANNED, ACCEPT]),
        ([BANNED], ["-F FORWARD"], [ACCEPT]),
        ([BANNED], ["-F FORWARD", "-A FORWARD -s 10.0.0.7/32 -j DROP", f"-A FORWARD {ALL}"],
         ["-s 10.0.0.7/32 -j DROP", ACCEPT, ALL]),
        # One of several copies stays.
        ([BANNED, ALL], ["-A FORWARD {jump}"], [BANNED, ACCEPT, ALL]),
        # What vipd's accept was behind is before it again, also when it was written anew behind it.
        ([BANNED], [f"-D FORWARD {BANNED}", f"-A FORWARD {BANNED}"], [BANNED, ACCEPT]),
        # Docker's own chains are no administrator's.
        ([], [":DOCKER-USER - [0:0]", ":DOCKER-FORWARD - [0:0]", "-I FORWARD 1 -j DOCKER-FORWARD",
              "-I FORWARD 1 -j DOCKER-USER"], ["-j DOCKER-USER", ACCEPT, "-j DOCKER-FORWARD"]),
    ],
)  # fmt: skip
def test_after_a_change(host: Host, before: list[str], change: list[str], after: list[str]) -> None:
    host.has(*(f"-A FORWARD {rule}" for rule in before))
    host.vipd.become(*SERVICES)
    jump = next(rule for rule in host.kernel.chains("filter")["FORWARD"] if rule.endswith("VIPD-FORWARD"))
    host.has(*(re.sub(r"\{jump\}", lambda _: jump, line) for line in change))
    host.step()
    assert host.forward() == after


def test_a_script_that_flushes_and_adds_again_has_its_order(host: Host) -> None:
    """vipd puts its accept back between two commands of the script."""
    host.has(f"-A FORWARD {BANNED}")
    host.vipd.become(*SERVICES)
    host.has("-F FORWARD")
    host.step()
    assert host.forward() == [ACCEPT]
    host.has(f"-A FORWARD {BANNED}")
    host.step()
    assert host.forward() == [BANNED, ACCEPT]


def test_accept_forwarded_first_keeps_it_at_the_head(tmp_path: Path) -> None:
    host = Host(tmp_path, accept_forwarded="first")
    host.has(f"-A FORWARD {BANNED}")
    host.vipd.become(*SERVICES)
    assert host.forward() == [ACCEPT, BANNED]
    host.has("-I FORWARD 1 -s 10.0.0.8/32 -j DROP")
    host.step()
    assert host.forward() == [ACCEPT, "-s 10.0.0.8/32 -j DROP", BANNED]
