"""Backends that register themselves, added to what is declared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.model.samples import service
from vipd.control import registrations
from vipd.control.address_policy import AddressPolicy, admit_registered, admit_service
from vipd.control.registrations import Registrar
from vipd.declaration.listed_backends import as_declared
from vipd.declaration.problems import Problem
from vipd.model.check import Check, ExecProbe, HttpProbe, Probe, TcpProbe
from vipd.model.service import Backend, Origin, RegisteredBackend, Service

WEB = replace(service("web", "10.96.0.10", "", 1, "10.244.0.5"), registrations=True)
ANY = AddressPolicy()


def registered(*addresses: str, check: Check | None = None) -> tuple[RegisteredBackend, ...]:
    return tuple(RegisteredBackend(f"etcd:/b/web/{a}", Backend(a, check=check)) for a in addresses)


MORE = registered("10.244.0.6", "10.244.0.5", "10.96.0.10")
"""A new one, one that is declared already, and the service's own address."""


def joined(
    web: Service, known: tuple[RegisteredBackend, ...], policy: AddressPolicy = ANY
) -> tuple[set[str], str]:
    """The registered backends that take part, and what is told of the others."""
    registrar = Registrar()
    registrar.set_registrations({"web": known}, policy)
    made = registrar.with_registered(web)
    return {b.address for b in made.backends if b.registered}, "\n".join(map(str, registrar.ignored("web")))


def test_they_come_after_the_declared_ones_and_are_known_as_registered() -> None:
    registrar = Registrar()
    assert registrar.set_registrations({"web": MORE}, ANY) == {"web"}
    extended = registrar.with_registered(WEB)
    assert [(b.address, b.registered) for b in extended.backends] == [
        ("10.244.0.5", False),
        ("10.244.0.6", True),
    ]
    assert as_declared(extended) == WEB


def test_what_has_not_changed_is_the_same_object() -> None:
    registrar = Registrar()
    registrar.set_registrations({"web": MORE, "dns": MORE}, ANY)
    extended = registrar.with_registered(WEB)
    assert registrar.set_registrations({"web": MORE, "dns": MORE[:1]}, ANY) == {"dns"}
    assert registrar.with_registered(WEB) is extended
    assert registrar.set_registrations({"web": (*MORE[:2], MORE[2]), "dns": MORE}, ANY) == {"web", "dns"}


def test_without_registered_backends_a_service_is_as_declared() -> None:
    registrar = Registrar()
    registrar.set_registrations({"web": MORE}, ANY)
    registrar.with_registered(WEB)
    assert registrar.set_registrations({}, ANY) == {"web"}
    assert registrar.with_registered(WEB) is WEB
    assert registrar.problems() == {}


@pytest.mark.parametrize(
    ("origin", "said", "joins", "hint"),
    [
        (Origin("etcd", "/s/web"), None, True, ""),
        (Origin("etcd", "/s/web"), False, False, "write registrations: true in its declaration"),
        (Origin("file", "/web.yaml", 3), None, False, "write registrations: true in its declaration"),
        (Origin("file", "/web.yaml", 3), True, True, ""),
        (Origin("cli"), None, False, "vipctl set web --registrations true"),
        (Origin("cli"), True, True, ""),
    ],
)
def test_a_service_of_this_hosts_administrators_is_joined_only_if_it_says_so(
    origin: Origin, said: bool | None, joins: bool, hint: str
) -> None:
    web = replace(WEB, registrations=said, origin=origin)
    taking_part, told = joined(web, registered("10.244.0.6"))
    assert taking_part == ({"10.244.0.6"} if joins else set())
    assert bool(told) is not joins
    assert hint in told
    assert joins or f"declared by {origin.owner}" in told


