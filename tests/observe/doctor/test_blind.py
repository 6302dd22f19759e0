"""What could not be looked at is said to be so: no failure of a look becomes a fact about the host."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.observe.doctor.facts import KERNEL, PROGRAMS, SAVED, STATUS, WEB, hold, well
from vipd.dataplane.nftables.reader import BaseChain
from vipd.host.process import ProgramResult, ProgramTimeoutError
from vipd.host.settings.settings import Settings, load_settings
from vipd.model.service import Family
from vipd.observe.doctor import diagnosis
from vipd.observe.doctor.collect import firewall_rules, host, kernel
from vipd.observe.doctor.collect.host import CollectOptions, collect
from vipd.observe.doctor.diagnosis import CHECKS, Diagnosis, diagnose
from vipd.observe.doctor.facts import Kernel, Network, Place
from vipd.observe.doctor.finding import Severity

VIEW: dict[str, Any] = {
    "name": "web",
    "forwardings": [
        {
            "family": "ipv4",
            "protocol": "tcp",
            "frontends": ["10.96.0.10:80/tcp"],
            "external": [],
            "node_port": 30080,
            "endpoints": [{"address": "10.244.0.11", "port": 8080, "ready": True, "health": ""}],
            "affinity_seconds": 600,
            "masquerade": "hairpin",
        }
    ],
}
ANSWERS = STATUS | {
    "pid": 1,
    "dataplane": {"name": "iptables"},
    "sources": [{"problems": []}],
    "settings": {"dataplane": "iptables"},
    "quarantined": {},
}
LINKS = [
    {"ifname": "lo", "flags": ["UP"]},
    {"ifname": "eth1", "flags": ["UP"], "linkinfo": {"info_kind": "bridge"}},
    {"ifname": "p1", "flags": ["UP"], "master": "eth1", "linkinfo": {"info_kind": "veth"}},
]
SAID = {
    "iptables": "iptables v1.8.9 (nf_tables)",
    "nft": "nftables v1.0.6 (Lester Gooch #5)",
    "ip -j -d link": json.dumps(LINKS),
    "ip -j address": '[{"ifname": "eth1", "addr_info": [{"local": "10.244.0.1", "prefixlen": 24}]}]',
    "ip -force -j -batch -": '[{"dst": "10.96.0.10", "dev": "eth1"}]\n'
    '[{"dst": "10.244.0.11", "dev": "eth1"}]\n',
}
FILES = {
    "proc/self/ns/net": "",
    "proc/net/tcp": "  sl  local_address rem_address   st\n",
    "proc/net/udp": "  sl  local_address rem_address   st\n",
    "proc/net/stat/nf_conntrack": "entries  insert_failed drop early_drop\n02 00 00 00\n",
    "proc/net/netstat": "TcpExt: IPReversePathFilter\nTcpExt: 0\n",
    "proc/net/if_inet6": "",
    "proc/7/comm": "init\n",
    "sys/module/xt_recent/parameters/ip_list_tot": "4095\n",
    **{f"proc/sys/{name}": f"{value}\n" for name, value in KERNEL.items()},
    "proc/sys/net/bridge/bridge-nf-call-iptables": "1\n",
    "proc/sys/net/ipv6/conf/all/disable_ipv6": "0\n",
    "proc/sys/net/ipv6/conf/eth1/disable_ipv6": "0\n",
}

Run = Callable[[Sequence[str]], ProgramResult]


def well_said(argv: Sequence[str]) -> ProgramResult:
    """As programs of a host that is well answer."""
    words = " ".join(argv)
    if argv[0].endswith("-save"):
        return ProgramResult(0, SAVED if argv[0].startswith("iptables") else "", "")
    if words.startswith("nft -j list"):
        return ProgramResult(0, '{"nftables": []}', "")
    if argv[0] == "ip":
        return ProgramResult(0, SAID.get(words, "[]"), "")
    stem = "nft" if argv[0] == "nft" else "iptables"
    return ProgramResult(0, SAID[stem] if "--version" in argv else "", "")


def missing(argv: Sequence[str]) -> ProgramResult:
    raise FileNotFoundError(2, "No such file or directory", argv[0])


def forbidden(argv: Sequence[str]) -> ProgramResult:
    raise PermissionError(13, "Permission denied", argv[0])


def hanging(argv: Sequence[str]) -> ProgramResult:
    raise ProgramTimeoutError(argv[0], 10.0)


def failing(argv: Sequence[str]) -> ProgramResult:
    return ProgramResult(1, "", "no")


def babbling(argv: Sequence[str]) -> ProgramResult:
    return ProgramResult(0, "\x00\x7f [] lorem * ipsum\n:x\n", "")


def odd(argv: Sequence[str]) -> ProgramResult:
    """JSON, but not what was to come."""
    return ProgramResult(0, '[3, "x", null]', "")


def cut(argv: Sequence[str]) -> ProgramResult:
    said = well_said(argv)
    return replace(said, stdout=said.stdout[: len(said.stdout) // 2])


FAULTS = (missing, forbidden, hanging, failing, babbling, odd, cut)
OF_RULES = {
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
}
OF_NETWORK = {
    "network-readable",
    "vip-owned",
    "vip-foreign",
    "vip-in-subnet",
    "vip-route",
    "backend-route",
    "local-backend",
    "node-port-taken",
    "rp-filter",
    "bridge-hairpin",
    "bridge-replies",
}
OF_PROGRAM: dict[str, set[str]] = {
    "ip -j": {*OF_NETWORK, "backend-neighbour"},
    "ip -force": OF_NETWORK,
    "ip -j -d link": OF_NETWORK,
    "nft -j list": {"forward-chains", "foreign-refusals", "rules-twice", "firewalls"},
    "nft --version": {"nft"},
    "iptables-nft --version": OF_RULES,
    "iptables-nft-save": OF_RULES,
    "ip6tables-nft-save": OF_RULES,
    "unshare": {"kernel-features"},
}
"""What cannot be checked when a program fails."""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for `/`, of a host that is well; the daemon answers."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    hold(tmp_path, "VIPD")
    (tmp_path / "state").mkdir(mode=0o750)
    (tmp_path / "services").mkdir()
    monkeypatch.setattr(host, "ask_daemon", lambda socket: (ANSWERS, [VIEW], ""))
    monkeypatch.setattr(host, "_settings_of", lambda status: settings(tmp_path))
    monkeypatch.setattr(host, "WATCHED_SECONDS", 0.0)
    monkeypatch.setattr(kernel, "_conntrack_fault", lambda: "")
    monkeypatch.setattr(firewall_rules, "_base_chains", list)
    return tmp_path


def settings(root: Path) -> Settings:
    directories = {"state_dir": str(root / "state"), "services_dir": str(root / "services")}
    return load_settings(flags={**directories, "dataplane": "iptables"})


def asked(root: Path, run: Run = well_said) -> Diagnosis:
    """The diagnosis of a host whose programs answer so."""

    async def runner(argv: Sequence[str], stdin: str) -> ProgramResult:
        return run(argv)

    async def connect(place: Place) -> str:
        return ""

    return diagnose(collect(CollectOptions(settings(root), root=root, run=runner, connect=connect)))


def ids(found: Diagnosis, *severities: Severity) -> set[str]:
    return {finding.id for severity in severities for finding in found.of(severity)}


def test_a_host_that_is_well(root: Path) -> None:
    found = asked(root)
    assert ids(found, Severity.PROBLEM, Severity.WARNING, Severity.UNCHECKED) == set()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("program", OF_PROGRAM)
def test_a_program_that_fails(root: Path, program: str, fault: Run) -> None:
    if program == "unshare" and fault in (babbling, odd, cut):
        pytest.skip("what unshare and the program behind it print is not read")
    if program.endswith("-save") and fault is missing:
        pytest.skip("iptables and iptables-save are one program")

    def run(argv: Sequence[str]) -> ProgramResult:
        return fault(argv) if " ".join(argv).startswith(program) else well_said(argv)

    found = asked(root, run)
    if (program, fault.__name__) == ("iptables-nft --version", "missing"):
        # A program that is not installed has written nothing, and the kernel has nothing.
        assert ids(found, Severity.UNCHECKED) == set()
        return
    if fault is cut and program in ("ip6tables-nft-save", "nft --version"):
        return  # half of nothing is nothing, and half of its version is enough
    assert ids(found, Severity.UNCHECKED) >= OF_PROGRAM[program]
    assert ids(found, Severity.PROBLEM, Severity.WARNING) == set()


@pytest.mark.parametrize("fault", FAULTS)
def test_an_iptables_that_fails_is_named(root: Path, fault: Run) -> None:
    def run(argv: Sequence[str]) -> ProgramResult:
        return fault(argv) if argv[0].startswith(("iptables", "ip6tables", "nft")) else well_said(argv)

    found = asked(root, run)
    assert ids(found, Severity.PROBLEM) == {"iptables"}
    # Programs that are not installed have written nothing, and the kernel has nothing.
    expected = {"nft"} if fault is missing else set() if fault is cut else {"nft"} | OF_RULES
    assert ids(found, Severity.UNCHECKED) >= {"forward-chains", "rules-twice"} | expected


def test_rules_that_nobody_can_show(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninstalling iptables takes no rule away."""
    left = BaseChain("ip", "filter", "FORWARD", 2, accepts=False)
    monkeypatch.setattr(firewall_rules, "_base_chains", lambda: [left])

    def run(argv: Sequence[str]) -> ProgramResult:
        return missing(argv) if argv[0].startswith("iptables") else well_said(argv)

    found = asked(root, run)
    assert ids(found, Severity.UNCHECKED) >= OF_RULES
    assert "iptables-nft cannot be run" in found.of(Severity.UNCHECKED)[0].result.cause


