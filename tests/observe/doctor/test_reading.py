"""What the doctor reads of a host: the kernel's files, what programs print, the state directory, backends."""

from __future__ import annotations

import json
import re

import pytest

from tests.lab.flow import finish
from tests.observe.doctor.deceived import Deceived

pytestmark = pytest.mark.root

COUNTERS = """entries  clashres found insert_failed drop early_drop
00000002  00000000 00000000 0000000a 00000001 00000000
00000002  00000000 00000000 00000006 00000000 00000000
"""
ARP_CACHE = """entries  allocs   table_fulls
00000385 000001a9 00000002
00000385 000001ed 00000001
"""
IP_VS = """IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
TCP  0A60000A:0050 rr
  -> 0AF4000B:1F90      Masq    1      0          0
UDP  [fd00:0096:0000:0000:0000:0000:0000:0010]:0035 wlc persistent 300
FWM  0000000A rr
TCP  nonsense rr
"""


def severities(deceived: Deceived, *words: str) -> dict[str, str]:
    return {name: str(f["severity"]) for name, f in deceived.doctor.faults(*words).items()}


def test_the_kernels_counters_count_by_their_growth(deceived: Deceived) -> None:
    """Of flows that were dropped, of neighbours without room; both are sums over processors."""
    files = {
        "net/stat/nf_conntrack": COUNTERS,
        "net/stat/arp_cache": ARP_CACHE,
        "sys/ipv4/neigh/default/gc_thresh3": "1024\n",
        "sys/netfilter/nf_conntrack_count": "990\n",
        "sys/netfilter/nf_conntrack_max": "1000\n",
        "recent/ip_list_tot": "100\n",
    }
    of_now = {"conntrack-room": "problem", "affinity-limit": "warning", "neighbour-table": "warning"}
    with deceived.files(files):
        assert severities(deceived) == of_now
        later = {
            "stat/nf_conntrack": COUNTERS.replace(" 00000001", " 00000004"),
            "stat/arp_cache": ARP_CACHE.replace("00000001\n", "00000005\n"),
        }
        with deceived.grows(later):
            found = deceived.doctor.faults()
    assert {name: str(f["severity"]) for name, f in found.items()} == of_now | {
        "conntrack-drops": "warning",
        "neighbour-table": "problem",
    }
    assert re.search(r"\b3\b", found["conntrack-drops"]["title"] + found["conntrack-drops"]["cause"])


def test_what_others_on_the_host_have_set_up(deceived: Deceived) -> None:
    """What ipvs serves, a flowtable to which a rule adds flows, and a VRF without a route to a backend."""
    table = {"flowtable": {"family": "inet", "table": "f", "name": "ft", "handle": 2, "dev": ["eth0"]}}
    rule = {"rule": {"family": "inet", "table": "f", "expr": [{"flow": {"op": "add", "flowtable": "@ft"}}]}}
    links = json.loads(deceived.patient.host.run("ip", "-j", "-d", "link").stdout)
    vrf = {"info_kind": "vrf", "info_data": {"table": 10}}
    links.append({"ifname": "red", "flags": ["UP"], "linkinfo": vrf})
    links.append({"ifname": "eth7", "flags": ["UP"], "master": "red"})
    rules = [
        {"priority": 1000, "src": "all", "l3mdev": None},
        {"priority": 32766, "src": "all", "table": "main"},
    ]
    routes = [
        {"dst": "10.244.0.11", "dev": "cluster"},
        {"type": "unreachable", "dst": "default", "metric": 4278198272},
    ]
    said = {
        "nft -j list flowtables": [table],
        "nft -j list table inet f": [rule],
        "ip -j -d link": links,
        "ip -j -4 rule": rules,
        "ip -j -4 route show table 10": routes,
        "ip -j -6 route show table 10": [],
    }
    printed = {
        program: json.dumps({"nftables": rows} if program.startswith("nft") else rows)
        for program, rows in said.items()
    }
    with deceived.programs(printed), deceived.files({"net/ip_vs": IP_VS}):
        found = deceived.doctor.faults()
    assert found.keys() == {"ipvs", "flow-offload", "backend-policy-route"}
    assert found["ipvs"]["cause"].startswith("10.96.0.10:80/tcp: ")
    assert found["flow-offload"]["severity"] == "warning"
    assert "VRF red (eth7)" in found["backend-policy-route"]["cause"]
    assert "10.244.0.12" in str(found["backend-policy-route"])
    assert "10.244.0.11" not in str(found["backend-policy-route"])


def test_what_others_have_set_up_that_is_no_matter(deceived: Deceived) -> None:
    """And a kernel without what is counted."""
    table = {"flowtable": {"family": "inet", "table": "f", "name": "ft", "handle": 2, "dev": ["eth0"]}}
    said = {
        "nft -j list flowtables": json.dumps({"nftables": [table]}),
        "nft -j list table inet f": json.dumps({"nftables": []}),
    }
    files = {
        "net/ip_vs": IP_VS.replace("0A60000A", "0A600063"),
        "net/stat/nf_conntrack": "entries\n",
        "net/stat/arp_cache": "",
        "net/netstat": "",
    }
    with deceived.programs(said), deceived.files(files):
        findings = deceived.doctor.ask()
    assert {finding["severity"] for finding in findings} <= {"ok", "unchecked"}
    (listed,) = [finding["cause"] for finding in findings if finding["id"] == "ipvs"]
    assert listed == "10.96.0.99:80/tcp, FWM 10, [fd00:96::10]:53/udp"