@pytest.mark.parametrize(
    ("policy", "address", "joins"),
    [
        (AddressPolicy(backends=("10.244.0.0/16",)), "10.244.0.6", True),
        (AddressPolicy(backends=("10.244.0.0/16",)), "10.245.0.6", False),
        (AddressPolicy(backends={"etcd": ("10.244.0.0/16",)}), "10.245.0.6", False),
        (AddressPolicy(backends={"file": ("10.244.0.0/16",)}), "10.245.0.6", True),
        (ANY, "169.254.169.254", False),
        (AddressPolicy(backends=("0.0.0.0/0",)), "169.254.169.254", False),
        (AddressPolicy(backends={"file": ("169.254.0.0/16",)}), "169.254.169.254", False),
        (AddressPolicy(backends=("10.0.0.0/8", "169.254.169.0/24")), "169.254.169.254", True),
        (ANY, "10.96.0.10", False),
    ],
)
def test_what_lies_outside_is_a_problem_of_that_registration_alone(
    policy: AddressPolicy, address: str, joins: bool
) -> None:
    taking_part, told = joined(WEB, registered("10.244.0.7", address), policy)
    assert taking_part == {"10.244.0.7", address} if joins else {"10.244.0.7"}
    assert told.count("\n") == 0
    assert joins or told.startswith(f"etcd:/b/web/{address}: web: backend {address} ")


@pytest.mark.parametrize(
    ("probe", "joins"),
    [
        (HttpProbe(method="GET"), True),
        (HttpProbe(method="HEAD", tls=True), True),
        (HttpProbe(method="POST"), False),
        (HttpProbe(method="DELETE"), False),
        (TcpProbe(), True),
        (ExecProbe(command=("/bin/true",)), False),
    ],
)
def test_a_registered_check_changes_nothing_anywhere(probe: Probe, joins: bool) -> None:
    for policy in (ANY, AddressPolicy(exec_sources=("file", "cli"))):
        assert bool(joined(WEB, registered("10.244.0.6", check=Check(probe)), policy)[0]) is joins
    service_of_etcd = replace(WEB, origin=Origin("etcd", "/s/web"), check=Check(probe))
    assert (admit_service(service_of_etcd, ANY) == ()) is joins
    of_a_file = replace(WEB, origin=Origin("file", "/web.yaml", 3), check=Check(probe))
    assert admit_service(of_a_file, ANY) == ()


def test_other_limits_are_looked_at_anew_and_equal_ones_are_not() -> None:
    registrar, narrow = Registrar(), AddressPolicy(backends=("10.0.0.0/16",))
    registrar.set_registrations({"web": MORE}, ANY)
    registrar.with_registered(WEB)
    assert registrar.set_registrations({"web": MORE}, replace(ANY, host_addresses=("10.0.0.1",))) == set()
    assert registrar.set_registrations({"web": MORE}, narrow) == {"web"}
    assert registrar.with_registered(WEB) == WEB
    assert len(registrar.ignored("web")) == 4
    registrar.update(["web"], {})
    assert registrar.problems() == {}


def test_an_exception_that_nobody_expected_is_the_fault_of_one_registration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def admit(service: Service, one: RegisteredBackend, policy: AddressPolicy) -> tuple[Problem, ...]:
        if one.backend.address == "10.244.0.7":
            raise LookupError("here")
        return admit_registered(service, one, policy)

    monkeypatch.setattr(registrations, "admit_registered", admit)
    taking_part, told = joined(WEB, registered("10.244.0.6", "10.244.0.7", "10.244.0.8"))
    assert taking_part == {"10.244.0.6", "10.244.0.8"}
    assert "admitting it to web" in told


def test_a_thousand_registrations_that_are_ignored_make_a_hundred_problems() -> None:
    registrar = Registrar()
    known = registered(*(f"10.244.{n // 250}.{n % 250 + 1}" for n in range(1_000)))
    registrar.set_registrations({"web": known}, ANY)
    registrar.with_registered(replace(WEB, registrations=False))
    told = registrar.problems()
    assert len(told) == registrations.MAX_PROBLEMS + 1
    assert "900 more registered backends do not take part" in "\n".join(map(str, [*told.values()][-1]))
