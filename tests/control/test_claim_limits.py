"""What each source may claim: nothing of a host that its administrators did not give away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from vipd.cli.main import cli
from vipd.control.address_policy import AddressPolicy, admit_service
from vipd.control.admission import Admission
from vipd.declaration.native import parse_declaration
from vipd.declaration.problems import Declaration
from vipd.declaration.unit import Unit
from vipd.host.facts import NO_FACTS, LocalSocket
from vipd.host.settings.settings import load_settings
from vipd.host.settings.settings_file import SettingsError
from vipd.model.claim_limits import BySource, NetworkSet
from vipd.model.service import Backend, ExternalAddress, Origin, Protocol, Service, ServicePort

SOURCES = ("file", "cli", "etcd")


def service(source: str, node_port: int | None = None, protocol: Protocol = Protocol.TCP) -> Service:
    ports = (ServicePort(80, protocol, node_port=node_port),)
    backends = (Backend("10.244.0.5"),)
    return Service("web", ("10.96.0.1",), ports, backends, origin=Origin(source, "/web", 3))


def policy(**flags: object) -> AddressPolicy:
    """What settings say of claims."""
    settings = load_settings(flags=flags)
    return AddressPolicy(
        settings.allowed_addresses, backends=settings.allowed_backends, host_ports=settings.host_ports
    )


def refusals(found: Service, limits: AddressPolicy) -> list[str]:
    return [problem.what for problem in admit_service(found, limits)]


@pytest.mark.parametrize("protocol", list(Protocol))
@pytest.mark.parametrize("number", [1, 22, 2379, 10250, 29999, 32768, 65535])
def test_by_default_etcd_takes_no_port_outside_of_kubernetes_range(number: int, protocol: Protocol) -> None:
    (what,) = refusals(service("etcd", number, protocol), policy())
    assert what == (f"web: node port {number}/{protocol} lies outside node_port_range (30000-32767 for etcd)")
    (what,) = refusals(replace(service("etcd"), health_port=number), policy())
    assert what == f"web: health port {number}/tcp lies outside node_port_range (30000-32767 for etcd)"
    for source in ("file", "cli"):
        assert refusals(replace(service(source, number), health_port=number), policy()) == []
    assert refusals(service("etcd", number), policy(compat="kube-proxy")) == []


def test_by_default_etcd_takes_any_port_in_it() -> None:
    assert refusals(replace(service("etcd", 30000), health_port=32767), policy()) == []


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ("30000-30010", {("file", 30005), ("cli", 30005), ("etcd", 30005)}),
        ("any", {(source, port) for source in SOURCES for port in (22, 30005, 443)}),
        ([443, "30000-30010"], {(source, port) for source in SOURCES for port in (30005, 443)}),
        ({"cli": "443"}, {("file", 22), ("file", 30005), ("file", 443), ("cli", 443), ("etcd", 30005)}),
        ({"etcd": "22"}, {*((s, p) for s in ("file", "cli") for p in (22, 443, 30005)), ("etcd", 22)}),
    ],
)
def test_a_range_is_for_all_or_for_the_source_that_it_names(
    setting: object, allowed: set[tuple[str, int]]
) -> None:
    limits = policy(node_port_range=setting)
    tried = {(source, port) for source in SOURCES for port in (22, 443, 30005)}
    assert {each for each in tried if not refusals(service(*each), limits)} == allowed


def test_with_compat_the_ports_of_this_hosts_own_addresses_are_ports_of_this_host() -> None:
    facts = replace(NO_FACTS, own_addresses=frozenset({"192.0.2.1"}))
    own = replace(service("etcd"), addresses=(), external_addresses=(ExternalAddress("192.0.2.1"),))
    by_default = policy(compat="kube-proxy")
    assert refusals(own, replace(by_default, host=facts)) == []
    limited = policy(compat="kube-proxy", node_port_range={"etcd": "30000-32767"})
    (what,) = refusals(own, replace(limited, host=facts))
    assert what.startswith("web: port 80/tcp of this host's address 192.0.2.1 lies outside node_port_range")


def test_a_port_that_a_program_holds_is_refused_until_it_ends() -> None:
    nginx = LocalSocket(Protocol.TCP, "0.0.0.0", 8080, "nginx")
    web = service("file", 8080)
    held = AddressPolicy(host=replace(NO_FACTS, sockets=(nginx,)))
    free = AddressPolicy()
    assert refusals(web, held) == ["web: node port 8080/tcp is in use: nginx listens here"]
    assert refusals(service("file", 8080, Protocol.UDP), held) == []
    admission = Admission()

    def admitted(candidate: Unit, limits: AddressPolicy) -> Unit:
        admission.admit(admission.update_units([{"file:/web": candidate}], limits))
        return admission.units["file:/web"]

    unit = Unit(Declaration((web,)))
    assert not admitted(unit, held).candidate.ok
    assert held == free, "sockets alone make no other policy: all services would be looked at anew"
    assert admitted(unit, free).candidate.ok
    served = Unit(Declaration((web,)), Declaration((web,)))
    assert admitted(served, held).accepted.services == (web,), "what is served goes on"


def test_a_health_port_takes_none_of_vipds_own() -> None:
    page = LocalSocket(Protocol.TCP, "0.0.0.0", 30080, "vipd itself (status_page)", protected=True)
    limits = AddressPolicy(host=replace(NO_FACTS, protected_sockets=(page,), sockets=(page,)))
    (what,) = refusals(replace(service("etcd"), health_port=30080), limits)
    assert what == "web: health port 30080/tcp is the port of vipd itself (status_page)"


@pytest.mark.parametrize(
    ("setting", "source", "address", "allowed"),
    [
        ((), "file", "10.245.0.1", True),
        ((), "file", "169.254.169.254", True),
        ((), "etcd", "10.245.0.1", True),
        ((), "etcd", "169.254.169.254", False),
        (["0.0.0.0/0"], "etcd", "169.254.169.254", False),
        (["169.254.169.254/32"], "etcd", "169.254.169.254", True),
        (["10.244.0.0/16"], "file", "10.245.0.1", False),
        (["10.244.0.0/16"], "cli", "10.245.0.1", False),
        (["10.244.0.0/16"], "etcd", "10.244.1.1", True),
        ({"etcd": "10.244.0.0/16"}, "file", "10.245.0.1", True),
        ({"etcd": "10.244.0.0/16"}, "etcd", "10.245.0.1", False),
        (["10.0.0.0/8"], "etcd", "fd00::1", False),
        (["fd00::/8"], "etcd", "fd00::1", True),
    ],
)
def test_backends_of_every_kind_lie_within(
    setting: BySource, source: str, address: str, allowed: bool
) -> None:
    limits, plain = policy(allowed_backends=setting), replace(service(source), backends=())
    for kind in ("backends", "fallback"):
        told = refusals(replace(plain, **{kind: (Backend(address),)}), limits)  # type: ignore[arg-type]
        assert (told == []) is allowed
        assert allowed or told[0].startswith(f"web: backend {address} is ")


def test_many_backends_that_lie_outside_make_one_problem() -> None:
    backends = tuple(Backend(f"10.245.0.{n}") for n in range(1, 101))
    (what,) = refusals(replace(service("file"), backends=backends), policy(allowed_backends="10.244.0.0/16"))
    assert what == (
        "web: backends 10.245.0.1, 10.245.0.2, 10.245.0.3 and 97 more are outside allowed_backends"
    )


def test_addresses_may_be_allowed_by_source() -> None:
    limits = policy(allowed_addresses={"etcd": ["10.97.0.0/16"]})
    assert refusals(service("etcd"), limits) == ["web: 10.96.0.1 lies outside allowed_addresses"]
    assert refusals(service("file"), limits) == []


def test_what_was_accepted_before_a_limit_was_set_is_held_to_it() -> None:
    narrow = policy(allowed_backends="10.0.0.0/24")
    for web, limits in (
        (service("etcd", 22), policy()),
        (service("etcd"), narrow),
        (service("file"), narrow),
    ):
        admission, declared = Admission(), Declaration((web,))
        admission.admit(admission.update_units([{"a": Unit(declared, declared)}], limits))
        assert admission.units["a"].accepted.services == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node_port_range: 0", ":1: node_port_range: '0' is no range of ports; hint: "),
        ("node_port_range: 5-4", ":1: node_port_range: '5-4' is no range of ports; hint: "),
        ("node_port_range: []", ":1: node_port_range: names no port; hint: 30000-32767, or any"),
        ("node_port_range: {etdc: any}", ":1: node_port_range: must be one of file, cli, etcd, not "),
        (
            "allowed_backends:\n  etcd:\n  - 10.0.0.0/8\n  - x/8",
            ":4: allowed_backends: 'x/8' does not appear",
        ),
        ("allowed_backends: {etcd: 7}", ":1: allowed_backends: must be a list, not 7"),
        ("allowed_addresses:\n- 10.0.0.0/8\n- 10.0.0.1/8", ":3: allowed_addresses: 10.0.0.1/8 has host"),
    ],
)
def test_a_limit_that_cannot_be_read_is_told_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "vipd.yaml").write_text(f"{text}\n")
    with pytest.raises(SettingsError) as caught:
        load_settings(tmp_path / "vipd.yaml")
    assert f"{tmp_path}/vipd.yaml{said}" in "\n".join(caught.value.problems)


def test_environment_and_flags_say_it_too() -> None:
    found = load_settings(
        flags={"allowed_backends": {"cli": "fd00::/8"}},
        environment={
            "VIPD_NODE_PORT_RANGE": "{etcd: any, cli: [80, 443-444]}",
            "VIPD_ALLOWED_ADDRESSES": "10.0.0.0/8,fd00::/8",
        },
    )
    assert found.host_ports == {"etcd": ("1-65535",), "cli": ("80", "443-444")}
    assert found.allowed_addresses == ("10.0.0.0/8", "fd00::/8")
    assert found.allowed_backends == {"cli": ("fd00::/8",)}


TEXT = """apiVersion: vipd/v1
services:
  - {name: web, address: 10.96.0.1, ports: 80, backends: [10.244.0.5], node_port: 40000}
