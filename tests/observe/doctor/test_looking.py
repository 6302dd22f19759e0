"""Reading a host: files in a directory that stands for it, programs that a test answers for, real mounts."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.observe.doctor.facts import KERNEL, hold, judged, well
from vipd.host.process import ProgramResult
from vipd.host.processes import Processes
from vipd.host.settings.settings import Settings, load_settings
from vipd.model.service import Family, Protocol
from vipd.observe.doctor.collect.contacts import AT_ONCE, MAX_CONTACTS, contact, read_unresolved
from vipd.observe.doctor.collect.daemon import prefixes_in_use
from vipd.observe.doctor.collect.firewall_rules import read_flowtables
from vipd.observe.doctor.collect.kernel import read_kernel, reread
from vipd.observe.doctor.collect.network import listeners, read_network
from vipd.observe.doctor.collect.programs import find_programs
from vipd.observe.doctor.collect.state import read_state_dir
from vipd.observe.doctor.diagnosis import diagnose
from vipd.observe.doctor.facts import Place, Route, ServedPort

COUNTERS = """entries  clashres found insert_failed drop early_drop
00000002  00000000 00000000 0000000a 00000001 00000000
00000002  00000000 00000000 00000006 00000000 00000000
"""
NETSTAT = "TcpExt: SyncookiesSent IPReversePathFilter\nTcpExt: 1 42\nIpExt: InOctets\nIpExt: 5\n"


IP_VS = """IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
TCP  0A60000A:0050 rr
  -> 0AF4000B:1F90      Masq    1      0          0
