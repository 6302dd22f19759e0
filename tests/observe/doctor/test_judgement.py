"""What each check makes of facts, first of all of those that a test cannot bring about in a real host."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.observe.doctor.facts import KERNEL, NETWORK, PROGRAMS, SAVED, STATUS, WEB, judged, well
from vipd import __version__
from vipd.dataplane.forward_accept.chain_verdicts import ForwardVerdict, NftForward
from vipd.host.settings.settings import Settings, load_settings
from vipd.model.service import Family, Protocol
from vipd.observe import doctor
from vipd.observe.doctor.diagnosis import CHECKS, diagnose
from vipd.observe.doctor.facts import (
    Daemon,
    Facts,
    Feature,
    HostAddress,
    Kernel,
    Link,
    Listener,
    PolicyRule,
    Program,
    Route,
    SocketFile,
    StateDir,
)
from vipd.observe.doctor.rules import Ruleset

DOCTOR = Path(doctor.__file__).parent
ALLOWED = {
    "__future__",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "ipaddress",
    "itertools",
    "re",
    "textwrap",
    "typing",
    "vipd.dataplane.fast_path.table",
    "vipd.dataplane.forward_accept.chain_verdicts",
    "vipd.dataplane.refusals",
    "vipd.model.formatting",
    "vipd.model.limits",
    "vipd.model.service",
    "vipd.model.text",
    # Pure as well; tests of their own say so.
    "vipd.dataplane.accept_order",
    "vipd.dataplane.iptables.foreign_rules",
    "vipd.dataplane.iptables.names",
    "vipd.dataplane.iptables.saved_rules",
    "vipd.dataplane.iptables.words",
    "vipd.observe.simulator.errors",
    "vipd.observe.simulator.iptables.matches",
    "vipd.observe.simulator.iptables.rules",
}


def kernel(counters: dict[str, int] | None = None, limit: int = 4095, **settings: int) -> Kernel:
    """`counters`: what was counted since the start, all of it while the doctor looked."""
    changed = {name.replace("__", "/"): str(value) for name, value in settings.items()}
    return Kernel(KERNEL | changed, counters or {}, counters or {}, 1.0, affinity_limit=limit)


def status(**different: Any) -> Daemon:
    return Daemon(STATUS | different, prefix_in_use=True, vipctl=__version__)


def names(*faults: tuple[str, bool]) -> dict[str, object]:
    """The names of a status: why each fails, and whether it has an earlier answer."""
    told = [{"name": f"dns:n{n}.internal", "fault": why, "serves": ok} for n, (why, ok) in enumerate(faults)]
    return {"names": 5, "failing": len(told), "held": 0, "lookups": {}, "faults": told}


WEB6 = replace(
    WEB, family=Family.IPV6, node_port=None, addresses=("fd00:96::10",), backends=(("fd00:244::11", 8080),)
)
NETWORK6 = replace(NETWORK, routes={**NETWORK.routes, "fd00:96::10": Route(), "fd00:244::11": Route()})
KERNEL6 = kernel(net__ipv6__conf__all__disable_ipv6=1, net__ipv6__conf__all__forwarding=1)


FACING = HostAddress("192.0.2.1", 24, "eth0"), HostAddress("10.244.0.1", 24, "eth1")
ROUTED = Link("lo", mtu=65536), Link("eth0", mtu=1500), Link("eth1", mtu=1400)


def policy(device: str) -> PolicyRule:
    """A rule that sends some packets for the backend to a device."""
    return PolicyRule("from 192.0.2.0/24 lookup 100", 100, {"10.244.0.11": Route(device)})


JUMP = '-A FORWARD -m comment --comment "vipd translated flows" -j VIPD-FORWARD'


def ruleset_with(forward: str, chains: str = "") -> Ruleset:
    """vipd's rules beside these in FORWARD, and other chains of the table filter."""
    return Ruleset.of(Family.IPV4, "nft", SAVED.replace(JUMP, f"{chains}{forward}"))