"""


def test_render_takes_any_port_and_check_does_not(tmp_path: Path) -> None:
    (tmp_path / "web.yaml").write_text(TEXT)
    words = [str(tmp_path / "web.yaml"), "--set", "node_port_range=30000-32767"]
    words += ["--set", "host_addresses=[10.0.0.1]"]
    assert "--dport 40000" in CliRunner().invoke(cli, ["render", *words], catch_exceptions=False).output
    done = CliRunner().invoke(cli, ["check", *words], catch_exceptions=False, standalone_mode=False)
    assert done.return_value == 1
    assert "lies outside node_port_range (30000-32767 for file)" in " ".join(done.output.split())


def test_a_key_says_whether_registered_backends_take_part() -> None:
    for said, wanted in (("true", True), ("false", False)):
        found = parse_declaration(f"{TEXT.rstrip()[:-1]}, registrations: {said}}}\n", "web.yaml")
        assert found.problems == ()
        assert found.services[0].registrations is wanted
    assert parse_declaration(TEXT, "web.yaml").services[0].registrations is None


def test_networks_are_found_by_family() -> None:
    held = NetworkSet(("10.0.0.0/9", "10.128.0.0/9", "fd00::/8"))
    found = [held.contains(a) for a in ("10.0.0.0", "10.255.255.255", "11.0.0.0", "fdff::1", "fe00::1")]
    assert found == [True, True, False, True, False]
    assert not NetworkSet(()).contains("10.0.0.1")