UDP  [fd00:0096:0000:0000:0000:0000:0000:0010]:0035 wlc persistent 300
FWM  0000000A rr
TCP  nonsense rr
"""
ARP_CACHE = """entries  allocs   table_fulls
00000385 000001a9 00000002
00000385 000001ed 00000001
"""


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_what_ipvs_serves(tmp_path: Path) -> None:
    put(tmp_path, {"proc/net/ip_vs": IP_VS})
    found = read_kernel(tmp_path, netlink=False, clock=False)
    assert found.ipvs == {"10.96.0.10:80/tcp", "[fd00:96::10]:53/udp", "FWM 10"}


def test_neighbours_and_their_limit(tmp_path: Path) -> None:
    limit = {"proc/sys/net/ipv4/neigh/default/gc_thresh3": "1024\n"}
    put(tmp_path, {"proc/net/stat/arp_cache": ARP_CACHE, **limit})
    before = read_kernel(tmp_path, netlink=False, clock=False)
    found = reread(tmp_path, before, 1.0)
    assert (found.neighbours, found.neighbours_refused) == (901, 0), "what was full once is no fault now"
    assert (
        judged(well(kernel=replace(found, settings={**KERNEL, **found.settings})))["neighbour-table"]
        == "warning"
    )
    put(tmp_path, {"proc/net/stat/arp_cache": ARP_CACHE.replace("00000001\n", "00000005\n")})
    found = reread(tmp_path, before, 1.0)
    assert found.neighbours_refused == 4
    assert (
        judged(well(kernel=replace(found, settings={**KERNEL, **found.settings})))["neighbour-table"]
        == "problem"
    )


FLOWTABLE = {"flowtable": {"family": "inet", "table": "f", "name": "ft", "handle": 2, "dev": ["eth0"]}}
OFFLOAD = {"rule": {"family": "inet", "table": "f", "expr": [{"flow": {"op": "add", "flowtable": "@ft"}}]}}


@pytest.mark.parametrize(("rules", "found"), [([OFFLOAD], ("inet f ft",)), ([], ())])
def test_flowtables_count_when_a_rule_adds_flows(rules: list[object], found: tuple[str, ...]) -> None:
    async def run(argv: Sequence[str], stdin: str) -> ProgramResult:
        listed = [FLOWTABLE] if "flowtables" in argv else rules
        return ProgramResult(0, json.dumps({"nftables": listed}), "")

    assert asyncio.run(read_flowtables(run)) == found


VRF = (
    '[{"ifname": "red", "flags": ["UP"], "linkinfo": {"info_kind": "vrf", "info_data": {"table": 10}}},'
    '{"ifname": "eth0", "flags": ["UP"], "master": "red"}]'
)


def test_a_vrf_without_a_route_to_a_backend() -> None:
    said = {
        "ip -j -d link": VRF,
        "ip -j -4 rule": '[{"priority": 1000, "src": "all", "l3mdev": null},'
        '{"priority": 32766, "src": "all", "table": "main"}]',
        "ip -j -4 route show table 10": '[{"dst": "10.244.0.0/24", "dev": "eth0"},'
        '{"type": "unreachable", "dst": "default", "metric": 4278198272}]',
        "ip -force -j -batch -": '[{"dst": "10.244.0.11", "dev": "eth0"}]\n'
        '[{"dst": "10.245.0.1", "dev": "eth1"}]\n',
    }

    async def run(argv: Sequence[str], stdin: str) -> ProgramResult:
        return ProgramResult(0, said.get(" ".join(argv), "[]"), "")

    found = asyncio.run(read_network(["10.244.0.11", "10.245.0.1"], (), Path("/"), run))
    (rule,) = found.policy_rules
    assert rule.text == "VRF red (eth0)"
    assert rule.routes == {"10.244.0.11": Route("eth0"), "10.245.0.1": Route()}


def test_the_kernels_files(tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            "proc/sys/net/ipv4/ip_forward": "1\n",
            "proc/sys/net/ipv4/conf/eth0.5/rp_filter": "1\n",
            "proc/sys/net/netfilter/nf_conntrack_count": "990\n",
            "proc/sys/net/netfilter/nf_conntrack_max": "1000\n",
            "proc/net/stat/nf_conntrack": COUNTERS,
            "proc/net/netstat": NETSTAT,
            "sys/module/xt_recent/parameters/ip_list_tot": "100\n",
        },
    )
    before = read_kernel(tmp_path, netlink=False, clock=False)
    assert judged(well(kernel=reread(tmp_path, before, 1.0))).keys() == {
        "conntrack-room",
        "affinity-limit",
    }
    put(tmp_path, {"proc/net/stat/nf_conntrack": COUNTERS.replace(" 00000001", " 00000004")})
    found = reread(tmp_path, before, 1.0)
    assert {name: new for name, new in found.conntrack_new.items() if new} == {"drop": 3}
    assert found.number("net/ipv4/ip_forward") == 1
    assert found.number("net/ipv4/conf/eth0.5/rp_filter") == 1
    assert found.number("net/bridge/bridge-nf-call-iptables") is None
    assert (found.conntrack["insert_failed"], found.conntrack["drop"]) == (16, 4)
    assert (found.affinity_limit, found.reverse_path_drops) == (100, 42)
    assert judged(well(kernel=found)).items() >= {
        ("conntrack-room", "problem"),
        ("conntrack-drops", "warning"),
        ("affinity-limit", "warning"),
    }


def test_a_host_that_tells_nothing(tmp_path: Path) -> None:
    found = read_kernel(tmp_path, netlink=False, clock=False)
    assert (found.settings, found.conntrack, found.affinity_limit) == ({}, {}, None)
    assert (found.reverse_path_drops, reread(tmp_path, found, 1.0)) == (
        None,
        replace(found, watched_seconds=1.0),
    )
    for look in (
        prefixes_in_use,
        lambda root: listeners({80}, root),
        lambda root: Processes(root).running({"x"}),
    ):
        with pytest.raises(FileNotFoundError):
            look(tmp_path)


def test_the_clock_can_be_asked() -> None:
    assert read_kernel(Path("/"), netlink=False, clock=True).clock_synchronised in (True, False)


def test_who_listens_where() -> None:
    """Sockets of this very process, in both families; one that is connected does not count."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as receiver,
    ):
        receiver.bind(("::1", 0))
        found = listeners({server.getsockname()[1], receiver.getsockname()[1]}, Path("/"))
    own = [one for one in found if one.pid == os.getpid()]  # others may have the same port elsewhere
    assert {(one.protocol, one.address) for one in own} == {
        (Protocol.TCP, "127.0.0.1"),
        (Protocol.UDP, "::1"),
    }
    assert all(one.program for one in own)


def test_vipds_that_are_at_work(tmp_path: Path) -> None:
    put(tmp_path, {"proc/self/ns/net": "", "proc/locks": ""})
    assert prefixes_in_use(tmp_path) == frozenset()
    hold(tmp_path, "VIPD", "B2")
    crashed = next(tmp_path.glob("run/vipd/*-B2.lock"))
    crashed.with_name(crashed.name.replace("B2", "B3")).touch()
    put(tmp_path, {"run/vipd/netns-1-B4.lock": "", "run/vipd/vipd.sock": ""})
    assert prefixes_in_use(tmp_path) == {"VIPD", "B2"}


def test_processes_by_name_and_their_unit(tmp_path: Path) -> None:
    put(tmp_path, {"proc/7/comm": "kube-proxy\n", "proc/7/cgroup": "0::/system.slice/kube-proxy.service\n"})
    (tmp_path / "proc/7/fd").mkdir()
    (tmp_path / "proc/7/fd/3").symlink_to("socket:[99]")
    processes = Processes(tmp_path)
    assert processes.running({"kube-proxy", "other"}) == {"kube-proxy"}
    assert processes.socket_owners({"99", "100"}) == {"99": ("kube-proxy", 7, "kube-proxy.service")}