CASES: dict[str, tuple[Facts, dict[str, str]]] = {
    "all is well": (well(), {}),
    "name servers that are silent, while earlier answers serve": (
        well(daemon=status(names=names(("no answer within 5 s from 10.0.0.53", True)))),
        {"name-servers": "warning"},
    ),
    "a name without any answer": (
        well(
            daemon=status(names=names(("10.0.0.53 cannot be reached: No route", False), ("NXDOMAIN", True)))
        ),
        {"name-servers": "problem", "names": "warning"},
    ),
    "a name that does not exist": (
        well(daemon=status(names=names(("the name does not exist (NXDOMAIN)", False)))),
        {"names": "problem"},
    ),
    "a table that is 80% full": (
        well(kernel=kernel(net__netfilter__nf_conntrack_count=800)),
        {"conntrack-room": "warning"},
    ),
    "a table that is 79% full": (well(kernel=kernel(net__netfilter__nf_conntrack_count=799)), {}),
    "a table that is 95% full": (
        well(kernel=kernel(net__netfilter__nf_conntrack_count=950)),
        {"conntrack-room": "problem"},
    ),
    "dropped packets": (well(kernel=kernel({"drop": 1})), {"conntrack-drops": "warning"}),
    "early drops": (well(kernel=kernel({"early_drop": 3})), {"conntrack-drops": "warning"}),
    "drops and lost races of last year": (
        well(kernel=replace(kernel({"drop": 5, "early_drop": 9, "insert_failed": 2}), conntrack_new={})),
        {},
    ),
    "counters that cannot be read": (
        well(kernel=replace(kernel(), counters_fault="no counters")),
        {"conntrack-drops": "unchecked", "conntrack-races": "unchecked"},
    ),
    "lost races": (well(kernel=kernel({"insert_failed": 2})), {"conntrack-races": "warning"}),
    "a kernel that cannot list flows": (
        well(kernel=Kernel(KERNEL, conntrack_fault="cannot read: Invalid argument", affinity_limit=4095)),
        {"conntrack-netlink": "problem"},
    ),
    "short affinity lists": (well(kernel=kernel(limit=100)), {"affinity-limit": "warning"}),
    "short lists that nobody uses": (
        well(kernel=kernel(limit=100), services=(replace(WEB, affinity=False),)),
        {},
    ),
    "no clock": (
        well(kernel=Kernel(KERNEL, affinity_limit=4095, clock_synchronised=False)),
        {"clock": "warning"},
    ),
    "an older daemon": (well(daemon=status(version="0.0.1")), {"daemon-version": "warning"}),
    "a daemon that failed": (well(daemon=status(state="failed")), {"daemon-state": "problem"}),
    "a daemon that takes long": (well(daemon=status(state="pending")), {"daemon-state": "warning"}),
    "a warning of the daemon": (
        well(daemon=status(warnings=["health port 1 is taken"])),
        {"daemon-warnings": "warning"},
    ),
    "a warning that a check tells better": (
        well(daemon=status(warnings=["affinity of web: each backend's list remembers 100 clients"])),
        {},
    ),
    "a daemon that does not let us in": (
        well(daemon=Daemon(fault="permission denied", prefix_in_use=True)),
        {"daemon-running": "warning"}
        | dict.fromkeys(
            ("daemon-state", "daemon-warnings", "daemon-version", "quarantined", "name-servers", "names"),
            "unchecked",
        ),
    ),
    "settings that cannot be used": (well(settings_faults=("loud: unknown",)), {"settings": "problem"}),
    "no state directory": (well(state=StateDir("/x", exists=False)), {"state-dir": "problem"}),
    "a read-only state directory": (well(state=StateDir("/x", read_only=True)), {"state-dir": "problem"}),
    "a locked state directory": (well(state=StateDir("/x", writable=False)), {"state-dir": "problem"}),
    "a disk that is nearly full": (well(state=StateDir("/x", free=2 << 20)), {"state-dir-space": "warning"}),
    "a full disk": (well(state=StateDir("/x", free=4096)), {"state-dir-space": "problem"}),
    "no inodes": (well(state=StateDir("/x", free_inodes=0)), {"state-dir-space": "problem"}),
    "no iptables": (
        well(
            programs=replace(
                PROGRAMS, iptables=(Program(Family.IPV4, "", fault="no such program", fix="apt"),)
            )
        ),
        {"iptables": "problem"},
    ),
    "no ip6tables, and no need of it": (
        well(programs=replace(PROGRAMS, iptables=(PROGRAMS.iptables[0], Program(Family.IPV6, "")))),
        {},
    ),
    "no nft": (
        well(programs=replace(PROGRAMS, nft=""), nft_fault="nft is needed to list them"),
        dict.fromkeys(
            ("nft", "forward-chains", "foreign-refusals", "flow-offload", "rules-twice", "firewalls"),
            "unchecked",
        ),
    ),
    "no xt_recent, with affinity": (
        well(programs=replace(PROGRAMS, missing_features=(Feature(Family.IPV4, "affinity", False),))),
        {"kernel-features": "problem"},
    ),
    "no xt_REDIRECT": (
        well(programs=replace(PROGRAMS, missing_features=(Feature(Family.IPV4, "ping", False),))),
        {"kernel-features": "warning"},
    ),
    "no feature that this check has heard of": (
        well(programs=replace(PROGRAMS, missing_features=(Feature(Family.IPV4, "new_thing", False),))),
        {"kernel-features": "warning"},
    ),
    "no namespaces to try rules in": (
        well(programs=replace(PROGRAMS, probe_fault="Operation not permitted")),
        {"kernel-features": "unchecked"},
    ),
    "rules that could not be read": (
        well(rulesets=(), rules_fault="iptables-save failed"),
        dict.fromkeys(
            (
                "rules-readable",
                "mixed-variants",
                "rules-twice",
                "forward-policy",
                "foreign-refusals",
                "ufw",
                "firewalls",
                "kube-proxy",
                "other-vipd",
                "foreign-claims",
                "tcp-be-liberal",
                "vip-route",
            ),
            "unchecked",
        ),
    ),
    "no program ip": (
        well(network=replace(NETWORK, links=(), addresses=(), routes={}, fault="no ip")),
        dict.fromkeys(
            (
                "network-readable",
                "vip-owned",
                "vip-foreign",
                "vip-in-subnet",
                "vip-route",
                "node-port-taken",
                "backend-route",
                "local-backend",
                "backend-mtu",
                "backend-policy-route",
                "neighbour-table",
                "rp-filter",
                "bridge-hairpin",
                "bridge-replies",
            ),
            "unchecked",
        ),
    ),
    "accept_forwarded off, policy DROP": (
        well(
            settings=Settings(accept_forwarded=False),
            rulesets=(Ruleset.of(Family.IPV4, "nft", SAVED.replace("-j ACCEPT", "-j RETURN")),),
        ),
        {"forward-policy": "problem"},
    ),
    **{
        f"policy DROP in the table {table}": (
            well(
                rulesets=(Ruleset.of(Family.IPV4, "nft", f"{SAVED}*{table}\n:FORWARD DROP [0:0]\nCOMMIT\n"),)
            ),
            {"forward-policy": "problem"},
        )
        for table in ("mangle", "security")
    },
    "a client refused before vipd's accept": (
        well(rulesets=(ruleset_with(f"-A FORWARD -s 10.10.0.9/32 -j DROP\n{JUMP}"),)),
        {"foreign-refusals": "warning"},
    ),
    "a client refused behind vipd's accept": (
        well(rulesets=(ruleset_with(f"{JUMP}\n-A FORWARD -s 10.10.0.9/32 -j DROP"),)),
        {"foreign-refusals": "warning"},
    ),
    "a backend of nobody's, packets of no flow, and another port refused": (
        well(
            rulesets=(
                ruleset_with(
                    "-A FORWARD -d 10.244.0.99/32 -j DROP\n-A FORWARD -p tcp -m tcp --dport 443 -j DROP\n"
                    f"-A FORWARD -m conntrack --ctstate INVALID -j DROP\n{JUMP}\n-A FORWARD -j REJECT"
                ),
            )
        ),
        {},
    ),
    "a port denied by ufw": (
        well(
            rulesets=(
                ruleset_with(JUMP, ":ufw-user-input - [0:0]\n-A ufw-user-input -p tcp --dport 80 -j DROP\n"),
            )
        ),
        {"ufw": "warning"},
    ),
    "ufw beside services": (
        well(rulesets=(ruleset_with(JUMP, ":ufw-user-input - [0:0]\n"),)),
        {},
    ),
    "a client refused by an nft chain": (
        well(
            forward_chains=(
                NftForward(
                    "inet",
                    "site",
                    "forward",
                    "accept",
                    {
                        "forward": (
                            [
                                {
                                    "match": {
                                        "op": "==",
                                        "left": {"payload": {"protocol": "ip", "field": "saddr"}},
                                        "right": "10.10.0.9",
                                    }
                                },
                                {"drop": None},
                            ],
                        )
                    },
                ),
            )
        ),
        {"foreign-refusals": "warning"},
    ),
    "no rules yet, policy DROP": (
        well(rulesets=(Ruleset.of(Family.IPV4, "nft", "*filter\n:FORWARD DROP [0:0]\nCOMMIT\n"),)),
        {},
    ),
    "no route to a backend": (
        well(network=replace(NETWORK, routes={"10.96.0.10": Route("eth1"), "10.244.0.11": Route()})),
        {"backend-route": "problem"},
    ),
    "no route to a virtual IP": (
        well(network=replace(NETWORK, routes={"10.96.0.10": Route(), "10.244.0.11": Route("eth1")})),
        {"vip-route": "problem"},
    ),
    "a virtual IP that may be the host's": (
        well(
            settings=Settings(compat="kube-proxy"),
            network=replace(NETWORK, addresses=(HostAddress("10.96.0.10", 32, "lo"),)),
        ),
        {},
    ),
    "a listener on another address": (
        well(network=replace(NETWORK, listeners=(Listener(Protocol.TCP, "127.0.0.1", 30081),))),
        {},
    ),
    "a listener of another protocol": (
        well(network=replace(NETWORK, listeners=(Listener(Protocol.UDP, "0.0.0.0", 30080),))),
        {},
    ),
    "a unit on a node port": (
        well(network=replace(NETWORK, listeners=(Listener(Protocol.TCP, "::", 30080, "x", 7, "x.service"),))),
        {"node-port-taken": "warning"},
    ),
    "rp_filter for all devices": (
        well(
            kernel=kernel(net__ipv4__conf__all__rp_filter=1, net__ipv4__conf__eth1__rp_filter=0),
        ),
        {"rp-filter": "warning"},
    ),
    "a loose rp_filter under a strict one for all": (
        well(kernel=kernel(net__ipv4__conf__all__rp_filter=1)),
        {},
    ),
    "no forwarding before the first start": (
        well(
            daemon=Daemon(fault="no such file"),
            rulesets=(),
            kernel=kernel(net__ipv4__ip_forward=0),
        ),
        {"daemon-running": "problem"},
    ),
    "no forwarding, and vipd is not to set it": (
        well(settings=Settings(manage_sysctls=False), kernel=kernel(net__ipv4__ip_forward=0)),
        {"ip-forward": "problem"},
    ),
    "no IPv6 at all": (
        well(services=(WEB, WEB6), kernel=KERNEL6, network=NETWORK6),
        {"ipv6-disabled": "problem"},
    ),
    "IPv6 on one device alone": (
        well(
            services=(WEB, WEB6),
            network=NETWORK6,
            kernel=replace(KERNEL6, settings={**KERNEL6.settings, "net/ipv6/conf/eth1/disable_ipv6": "0"}),
        ),
        {"backend-route": "problem"},
    ),
    "a socket for all": (
        well(socket=SocketFile("/s", 0o666, "vipd", "vipd")),
        {"socket-permissions": "warning"},
    ),
    "a socket of root, and no group": (well(socket=SocketFile("/s", 0o660, "root", "")), {}),
    "a kube-proxy at work": (
        well(
            rulesets=(
                *well().rulesets,
                Ruleset.of(Family.IPV6, "nft", "*mangle\n:KUBE-PROXY-CANARY - [0:0]\nCOMMIT\n"),
            ),
            programs_running=frozenset({"kube-proxy"}),
        ),
        {"kube-proxy": "warning"},
    ),
    "a kube-proxy under our prefix": (
        well(
            settings=Settings(chain_prefix="KUBE"),
            rulesets=(
                Ruleset.of(
                    Family.IPV4,
                    "nft",
                    "*mangle\n:KUBE-PROXY-CANARY - [0:0]\nCOMMIT\n" + SAVED.replace("VIPD", "KUBE"),
                ),
            ),
        ),
        {"kube-proxy": "problem"},
    ),
    "our own rules under the prefix KUBE": (
        well(
            settings=Settings(chain_prefix="KUBE"),
            rulesets=(Ruleset.of(Family.IPV4, "nft", SAVED.replace("VIPD", "KUBE")),),
        ),
        {},
    ),
    "a virtual IP in the network of a device": (
        well(network=replace(NETWORK, addresses=(HostAddress("10.96.0.1", 16, "eth1"),))),
        {"vip-in-subnet": "warning"},
    ),
    "a virtual IP that a device has": (
        well(network=replace(NETWORK, addresses=(HostAddress("10.96.0.10", 16, "eth1"),))),
        {"vip-owned": "problem"},
    ),
    "a virtual IP in a tunnel's network": (
        well(
            network=replace(
                NETWORK,
                links=(Link("eth1", uses_neighbour_discovery=False),),
                addresses=(HostAddress("10.96.0.1", 16, "eth1"), HostAddress("10.96.0.2", 32, "eth0")),
            )
        ),
        {},
    ),
    "a table of the other dataplane": (well(tables=frozenset({Family.IPV4})), {"rules-twice": "problem"}),
    "chains of the other dataplane": (
        well(dataplane="nftables", tables=frozenset({Family.IPV4})),
        {"rules-twice": "problem"},
    ),
    "the dataplane nftables beside a FORWARD policy DROP": (
        well(
            dataplane="nftables",
            tables=frozenset({Family.IPV4}),
            rulesets=(Ruleset.of(Family.IPV4, "nft", "*filter\n:FORWARD DROP [0:0]\nCOMMIT\n"),),
        ),
        {"forward-policy": "problem"},
    ),
    "the dataplane nftables, all well, lists and iptables being no matter": (
        well(
            dataplane="nftables",
            tables=frozenset({Family.IPV4}),
            rulesets=(),
            kernel=kernel(limit=100),
            programs=replace(PROGRAMS, iptables=(Program(Family.IPV4, "", fault="none"),)),
        ),
        {},
    ),
    "a smaller MTU on the way to a backend": (
        well(network=replace(NETWORK, links=ROUTED, addresses=FACING)),
        {"backend-mtu": "warning"},
    ),
    "a route with a smaller MTU": (
        well(
            network=replace(
                NETWORK,
                links=(Link("eth0", mtu=1500), Link("eth1", mtu=1500)),
                addresses=FACING,
                routes={**NETWORK.routes, "10.244.0.11": Route("eth1", mtu=1400)},
            )
        ),
        {"backend-mtu": "warning"},
    ),
    "larger packets towards backends than from clients": (
        well(
            network=replace(
                NETWORK, links=(Link("eth0", mtu=1500), Link("eth1", mtu=9000)), addresses=(FACING[0],)
            )
        ),
        {},
    ),
    "a bridge of containers beside the way": (
        well(
            network=replace(
                NETWORK,
                links=(Link("docker0", kind="bridge", mtu=1500), Link("eth1", mtu=1450)),
                addresses=(HostAddress("172.17.0.1", 16, "docker0"), FACING[1]),
            )
        ),
        {},
    ),
    "a port with a smaller MTU than its bridge": (
        well(
            network=replace(
                NETWORK,
                links=(Link("eth1", kind="bridge", mtu=1500), Link("p1", master="eth1", mtu=1400)),
            )
        ),
        {"backend-mtu": "problem"},
    ),
    "a rule for some packets": (
        well(network=replace(NETWORK, policy_rules=(policy("eth7"),))),
        {"backend-policy-route": "warning"},
    ),
    "a rule that refuses some packets": (
        well(network=replace(NETWORK, policy_rules=(policy(""),))),
        {"backend-policy-route": "warning"},
    ),
    "a rule that changes nothing": (well(network=replace(NETWORK, policy_rules=(policy("eth1"),))), {}),
    "a table of neighbours that is nearly full": (
        well(kernel=replace(kernel(net__ipv4__neigh__default__gc_thresh3=1024), neighbours=820)),
        {"neighbour-table": "warning"},
    ),
    "a table of neighbours with room": (
        well(kernel=replace(kernel(net__ipv4__neigh__default__gc_thresh3=1024), neighbours=818)),
        {},
    ),
    "a table of neighbours that was full": (
        well(
            kernel=replace(
                kernel(net__ipv4__neigh__default__gc_thresh3=1024), neighbours=3, neighbours_refused=1
            )
        ),
        {"neighbour-table": "problem"},
    ),
    "more backends in a connected network than neighbours": (
        well(
            services=(replace(WEB, backends=tuple((f"10.244.0.{n}", 80) for n in range(2, 12))),),
            kernel=kernel(net__ipv4__neigh__default__gc_thresh3=12),
            network=replace(
                NETWORK, routes={**NETWORK.routes, **{f"10.244.0.{n}": Route("eth1") for n in range(12)}}
            ),
        ),
        {"neighbour-table": "warning"},
    ),
    "few source ports left": (
        well(kernel=replace(kernel(), snat={(Protocol.TCP, "10.244.0.1", "10.244.0.11:8080"): 52_000})),
        {"snat-ports": "warning"},
    ),
    "no source ports left": (
        well(kernel=replace(kernel(), snat={(Protocol.TCP, "10.244.0.1", "10.244.0.11:8080"): 64_000})),
        {"snat-ports": "problem"},
    ),
    "many source ports, of several backends": (
        well(
            kernel=replace(
                kernel(),
                snat={(Protocol.TCP, "10.244.0.1", f"10.244.0.{n}:8080"): 50_000 for n in range(9)},
            )
        ),
        {},
    ),
    "a flow table that cannot be listed": (
        well(kernel=replace(kernel(), snat=None)),
        {"snat-ports": "unchecked"},
    ),
    "IPVS for a virtual IP": (
        well(kernel=replace(kernel(), ipvs=frozenset({"10.96.0.10:80/tcp", "10.96.0.9:80/tcp"}))),
        {"ipvs": "warning"},
    ),
    "IPVS for other addresses": (
        well(kernel=replace(kernel(), ipvs=frozenset({"10.96.0.10:80/udp", "FWM 7"}))),
        {},
    ),
    "flows in a flowtable": (well(flowtables=("inet filter f",)), {"flow-offload": "warning"}),
    "vipd's own flowtable": (well(flowtables=("inet vipd-fast-path flows",)), {}),
    "a fast path that this host cannot have": (
        well(daemon=status(fast_path={"active": False, "reason": "no module", "devices": []})),
        {"fast-path": "warning"},
    ),
    "a bridge without hairpin": (
        well(
            kernel=Kernel(KERNEL | {"net/bridge/bridge-nf-call-iptables": "1"}, affinity_limit=4095),
            network=replace(
                NETWORK,
                links=(
                    Link("eth1", kind="bridge"),
                    Link("p1", kind="veth", master="eth1", hairpin=False),
                    Link("nic", master="eth1", hairpin=False),
                ),
            ),
        ),
        {"bridge-hairpin": "warning"},
    ),
}