def test_programs_that_are_too_old(deceived: Deceived) -> None:
    stems = ("iptables", "iptables-nft", "ip6tables", "ip6tables-nft")
    with deceived.programs({f"{stem} --version": "iptables v1.8.2 (nf_tables)\n" for stem in stems}):
        found = deceived.doctor.faults()["iptables"]
    assert (found["severity"], found["mend"]) == ("problem", ["apt install iptables"])
    assert "it duplicates rules" in found["cause"]


def test_a_kube_proxy_that_runs(deceived: Deceived) -> None:
    host = deceived.patient.lab.host
    host.run("iptables", "-t", "mangle", "-N", "KUBE-PROXY-CANARY")
    deceived.shell(f"cp -L /bin/sleep {deceived.path('kube-proxy')}")
    left = deceived.doctor.faults()["kube-proxy"]
    process = host.start(str(deceived.path("kube-proxy")), "600")
    runs = deceived.doctor.faults()["kube-proxy"]
    finish(process)
    host.run("iptables", "-t", "mangle", "-X", "KUBE-PROXY-CANARY")
    assert left["cause"] != runs["cause"]


def test_the_clock_counts_where_etcd_is_used(deceived: Deceived) -> None:
    with deceived.without_daemon() as words:
        etcd = "etcd_endpoints=[http://127.0.0.1:1]"
        (found,) = [f for f in deceived.doctor.ask(*words, "--set", etcd) if f["id"] == "clock"]
    assert found["severity"] in ("ok", "warning")


def test_a_state_directory_that_is_full_or_read_only_or_gone(deceived: Deceived) -> None:
    place = deceived.path("state")
    place.mkdir()

    def faults() -> dict[str, str]:
        with deceived.without_daemon() as words:
            found = deceived.doctor.faults(*words, "--set", f"state_dir={place}")
        return {name: str(f["severity"]) for name, f in found.items() if name.startswith("state-dir")}

    deceived.shell(f"mount -t tmpfs -o size=128k,mode=0750 tmpfs {place}")
    assert faults() == {"state-dir-space": "problem"}
    deceived.shell(f"umount {place}; mount -t tmpfs -o size=60m,mode=0750 tmpfs {place}")
    assert faults() == {}
    deceived.shell(f"mount -o remount,ro {place}")
    with deceived.without_daemon() as words:
        found = deceived.doctor.faults(*words, "--set", f"state_dir={place}")["state-dir"]
    assert found["severity"] == "problem"
    deceived.shell(found["hint"].rpartition("remount it: ")[2])
    assert faults() == {}
    deceived.shell(f"umount {place}")
    place.rmdir()
    assert faults() == {"state-dir": "problem"}


def test_connections_to_backends_are_bounded_and_leave_no_service_out(deceived: Deceived) -> None:
    """All of the large service answer; what the small one has after them does not."""
    host, backend = deceived.patient.lab.host, deceived.patient.lab.backends[1]
    backend.run("ip", "route", "add", "local", "10.245.0.0/16", "dev", "lo")
    host.run("ip", "route", "add", "10.245.0.0/16", "via", backend.ipv4)
    large = ", ".join(f"10.245.{n // 250}.{n % 250 + 1}" for n in range(1200))
    declared = f"""
  - {{name: large, address: 10.96.0.21, ports: [{{port: 80, target: 30}}], backends: [{large}]}}
  - {{name: small, address: 10.96.0.22, ports: [80/tcp], backends: ["10.245.9.1:31"]}}
  - {{name: silent, address: 10.96.0.23, ports: [53/udp], backends: ["10.245.9.2:32"]}}
"""
    server = backend.serve(tcp=[30])
    try:
        with deceived.patient.declared(declared):
            contacts = [f for f in deceived.doctor.ask() if f["id"] == "backend-contact"]
            named = [f for f in deceived.doctor.ask(target="large") if f["id"] == "backend-contact"]
            udp = [f for f in deceived.doctor.ask(target="silent") if f["id"] == "backend-contact"]
    finally:
        finish(server)
        host.run("ip", "route", "del", "10.245.0.0/16")
    assert "10.245.9.1:31/tcp of small (connection refused)" in contacts[0]["cause"]
    assert "10.245.9.2" not in str(contacts), "it would take a datagram"
    assert "10.245.9.2:32/udp of silent" in udp[0]["cause"]
    left = [[int(n) for n in re.findall(r"\b(\d+) more backends", str(found))] for found in (contacts, named)]
    assert left[1] == [200]
    assert left[0][0] > 900


def test_a_neighbour_that_is_not_resolved(deceived: Deceived) -> None:
    """An old entry of a backend that answers, and one of another device, do not count."""
    second = deceived.patient.lab.backends[1]
    drop = ("INPUT", "-p", "tcp", "--dport", "8080", "-j", "DROP")
    for first, other, expected in (("FAILED", "INCOMPLETE", {"10.244.0.12"}), ("FAILED", "REACHABLE", set())):
        entries = [
            {"dst": "10.244.0.11", "dev": "cluster", "state": [first]},
            {"dst": "10.244.0.12", "dev": "cluster", "state": [other]},
            {"dst": "fd00:244::11", "dev": "elsewhere", "state": ["FAILED"]},
        ]
        second.run("iptables", "-I", *drop)
        with deceived.programs({"ip -j neighbour show": json.dumps(entries)}):
            found = deceived.doctor.faults()
        second.run("iptables", "-D", *drop)
        cause = found.get("backend-neighbour", {}).get("cause", "")
        assert {a for a in ("10.244.0.11", "10.244.0.12", "fd00:244::11") if a in cause} == expected