@pytest.mark.parametrize(
    ("version", "fault", "repair"),
    [
        ("", "there is no such program", "apt install iptables"),
        ("iptables v1.8.2 (nf_tables)", "it duplicates rules", "apt install iptables"),
    ],
)
def test_programs_that_cannot_be_used(version: str, fault: str, repair: str) -> None:
    async def run(argv: Sequence[str], stdin: str) -> ProgramResult:
        if argv[0] == "nft" or not version:
            raise FileNotFoundError(argv[0])
        return ProgramResult(0, version, "")

    found = asyncio.run(find_programs(Settings(), [Family.IPV4], False, run))
    assert found.nft == ""
    assert [program.fault.endswith(fault) for program in found.iptables] == [True, True]
    assert found.iptables[0].fix == repair
    assert judged(well(programs=found))["iptables"] == "problem"


@contextmanager
def mounted(place: Path, options: str) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def state_faults(settings: Settings) -> dict[str, str]:
    return judged(well(settings=settings, state=read_state_dir(settings, True)))


@pytest.mark.root
def test_a_state_directory_that_is_full_or_read_only(tmp_path: Path) -> None:
    settings = load_settings(flags={"state_dir": str(tmp_path)})
    with mounted(tmp_path, "size=128k,mode=0750"):
        assert state_faults(settings) == {"state-dir-space": "problem"}
    with mounted(tmp_path, "size=60m,mode=0750"):
        assert state_faults(settings) == {}
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        facts = well(settings=settings, state=read_state_dir(settings, True))
        assert judged(facts) == {"state-dir": "problem"}
        (finding,) = [f for f in diagnose(facts).findings if f.id == "state-dir"]
        command = finding.result.hint.rpartition("remount it: ")[2]
        subprocess.run(["sh", "-c", command], check=True)
        assert state_faults(settings) == {}


def test_a_state_directory_that_is_not_there(tmp_path: Path) -> None:
    assert state_faults(load_settings(flags={"state_dir": str(tmp_path / "x")})) == {"state-dir": "problem"}


def port_of(name: str, protocol: Protocol, number: int, checked: bool = False) -> ServedPort:
    """A service with so many backends, which take new flows."""
    backends = tuple((f"10.244.{n // 250}.{n % 250}", 8080) for n in range(number))
    taking = frozenset(backends)
    return ServedPort(
        name, Family.IPV4, protocol, 80, (), None, backends, taking, taking if checked else frozenset()
    )


@pytest.mark.parametrize("named", [False, True])
def test_connections_to_backends_are_bounded_and_leave_no_service_out(tmp_path: Path, named: bool) -> None:
    trying, most, tried = set[Place](), 0, list[Place]()

    async def connect(place: Place) -> str:
        nonlocal most
        trying.add(place)
        tried.append(place)
        most = max(most, len(trying))
        await asyncio.sleep(0)
        trying.remove(place)
        return "connection refused" if place[1] == "10.244.0.0" else ""

    async def neighbours(argv: Sequence[str], stdin: str) -> ProgramResult:
        states = {
            "10.244.0.0": "INCOMPLETE",
            "10.244.0.1": "FAILED",
            "10.244.7.200": "FAILED",
            "10.244.7.201": "FAILED",
        }
        entries = [{"dst": address, "dev": "eth0", "state": [state]} for address, state in states.items()]
        return ProgramResult(0, json.dumps(entries), "")

    services = [
        port_of("large", Protocol.TCP, 2000),
        port_of("small", Protocol.UDP, 2),
        replace(
            port_of("other", Protocol.TCP, 1),
            backends=(("10.1.0.1", 80),),
            new_flows=frozenset({("10.1.0.1", 80)}),
        ),
        port_of("asked", Protocol.SCTP, 1),
    ]
    found = asyncio.run(contact(services, named, connect, tmp_path))
    assert most == AT_ONCE
    assert found.results.keys() == set(tried)
    assert len(tried) == (1000 if named else MAX_CONTACTS)
    assert (Protocol.TCP, "10.1.0.1", 80) in tried, "of a service after one with many"
    assert (Protocol.UDP in {place[0] for place in tried}) is named
    assert Protocol.SCTP not in {place[0] for place in tried}, "a socket of SCTP would load the module"
    assert found.left_out == 2000 + 1 + 1 + 2 * named - len(tried)
    routes = {
        **dict.fromkeys(("10.244.0.0", "10.244.0.1", "10.244.7.200"), Route("eth0")),
        "10.244.7.201": Route("eth1"),
    }
    unresolved = asyncio.run(read_unresolved(services, found.results, routes, neighbours))
    assert unresolved.keys() == {"10.244.0.0", "10.244.7.200"}, "of one that answered an old entry counts not"


def test_a_backend_that_a_check_looks_at_is_connected_to_only_when_it_is_asked_for(tmp_path: Path) -> None:
    async def connect(place: Place) -> str:
        return ""

    services = [port_of("web", Protocol.TCP, 3, checked=True)]
    for named, number in ((False, 0), (True, 3)):
        found = asyncio.run(contact(services, named, connect, tmp_path))
        assert (len(found.results), found.left_out) == (number, 0)
