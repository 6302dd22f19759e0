"""No remedy that the doctor prints harms: none kills, flushes, or takes what is somebody else's."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.observe.doctor.facts import KERNEL, NETWORK, PROGRAMS, SAVED, STATUS, WEB, well
from tests.observe.doctor.test_judgement import CASES
from vipd.dataplane.forward_accept.chain_verdicts import NftForward
from vipd.host.settings.settings import Settings
from vipd.model.service import Family, Protocol
from vipd.observe.doctor import checks
from vipd.observe.doctor.diagnosis import CHECKS, diagnose
from vipd.observe.doctor.facts import (
    Announcing,
    Contacts,
    Daemon,
    Facts,
    Feature,
    HostAddress,
    Kernel,
    Link,
    Listener,
    Network,
    Program,
    Route,
    SocketFile,
    StateDir,
)
from vipd.observe.doctor.rules import Ruleset

HARMFUL = re.compile(
    r"\b(?:kill|pkill|killall|systemctl (?:stop|disable|mask|kill)|reboot|shutdown|halt|rm|mv|dd|mkfs|fsck)\b"
    r"|\b(?:flush|destroy|cleanup|purge|autoremove|remove)\b"
    r"|tables(?:-nft|-legacy)?(?: -t \S+)? -[FXZDPR]\b|tables\S*-restore"
    r"|\bnft (?:delete|flush|destroy|reset)\b"
    r"|\bip (?:-\d )?(?:address|addr|route|link|neighbour|rule) (?:del|delete|flush|change|replace)\b"
    r"|\bip link set \S+ down\b|\bremount\b|bridge-nf-call|\bmodprobe -r\b|\brmmod\b"
)
"""What may end traffic, a program, or somebody's data."""
OTHERS = {
    "10.96.0.1": "the default gateway",
    "10.96.0.7": "a neighbour on eth1",
    "10.96.0.0": "the address of the network 10.96.0.0/16",
    "10.96.255.255": "the broadcast address of 10.96.0.0/16",
    "10.96.0.9": "the next hop to 198.18.0.0/15",
}
NEAR = replace(NETWORK, addresses=(HostAddress("10.96.0.2", 16, "eth1"),), foreign_addresses=OTHERS)
BRIDGE = (Link("eth1", kind="bridge"), Link("p1", kind="veth", master="eth1", hairpin=False))
DROPS = "*filter\n:FORWARD DROP [0:0]\nCOMMIT\n"
LEFT = """*nat
:PREROUTING ACCEPT [0:0]
:{0}-SERVICES - [0:0]
:KUBE-SERVICES - [0:0]
-A PREROUTING -m comment --comment "vipd services" -j {0}-SERVICES
-A PREROUTING -d 10.96.0.10/32 -j DNAT --to-destination 10.0.0.1
COMMIT
"""

ANNOUNCING = Announcing(
    2, 86, ("203.0.113.10", "2001:db8::10"), names=("vipd",), importers=frozenset({"bird"})
)
"""All is well with it."""

