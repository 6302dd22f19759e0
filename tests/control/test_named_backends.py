"""Backends that names stand for: which of them join a service."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from vipd.control.address_policy import AddressPolicy, admit_service
from vipd.control.named_backends import MAX_PROBLEMS, NamedBackends
from vipd.declaration.native import parse_declaration
from vipd.host.facts import HostFacts
from vipd.model import limits
from vipd.model.claim_limits import BySource
from vipd.model.service import Backend, Frontend, NamedBackend, NameKind, Protocol, Service, ServicePort
from vipd.resolver.answers import Question, Target

WEB = Question(NameKind.DNS, "web.internal")
SRV = Question(NameKind.SRV, "_http._tcp.web.internal")


def declared(
    backends: str, address: str = "10.96.0.10", source: str = "file", fallback: str = "reject"
) -> Service:
    service = f"name: web, address: {address}, ports: 80/tcp, backends: {backends}, fallback: {fallback}"
    service = f"{{{service}}}"
    text = f"apiVersion: vipd/v1\nservices: [{service}]"
    found = parse_declaration(text, "web.yaml", source=source)
    assert not found.problems, found.problems
    return found.services[0]


def targets(*addresses: str, port: int = 0) -> tuple[Target, ...]:
    return tuple(Target(address, port) for address in addresses)


class Names:
    """Named backends with one service."""

    def __init__(self, vips: Sequence[str] = (), policy: AddressPolicy = AddressPolicy()) -> None:  # noqa: B008
        self.named, self.policy = NamedBackends(lambda address: address in vips), policy
        self.answer({})

    def answer(self, answers: dict[Question, tuple[Target, ...]]) -> set[str]:
        return self.named.set_answers(answers, self.policy)

    def resolve(self, service: Service) -> list[str]:
        return list(
            map(str, self.named.update([service.name], {service.name: service})[service.name].backends)
        )


def test_a_service_without_names_is_the_same_object() -> None:
    service, names = declared("[10.0.0.1]"), Names()
    services = {"web": service}
    assert names.named.update(["web"], services) is services
    assert names.named.with_resolved(service) is service


def test_names_add_backends_of_the_families_that_the_service_has() -> None:
    names = Names()
    names.answer({WEB: targets("10.0.0.1", "fd00::1")})
    assert names.resolve(declared("[dns:web.internal:8080]")) == ["10.0.0.1:8080"]
    both = declared("[dns:web.internal:8080]", '[10.96.0.10, "fd00:96::10"]')
    assert names.resolve(both) == ["10.0.0.1:8080", "[fd00::1]:8080"]


def test_only_services_whose_answers_changed_are_dirty_and_unchanged_ones_stay_the_same_object() -> None:
    names, service = Names(), declared("[dns:web.internal]")
    first = {WEB: targets("10.0.0.1"), SRV: targets("10.0.0.9", port=80)}
    names.answer(first)
    names.resolve(service)
    result = names.named.with_resolved(service)
    assert names.answer({**first, SRV: targets("10.0.0.8", port=80)}) == set()
    assert names.named.with_resolved(service) is result
    assert names.answer({WEB: targets("10.0.0.2")}) == {"web"}
    assert names.resolve(service) == ["10.0.0.2"]


def test_a_service_that_is_gone_or_names_others_is_no_longer_dirty() -> None:
    names = Names()
    names.resolve(declared("[dns:web.internal]"))
    names.resolve(declared("[dns:other.internal]"))
    assert names.answer({WEB: targets("10.0.0.1")}) == set()
    names.named.update(["web"], {})
    assert names.answer({Question(NameKind.DNS, "other.internal"): targets("10.0.0.1")}) == set()


def test_declared_backends_and_earlier_names_win() -> None:
    names = Names()
    names.answer({WEB: targets("10.0.0.1", "10.0.0.2"), SRV: targets("10.0.0.2", "10.0.0.3", port=80)})
    service = declared("[{address: 10.0.0.1, weight: 7}, dns:web.internal, srv:_http._tcp.web.internal]")
    assert names.resolve(service) == ["10.0.0.1", "10.0.0.2", "10.0.0.3:80"]


def test_one_address_may_serve_each_port_by_another_backend() -> None:
    """Neither serves `admin`, and that is no place that both have."""
    names = Names()
    names.answer({WEB: targets("10.0.0.1")})
    ports = tuple(
        ServicePort(number, Protocol.TCP, name) for number, name in ((80, "a"), (81, "b"), (82, "admin"))
    )
    service = replace(
        declared("[]"),
        ports=ports,
        backends=(Backend("10.0.0.1", ports=(("a", 8080),)),),
        named_backends=(NamedBackend(NameKind.DNS, WEB.name, Backend("", ports=(("b", 8081),))),),
    )
    (_, found) = names.named.with_resolved(service).backends
    assert (found.address, found.ports) == ("10.0.0.1", (("b", 8081),))


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1", "it is a loopback address"),
        ("0.0.0.0", "it is an unspecified address"),
        ("224.0.0.1", "it is a multicast address"),
        ("255.255.255.255", "it is a broadcast address"),
        ("169.254.169.254", "link-local, and in no link-local network of allowed_backends"),
        ("fe80::1", "it is a link-local address"),
        ("::1", "it is a loopback address"),
        ("::ffff:10.0.0.1", '"::ffff:10.0.0.1" is an IPv4-mapped IPv6 address'),
        ("10.96.0.99", "it is the virtual IP of a service"),
    ],
)
def test_an_address_that_no_backend_may_have_is_left_out_and_named(address: str, why: str) -> None:
    names = Names(vips=["10.96.0.99"])
    names.answer({WEB: targets("10.0.0.1", address, "fd00::1")})
    service = declared("[dns:web.internal:80]", '[10.96.0.10, "fd00:96::10"]')
    assert names.resolve(service) == ["10.0.0.1:80", "[fd00::1]:80"]
    (problem,) = names.named.ignored("web")
    assert problem.what == f"web: dns:web.internal:80 resolves to {address}, which is left out: {why}"
    assert names.named.warnings()[0].startswith(problem.what)
    names.answer({WEB: targets("10.0.0.1")})
    names.resolve(service)
    assert (names.named.ignored("web"), names.named.warnings()) == ((), [])


def test_an_address_that_becomes_a_virtual_ip_leaves_and_returns_when_it_is_none() -> None:
    vips: list[str] = []
    names, service = Names(vips), declared("[dns:web.internal]")
    names.answer({WEB: targets("10.0.0.1", "10.0.0.2")})
    assert names.resolve(service) == ["10.0.0.1", "10.0.0.2"]
    assert names.named.recheck() == set()
    vips.append("10.0.0.2")
    assert names.named.recheck() == {"web"}
    assert names.resolve(service) == ["10.0.0.1"]
    vips.clear()
    assert names.named.recheck() == {"web"}
    assert names.resolve(service) == ["10.0.0.1", "10.0.0.2"]
    names.resolve(declared("[10.0.0.9, dns:web.internal]"))
    vips.append("10.0.0.9")
    assert names.named.recheck() == set(), "a declared backend is judged where services are admitted"


@pytest.mark.parametrize(
    ("allowed", "source", "kept"),
    [
        ((), "file", ["10.0.0.1", "192.0.2.1"]),
        (("10.0.0.0/8",), "file", ["10.0.0.1"]),
        ({"etcd": ("10.0.0.0/8",)}, "file", ["10.0.0.1", "192.0.2.1"]),
        ({"etcd": ("10.0.0.0/8",)}, "etcd", ["10.0.0.1"]),
        (("10.0.0.0/8", "169.254.0.0/16"), "etcd", ["10.0.0.1", "169.254.169.254"]),
    ],
)
def test_allowed_backends_holds_for_answers(allowed: BySource, source: str, kept: list[str]) -> None:
    names = Names(policy=AddressPolicy(backends=allowed))
    names.answer({WEB: targets("10.0.0.1", "192.0.2.1", "169.254.169.254")})
    assert sorted(names.resolve(declared("[dns:web.internal]", source=source))) == kept


def test_another_limit_is_applied_to_answers_that_serve() -> None:
    names, service = Names(), declared("[dns:web.internal]")
    names.answer({WEB: targets("10.0.0.1", "192.0.2.1")})
    names.resolve(service)
    names.policy = AddressPolicy(backends=("192.0.2.0/24",))
    assert names.named.set_answers({WEB: targets("10.0.0.1", "192.0.2.1")}, names.policy) == {"web"}
    assert names.resolve(service) == ["192.0.2.1"]


def test_many_refused_addresses_are_few_problems() -> None:
    names = Names()
    names.answer({WEB: targets(*(f"127.0.0.{n}" for n in range(100)))})
    names.resolve(declared("[dns:web.internal]"))
    told = names.named.ignored("web")
    assert len(told) == MAX_PROBLEMS + 1
    assert told[-1].what == "80 more addresses that names resolve to are left out"
    assert told[-1].hint == told[0].hint
    (warning,) = names.named.warnings()
    assert warning.startswith("web: dns:web.internal resolves to 127.0.0.0, which is left out: ")
    assert warning.endswith(f" (and {MAX_PROBLEMS} more)")
    names.answer({WEB: targets("127.0.0.1")})
    names.resolve(declared("[dns:web.internal]"))
    assert "more)" not in names.named.warnings()[0]
    names.answer({WEB: targets("10.0.0.1")})
    names.resolve(declared("[dns:web.internal]"))
    assert names.named.ignored("web") == ()
    assert names.named.warnings() == []


def test_names_never_exceed_what_a_service_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BACKENDS", 5)
    names = Names()
    names.answer({WEB: targets(*(f"10.0.0.{n}" for n in range(20)))})
    assert len(names.resolve(declared("[10.1.0.1, dns:web.internal]"))) == 5
    (warning,) = names.named.warnings()
    assert warning.startswith("16 backends of names of web are left out")
    for name in ("api", "dns"):
        service = replace(declared("[dns:web.internal]"), name=name)
        names.named.update([name], {name: service})
    (warning,) = names.named.warnings()
    assert warning.startswith("16 backends of names of web (and of 2 more services) are left out")


def test_a_service_that_is_declared_anew_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_TOTAL_SIZE", 5)
    names = Names()
    names.answer({WEB: targets("10.0.0.1", "10.0.0.2", "10.0.0.3")})
    for _ in range(3):
        service = declared("[dns:web.internal]")
        assert len(names.named.with_resolved(service).backends) == 3


def test_a_service_that_names_nothing_any_more_is_followed_by_no_answer() -> None:
    names, service = Names(), declared("[dns:web.internal]")
    names.answer({WEB: targets("127.0.0.1")})
    names.resolve(service)
    plain = declared("[10.0.0.1]")
    assert names.named.update(["web", "gone"], {"web": plain})["web"] is plain
    assert names.named.ignored("web") == ()
    assert names.answer({WEB: targets("10.0.0.2")}) == set()


@pytest.mark.parametrize(
    ("allowed", "source", "ok"),
    [
        ((".",), "etcd", True),
        ((), "file", False),
        (("internal",), "file", True),
        (("web.internal",), "file", True),
        (("b.internal",), "file", False),
        ({"file": (".",), "cli": (".",)}, "etcd", False),
        ({"etcd": ("internal",)}, "etcd", True),
        ({"etcd": ("internal",)}, "file", False),
    ],
)
def test_the_settings_say_who_may_name_names(allowed: BySource, source: str, ok: bool) -> None:
    found = admit_service(declared("[dns:web.internal]", source=source), AddressPolicy(names=allowed))
    assert [problem.what for problem in found] == (
        [] if ok else ["web: backend dns:web.internal: allowed_names has no such name"]
    )


@pytest.mark.parametrize(
    ("address", "allowed", "usable"),
    [
        ("10.0.0.1", (), True),
        ("0.0.0.0", (), False),
        ("127.0.0.1", ("127.0.0.0/8",), False),
        ("169.254.169.254", (), False),
        ("192.0.2.1", ("10.0.0.0/8",), False),
        ("192.0.2.1", {"etcd": ("10.0.0.0/8",)}, True),
        ("192.0.2.1", {"etcd": ("10.0.0.0/8",), "file": ("10.0.0.0/8",), "cli": ("192.0.2.0/24",)}, True),
    ],
)
def test_whether_any_service_may_use_an_address(address: str, allowed: BySource, usable: bool) -> None:
    names = Names(policy=AddressPolicy(backends=allowed))
    assert names.named.may_serve(address) is usable


HOST = HostFacts(
    gateways={"10.0.0.254": "eth0"},
    reserved_addresses={"10.0.0.255": "the broadcast address of 10.0.0.0/24 on eth0"},
    etcd_servers=frozenset({"10.0.0.20"}),
    dependencies={"10.0.0.53": ("a name server of this host", "")},
    own_addresses=frozenset({"10.0.0.1", "fd00::1"}),
)
NEEDED = {
    "10.0.0.1": "an address of this host itself",
    "10.0.0.254": "a gateway of this host",
    "10.0.0.20": "an address of etcd, which feeds this host",
    "10.0.0.53": "a name server of this host",
    "10.0.0.255": "the broadcast address of 10.0.0.0/24 on eth0",
}


def test_no_name_leads_to_what_the_host_has_or_needs_unless_that_very_address_is_allowed() -> None:
    service, answer = declared("[dns:web.internal]"), {WEB: targets(*NEEDED, "10.0.0.7")}
    names = Names(policy=AddressPolicy(host=HOST))
    names.answer(answer)
    assert names.resolve(service) == ["10.0.0.7"]
    told = [problem.what for problem in names.named.ignored("web")]
    assert told == [
        f"web: dns:web.internal resolves to {address}, which is left out: it is {role}, which "
        "allowed_backends does not name by itself"
        for address, role in NEEDED.items()
    ]
    assert [names.named.may_serve(address) for address in (*NEEDED, "10.0.0.7")] == [False] * 5 + [True]
    allowed = ("10.0.0.0/8", "10.0.0.1", "10.0.0.53/32")
    names = Names(policy=AddressPolicy(host=HOST, backends=allowed))
    names.answer(answer)
    assert names.resolve(service) == ["10.0.0.1", "10.0.0.53", "10.0.0.7"]


def test_an_address_that_the_host_gets_or_loses_is_judged_again() -> None:
    service, names = declared("[dns:web.internal]"), Names()
    names.answer({WEB: targets("10.0.0.1", "10.0.0.7")})
    assert names.resolve(service) == ["10.0.0.1", "10.0.0.7"]
    answers = dict(names.named._answers)
    for host, expected in ((HOST, ["10.0.0.7"]), (HostFacts(), ["10.0.0.1", "10.0.0.7"])):
        names.policy = AddressPolicy(host=host)
        assert names.answer(answers) == {"web"}
        assert names.resolve(service) == expected
        assert names.answer(answers) == set()


def test_no_name_leads_to_an_external_address_at_its_port() -> None:
    frontends = {Frontend("192.0.2.10", 8080, Protocol.TCP)}
    names = NamedBackends(lambda _: False, frontends.__contains__)
    names.set_answers({WEB: targets("192.0.2.10")}, AddressPolicy())

    def resolved(port: int) -> list[str]:
        service = declared(f"[dns:web.internal:{port}]")
        return list(map(str, names.update(["web"], {"web": service})["web"].backends))

    assert resolved(8080) == []
    assert resolved(8081) == ["192.0.2.10:8081"]
    frontends.add(Frontend("192.0.2.10", 8081, Protocol.TCP))
    assert names.recheck() == {"web"}
    assert resolved(8081) == []


def test_what_names_add_is_no_part_of_the_declaration() -> None:
    names, service = Names(), declared("[dns:web.internal]")
    names.answer({WEB: targets("10.0.0.1")})
    names.resolve(service)
    (backend,) = names.named.with_resolved(service).backends
    assert (backend.declared, backend.resolved_from) == (False, "dns:web.internal")
    assert replace(names.named.with_resolved(service), backends=()) == service


def with_fallback(names: Names, service: Service) -> tuple[list[str], list[str]]:
    """The backends and those of the fallback."""
    found = names.named.update([service.name], {service.name: service})[service.name]
    return list(map(str, found.backends)), list(map(str, found.fallback))


def test_names_of_a_fallback_add_to_it_what_no_backend_is() -> None:
    names = Names()
    names.answer({WEB: targets("10.0.0.1", "10.0.0.2", "10.0.0.8"), SRV: targets("10.0.0.2", port=80)})
    service = declared("[10.0.0.1, srv:_http._tcp.web.internal]", fallback="[10.0.0.8, dns:web.internal]")
    assert with_fallback(names, service) == (["10.0.0.1", "10.0.0.2:80"], ["10.0.0.8"])
    names.answer({WEB: targets("10.0.0.1", "10.0.0.3")})
    assert with_fallback(names, service) == (["10.0.0.1"], ["10.0.0.8", "10.0.0.3"])
    (_, found) = names.named.with_resolved(service).fallback
    assert (found.declared, found.resolved_from) == (False, "dns:web.internal")


def test_names_of_a_fallback_alone_are_followed() -> None:
    names, service = Names(), declared("[]", fallback="dns:web.internal")
    assert with_fallback(names, service) == ([], [])
    assert names.answer({WEB: targets("10.0.0.1")}) == {"web"}
    assert with_fallback(names, service) == ([], ["10.0.0.1"])
    names.named.update(["web"], {})
    assert names.answer({}) == set()


def test_what_a_name_of_a_fallback_resolves_to_is_judged_like_a_backend() -> None:
    vips: list[str] = []
    names = Names(vips, AddressPolicy(backends=("10.0.0.0/8",)))
    names.answer({WEB: targets("10.0.0.1", "127.0.0.1", "192.0.2.1")})
    service = declared("[]", fallback="dns:web.internal")
    assert with_fallback(names, service) == ([], ["10.0.0.1"])
    assert [problem.what.split(" resolves to ")[1][:9] for problem in names.named.ignored("web")] == [
        "127.0.0.1",
        "192.0.2.1",
    ]
    vips.append("10.0.0.1")
    assert names.named.recheck() == {"web"}
    assert with_fallback(names, service) == ([], [])


def test_what_exceeds_the_limit_is_left_out_first_of_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BACKENDS", 5)
    names = Names()
    names.answer(
        {WEB: targets(*(f"10.0.0.{n}" for n in range(1, 9))), SRV: targets("10.0.1.1", "10.0.1.2", port=80)}
    )
    service = declared("[srv:_http._tcp.web.internal]", fallback="[10.0.9.9, dns:web.internal]")
    backends, fallback = with_fallback(names, service)
    assert (backends, fallback) == (["10.0.1.1:80", "10.0.1.2:80"], ["10.0.9.9", "10.0.0.1", "10.0.0.2"])
    assert names.named.warnings()[0].startswith("6 backends of names of web are left out")


def test_allowed_names_holds_for_a_fallback() -> None:
    service = declared("[]", source="etcd", fallback="dns:web.internal")
    (problem,) = admit_service(service, AddressPolicy(names={"etcd": ("b.internal",)}))
    assert problem.what == "web: backend dns:web.internal: allowed_names has no such name"
    assert admit_service(service, AddressPolicy(names={"etcd": ("internal",)})) == ()