@pytest.mark.parametrize(("facts", "found"), CASES.values(), ids=CASES)
def test_what_facts_mean(facts: Facts, found: dict[str, str]) -> None:
    assert judged(facts) == found


def test_a_bridge_port_of_hardware_is_left_alone() -> None:
    findings = diagnose(CASES["a bridge without hairpin"][0]).findings
    commands = [command for finding in findings for command in finding.result.fix]
    assert commands == ["ip link set p1 type bridge_slave hairpin on"]


def test_a_user_learns_what_only_root_sees() -> None:
    facts = well(root=False, rulesets=())
    found = judged(facts)
    assert set(found.values()) == {"unchecked"}
    assert {"forward-policy", "mixed-variants", "kernel-features", "store", "vip-route"} <= found.keys()
    assert "ip-forward" not in found
    assert diagnose(facts).healthy


def test_ids_are_unique_and_say_what_is_fine() -> None:
    assert len({check.id for check in CHECKS}) == len(CHECKS)
    assert all(check.id == check.id.lower() and " " not in check.id for check in CHECKS)


def test_problems_come_first() -> None:
    facts = well(daemon=status(version="0"), state=StateDir("/x", free=0))
    assert [f.id for f in diagnose(facts).findings[:2]] == ["state-dir-space", "daemon-version"]