OF_FILE: dict[str, set[str]] = {
    "proc/locks": {"other-vipd"},
    "proc/net/tcp": {"local-backend", "node-port-taken"},
    "proc/net/stat/nf_conntrack": {"conntrack-drops", "conntrack-races"},
    "proc/net/netstat": set(),
    "proc/sys/net/ipv4/ip_forward": {"ip-forward"},
    "proc/sys/net/netfilter/nf_conntrack_max": {"conntrack-room"},
    "proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal": {"tcp-be-liberal"},
    "proc/sys/net/ipv4/conf/eth1/rp_filter": {"rp-filter"},
    "proc/sys/net/bridge/bridge-nf-call-iptables": {"bridge-hairpin", "bridge-replies"},
    "sys/module/xt_recent/parameters/ip_list_tot": {"affinity-limit"},
    "proc/net/ip_tables_names": OF_RULES | {"vip-route", "tcp-be-liberal"},
}


@pytest.mark.parametrize("fault", ["garbage", "directory", "empty"])
@pytest.mark.parametrize("name", OF_FILE)
def test_a_file_that_cannot_be_read(root: Path, name: str, fault: str) -> None:
    path = root / name
    path.unlink(missing_ok=True)
    if fault == "directory":
        path.mkdir()
    else:
        path.write_bytes(b"" if fault == "empty" else b"\xff\xfe no\n such file\n")
    found = asked(root)
    assert ids(found, Severity.PROBLEM, Severity.WARNING) == set()
    if name == "proc/net/ip_tables_names" and fault != "directory":
        return  # names of tables may be any
    assert ids(found, Severity.UNCHECKED) == OF_FILE[name]