WORSE: dict[str, Facts] = {
    "addresses of others": well(
        network=NEAR,
        services=tuple(replace(WEB, service=f"s{vip}", addresses=(vip,)) for vip in OTHERS),
    ),
    "an address of a backend": well(
        network=NEAR,
        services=(replace(WEB, addresses=("10.96.0.50",)), replace(WEB, backends=(("10.96.0.50", 1),))),
    ),
    "an address in a network": well(network=NEAR),
    "a port of somebody": well(
        network=replace(
            NETWORK,
            listeners=(
                Listener(Protocol.TCP, "0.0.0.0", 30080, "sshd", 7, "ssh.service"),
                Listener(Protocol.TCP, "::", 30080, "x", 8),
            ),
        )
    ),
    "an address of this host": well(
        network=replace(NETWORK, addresses=(HostAddress("10.96.0.10", 32, "lo"),))
    ),
    "no routes": well(network=replace(NETWORK, routes={"10.96.0.10": Route(), "10.244.0.11": Route()})),
    "a device that is down": well(
        network=Network((Link("eth1", up=False),), (HostAddress("10.244.0.1", 24, "eth1"),))
    ),
    "a backend here": well(
        network=replace(NETWORK, routes={"10.96.0.10": Route("eth1"), "10.244.0.11": Route("lo", local=True)})
    ),
    "no device": well(network=Network(fault="[Errno 2] No such file or directory: 'ip'")),
    "left rules": well(
        rulesets=(
            Ruleset.of(Family.IPV4, "nft", SAVED),
            Ruleset.of(Family.IPV4, "legacy", LEFT.format("VIPD") + DROPS),
            Ruleset.of(Family.IPV6, "nft", LEFT.format("OLD")),
        ),
        tables=frozenset(Family),
    ),
    "blocked": well(
        services=(WEB, replace(WEB, family=Family.IPV6)),
        rulesets=(Ruleset.of(Family.IPV4, "legacy", DROPS), Ruleset.of(Family.IPV6, "nft", DROPS)),
        forward_chains=(NftForward("inet", "filter", "forward", "drop", {}),),
        settings=Settings(accept_forwarded=False),
    ),
    "rules that cannot be read": well(rules_fault="no"),
    "kernel settings": well(
        services=(WEB, replace(WEB, family=Family.IPV6)),
        kernel=Kernel(
            KERNEL
            | {
                "net/ipv4/ip_forward": "0",
                "net/ipv6/conf/all/forwarding": "0",
                "net/ipv6/conf/eth1/accept_ra": "1",
                "net/netfilter/nf_conntrack_tcp_be_liberal": "0",
                "net/netfilter/nf_conntrack_count": "999",
                "net/ipv4/conf/eth1/rp_filter": "1",
                "net/bridge/bridge-nf-call-iptables": "1",
            },
            {"drop": 2, "insert_failed": 3},
            {"drop": 1, "insert_failed": 1},
            conntrack_fault="no netlink",
            affinity_limit=100,
            clock_synchronised=False,
        ),
        network=replace(NETWORK, links=BRIDGE),
    ),
    "bridges": well(services=(replace(WEB, masquerade="hairpin"),), network=replace(NETWORK, links=BRIDGE)),
    "a broken store": well(state=StateDir("/s", store_faults=("line 1",))),
    "a broken store with a copy": well(state=StateDir("/s", store_faults=("line 1",), has_copy=True)),
    "a broken history": well(state=StateDir("/s", history_fault="/s/history.jsonl: cannot be read")),
    "no directory": well(state=StateDir("/s", exists=False)),
    "a read-only directory": well(state=StateDir("/s", read_only=True, mode=0o777, free=0)),
    "a locked directory": well(state=StateDir("/s", writable=False)),
    "a daemon that fares badly": well(
        daemon=Daemon(
            STATUS | {"state": "failed", "version": "0", "quarantined": {"web": "no"}, "warnings": ["x"]},
            prefix_in_use=True,
            vipctl="1",
        ),
        socket=SocketFile("/s", 0o666, "x", "y"),
        refused=("a.yaml:1: bad",),
        settings_faults=("loud: unknown",),
    ),
    "nobody announces": well(announcing=replace(ANNOUNCING, importers=frozenset())),
    "FRR does not import": well(announcing=replace(ANNOUNCING, importers=frozenset({"zebra"}))),
    "a table of others": well(
        announcing=replace(ANNOUNCING, names=("lab",), foreign=("10.0.0.0/8",), looked_up=True)
    ),
    "the last host": well(announcing=replace(ANNOUNCING, kept=("203.0.113.10",))),
    "dead backends": well(
        services=(
            replace(WEB, backends=(*WEB.backends, ("10.244.0.12", 8080)), new_flows=frozenset(WEB.backends)),
        ),
        contacts=Contacts(
            {(Protocol.TCP, "10.244.0.11", 8080): "connection refused"},
            3,
            unresolved={"10.244.0.12": "FAILED"},
        ),
    ),
    "no daemon": well(daemon=Daemon(fault="no such file")),
    "no daemon, no rules": well(daemon=Daemon(fault="no such file"), rulesets=()),
    "no programs": well(
        programs=replace(
            PROGRAMS,
            nft="",
            iptables=(Program(Family.IPV4, "", fault="gone", fix="apt install iptables"),),
            missing_features=tuple(
                Feature(Family.IPV4, name, False) for name in ("affinity", "ping", "new_thing")
            ),
        )
    ),
}
EVERY = {**{name: facts for name, (facts, _) in CASES.items()}, **WORSE}