@pytest.mark.parametrize(
    ("rules", "forward_verdict"),
    [
        ("-A FORWARD -j VIPD-FORWARD\n-A FORWARD -j DROP", ForwardVerdict.PASSES),
        ("-A FORWARD -j DROP\n-A FORWARD -j VIPD-FORWARD", ForwardVerdict.BLOCKED),
        (
            '-A FORWARD -m comment --comment "no -j ACCEPT here" -j REJECT --reject-with x',
            ForwardVerdict.BLOCKED,
        ),
        ("-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", ForwardVerdict.BLOCKED),
        ("-A FORWARD -i eth0 -j ACCEPT", ForwardVerdict.MAYBE),
        ("-A FORWARD -i eth0 -j ACCEPT\n-A FORWARD -j DROP", ForwardVerdict.MAYBE),
        ("-A FORWARD -m conntrack --ctstate DNAT -j ACCEPT", ForwardVerdict.PASSES),
        ("-A FORWARD -j ACCEPT", ForwardVerdict.PASSES),
        ("-A FORWARD -i eth0 -j DROP", ForwardVerdict.BLOCKED),
        ("-A FORWARD -i eth0 -j DROP\n-A FORWARD -j VIPD-FORWARD", ForwardVerdict.PASSES),
    ],
)
def test_the_fate_of_a_flow_in_forward(rules: str, forward_verdict: ForwardVerdict) -> None:
    own = ":VIPD-FORWARD - [0:0]\n-A VIPD-FORWARD -m connmark --mark 0x2000/0x2000 -j ACCEPT"
    saved = f"*filter\n:FORWARD DROP [0:0]\n{own}\n{rules}\nCOMMIT\n"
    assert Ruleset.of(Family.IPV4, "nft", saved).forward_chain_verdict("VIPD") is forward_verdict