@pytest.mark.parametrize(
    ("everywhere", "of_device", "severity"),
    [
        ("0\n", "0\n", Severity.OK),
        ("1\n", "0\n", Severity.OK),
        ("1\n", "1\n", Severity.PROBLEM),
        ("1\n", "no\n", Severity.UNCHECKED),
        ("", "1\n", Severity.UNCHECKED),
    ],
)
def test_whether_ipv6_is_disabled(
    root: Path, everywhere: str, of_device: str, severity: Severity, monkeypatch: pytest.MonkeyPatch
) -> None:
    (forwarding,) = VIEW["forwardings"]
    endpoints = [{"address": "fd00:244::11", "port": 8080, "ready": True, "health": ""}]
    frontends = {"frontends": ["[fd00:96::10]:80/tcp"], "endpoints": endpoints}
    view = VIEW | {"forwardings": [forwarding | frontends | {"family": "ipv6"}]}
    monkeypatch.setattr(host, "ask_daemon", lambda socket: (ANSWERS, [view], ""))
    ways = [f'[{{"dst": "{address}", "dev": "eth1"}}]\n' for address in ("fd00:96::10", "fd00:244::11")]
    monkeypatch.setitem(SAID, "ip -force -j -batch -", "".join(ways))
    (root / "proc/sys/net/ipv6/conf/all/disable_ipv6").write_text(everywhere)
    for name in ("eth1", "p1"):
        path = root / f"proc/sys/net/ipv6/conf/{name}/disable_ipv6"
        path.parent.mkdir(exist_ok=True)
        path.write_text(of_device)
    found = [f.severity for f in asked(root).findings if f.id == "ipv6-disabled"]
    assert found == [severity]