@pytest.mark.parametrize("facts", EVERY.values(), ids=EVERY)
def test_no_command_harms(facts: Facts) -> None:
    commands = [command for finding in diagnose(facts).findings for command in finding.result.fix]
    assert [command for command in commands if HARMFUL.search(command)] == []


@pytest.mark.parametrize("name", ["addresses of others", "an address of a backend"])
def test_no_command_takes_another_hosts_address(name: str) -> None:
    findings = diagnose(WORSE[name]).findings
    (foreign,) = [finding for finding in findings if finding.id == "vip-foreign"]
    assert str(foreign.severity) == "problem"
    assert "give the service another address" in foreign.result.hint
    taken = set(OTHERS) if name == "addresses of others" else {"10.96.0.50"}
    for finding in findings:
        words = {word for c in finding.result.fix for word in re.split(r"[\s/]", c)}
        assert not taken & words, finding


def test_who_holds_a_port_is_named_and_left_alone() -> None:
    taken = [f.result for f in diagnose(WORSE["a port of somebody"]).findings if f.id == "node-port-taken"]
    assert [judgement.fix for judgement in taken] == [(), ()]
    assert "sshd (pid 7)" in taken[0].cause
    assert "another node port, or stop ssh.service if nobody needs it" in taken[0].hint
    assert taken[1].hint.endswith("another node port")


def test_forwarding_of_ipv6_keeps_router_advertisements() -> None:
    (forward,) = [
        f.result
        for f in diagnose(WORSE["kernel settings"]).findings
        if f.id == "ip-forward" and "ipv6" in f.result.title.lower()
    ]
    assert forward.fix == (
        "sysctl -w net/ipv6/conf/eth1/accept_ra=2",
        "sysctl -w net/ipv6/conf/all/forwarding=1",
    )


def test_every_check_that_can_mend_was_asked() -> None:
    """A remedy that no case brings about would be judged by nobody."""
    findings = [finding for facts in EVERY.values() for finding in diagnose(facts).findings]
    mended = {finding.id for finding in findings if finding.result.fix}
    spoken = {finding.id for finding in findings if str(finding.severity) in ("problem", "warning")}
    assert {"settings", "daemon-running", "store", "vip-in-subnet", "vip-route", "rules-twice"} <= mended
    assert {"ip-forward", "ipv6-disabled"} <= mended
    assert {check.id for check in CHECKS} - spoken == {
        "kernel",
        "firewalls",
        "nft",
        "rules-readable",
        "network-readable",
    }


def test_the_checks_know_no_such_command() -> None:
    for path in Path(checks.__file__).parent.glob("*.py"):
        assert not re.search(
            r"[\"'](?:kill|pkill|rm|mv) | -[FXD] |neighbour add proxy \{(?!vip\})", path.read_text()
        )


@pytest.mark.parametrize(
    ("announcing", "expected"),
    [
        (ANNOUNCING, []),
        (replace(ANNOUNCING, addresses=(), importers=frozenset()), []),
        (replace(ANNOUNCING, importers=None), []),
        (replace(ANNOUNCING, importers=frozenset()), ["nobody announces the addresses"]),
        (replace(ANNOUNCING, importers=frozenset({"zebra"})), ["FRR does not import vipd's table"]),
        (replace(ANNOUNCING, importers=frozenset({"zebra"}), in_main=frozenset({"203.0.113.10"})), []),
        (replace(ANNOUNCING, names=("lab", "vipd")), ["vipd's routing table has another name"]),
        (replace(ANNOUNCING, foreign=("default",)), ["others have routes in vipd's routing table"]),
        (replace(ANNOUNCING, looked_up=True), ["packets are looked up in vipd's routing table"]),
        (replace(ANNOUNCING, kept=("203.0.113.10",)), ["203.0.113.10 is announced without a backend"]),
    ],
)
def test_what_is_found_about_announced_addresses(announcing: Announcing, expected: list[str]) -> None:
    findings = diagnose(well(announcing=announcing)).findings
    found = [f.result.title for f in findings if f.id.startswith("announce") and f.severity < 2]
    assert found == expected