DNAT = {"match": {"op": "in", "left": {"ct": {"key": "status"}}, "right": "dnat"}}
OURS = {"match": {"op": "==", "left": {"&": [{"ct": {"key": "mark"}}, 0x2000]}, "right": 0x2000}}
ETH0 = {"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": "eth0"}}
LOOPBACK = {"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": "lo"}}
KNOWN = {
    "match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": {"set": ["established", "related"]}}
}
ACCEPT, DROP, REJECT, COUNT = {"accept": None}, {"drop": None}, {"reject": None}, {"counter": {"packets": 0}}
INTO, OVER = {"jump": {"target": "more"}}, {"goto": {"target": "more"}}


@pytest.mark.parametrize(
    ("policy", "rules", "more", "forward_verdict"),
    [
        ("drop", [], [], ForwardVerdict.BLOCKED),
        ("accept", [], [], ForwardVerdict.PASSES),
        ("drop", [[DNAT, COUNT, ACCEPT]], [], ForwardVerdict.PASSES),
        ("drop", [[OURS, ACCEPT]], [], ForwardVerdict.PASSES),
        ("drop", [[KNOWN, ACCEPT], [LOOPBACK, ACCEPT]], [], ForwardVerdict.BLOCKED),
        ("drop", [[ETH0, ACCEPT]], [], ForwardVerdict.MAYBE),
        ("accept", [[KNOWN, ACCEPT], [DNAT, ACCEPT], [REJECT]], [], ForwardVerdict.PASSES),
        ("accept", [[KNOWN, ACCEPT], [REJECT]], [], ForwardVerdict.BLOCKED),
        ("accept", [[COUNT, DROP], [DNAT, ACCEPT]], [], ForwardVerdict.BLOCKED),
        ("accept", [[ETH0, DROP]], [], ForwardVerdict.PASSES),
        ("drop", [[INTO]], [[DNAT, ACCEPT]], ForwardVerdict.PASSES),
        ("drop", [[INTO], [DNAT, ACCEPT]], [[ETH0, DROP]], ForwardVerdict.PASSES),
        ("drop", [[ETH0, INTO]], [[ACCEPT]], ForwardVerdict.MAYBE),
        ("accept", [[OVER], [ACCEPT]], [[DROP]], ForwardVerdict.BLOCKED),
        ("drop", [[OVER], [ACCEPT]], [], ForwardVerdict.BLOCKED),
        ("drop", [[INTO]], [[INTO]], ForwardVerdict.BLOCKED),
    ],
)
def test_the_fate_of_a_flow_in_an_nft_chain(
    policy: str,
    rules: list[list[dict[str, Any]]],
    more: list[list[dict[str, Any]]],
    forward_verdict: ForwardVerdict,
) -> None:
    chains = {"forward": tuple(rules), "more": tuple(more)}
    assert NftForward("inet", "filter", "forward", policy, chains).forward_verdict(0x2000) is forward_verdict