def test_without_a_list_of_devices_ipv6_is_not_said_to_be_disabled() -> None:
    services = (replace(WEB, family=Family.IPV6),)
    off = Kernel(KERNEL | {"net/ipv6/conf/all/disable_ipv6": "1"}, {})
    found = diagnose(well(services=services, kernel=off, network=Network(fault="no such program")))
    assert "ipv6-disabled" in ids(found, Severity.UNCHECKED)


def test_without_the_kernels_lists_nothing_is_said_of_daemons(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether one is at work is not known, and so not that none is."""
    (root / "proc/locks").write_text("")
    monkeypatch.setattr(host, "ask_daemon", lambda socket: ({}, [], "no such file"))
    found = asked(root)
    assert "daemon-running" in ids(found, Severity.UNCHECKED)
    assert "other-vipd" in ids(found, Severity.UNCHECKED)
    assert ids(found, Severity.PROBLEM, Severity.WARNING) <= {"settings"}


LOOKS = (
    "read_kernel",
    "reread",
    "_declared",
    "read_rulesets",
    "read_nft",
    "find_programs",
    "read_network",
    "read_socket_file",
    "read_state_dir",
    "Processes",
)


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_that_fails_leaves_the_others(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of luck")

    async def broken_later(*_: object, **__: object) -> None:
        broken()

    later = inspect.iscoroutinefunction(getattr(host, name))
    monkeypatch.setattr(host, name, broken_later if later else broken)
    found = asked(root)
    assert ids(found, Severity.PROBLEM, Severity.WARNING) == set()
    assert ids(found, *Severity) == {check.id for check in CHECKS}
    told = [finding.result.cause for finding in found.of(Severity.UNCHECKED)]
    if name != "Processes":  # needed only where there are rules of a kube-proxy
        assert any("this look itself failed: RuntimeError: out of luck; please report it" in t for t in told)


def test_a_check_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(facts: object) -> Any:
        raise KeyError("colour")

    first, *others = CHECKS
    facts = well(programs=PROGRAMS)
    for changed in (
        replace(first, check=broken),
        replace(first, check=lambda facts: (), skipped_because=broken),
    ):
        monkeypatch.setattr(diagnosis, "CHECKS", (changed, *others))
        found = diagnose(facts)
        assert ids(found, *Severity) == {check.id for check in CHECKS}
        (told,) = found.of(Severity.UNCHECKED)
        assert told.id == first.id
        assert told.result.cause == "this check itself failed: KeyError: 'colour'; please report it"


@pytest.mark.parametrize("fault", [missing, forbidden, hanging, failing, babbling])
def test_an_nft_that_is_the_dataplanes_and_fails(
    root: Path, fault: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        host, "ask_daemon", lambda socket: (ANSWERS | {"dataplane": {"name": "nftables"}}, [VIEW], "")
    )

    def run(argv: Sequence[str]) -> ProgramResult:
        return fault(argv) if argv[0] == "nft" else well_said(argv)

    found = asked(root, run)
    assert "nft" in ids(found, Severity.PROBLEM)
    assert ids(found, Severity.PROBLEM) <= {"nft", "kernel-features", "forward-policy", "rules-twice"}
    assert "vip-route" in ids(found, Severity.UNCHECKED)