def test_a_password_that_goes_unencrypted_is_told_with_and_without_a_daemon() -> None:
    etcd = {"endpoints": ["http://192.0.2.1:2379"], "user": "u", "password_file": "/pw"}
    facts = well(settings=load_settings(flags={"etcd": etcd}), daemon=Daemon({}, "no answer"))
    findings = [finding for finding in diagnose(facts).findings if finding.id == "settings"]
    causes = [finding.result.cause for finding in findings]
    assert ["goes unencrypted to http://192.0.2.1:2379" in cause for cause in causes] == [True]
    told = {**STATUS, "warnings": causes}
    findings = [*diagnose(replace(facts, daemon=Daemon(told))).findings]
    assert sum("unencrypted" in f.result.cause for f in findings) == 1, "the daemon's warning alone"


def test_judging_touches_nothing() -> None:
    """Of all vipd the judging part knows the model and itself, and no module with an effect."""
    pure = [path for path in DOCTOR.rglob("*.py") if "collect" not in path.relative_to(DOCTOR).parts]
    assert len(pure) > len(CHECKS) / 5
    assert {name for path in pure for name in imports(path)} <= ALLOWED


def imports(path: Path) -> set[str]:
    """What a file imports when it runs: modules of others by their first name."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return {name for name in found if not name.startswith("vipd.observe.doctor.")}
