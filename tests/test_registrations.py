"""Backends that register themselves, added to what is declared."""

from __future__ import annotations

from tests.samples import service
from vipd.model import Backend
from vipd.registrations import Registrar, declared

WEB = service("web", "10.96.0.10", "", 1, "10.244.0.5")
MORE = (Backend("10.244.0.6"), Backend("10.244.0.5"), Backend("10.96.0.10"))
"""A new one, one that is declared already, and the service's own address."""


def test_they_come_after_the_declared_ones_and_are_known_as_registered() -> None:
    registrar = Registrar()
    assert registrar.take({"web": MORE}) == {"web"}
    extended = registrar.extended(WEB)
    assert [(b.address, b.registered) for b in extended.backends] == [
        ("10.244.0.5", False),
        ("10.244.0.6", True),
    ]
    assert declared(extended) == WEB


def test_what_has_not_changed_is_the_same_object() -> None:
    registrar = Registrar()
    registrar.take({"web": MORE, "dns": MORE})
    extended = registrar.extended(WEB)
    assert registrar.take({"web": MORE, "dns": MORE[:1]}) == {"dns"}
    assert registrar.extended(WEB) is extended
    assert registrar.take({"web": (*MORE[:2], MORE[2])}) == {"web", "dns"}


def test_without_registrations_a_service_is_as_declared() -> None:
    registrar = Registrar()
    registrar.take({"web": MORE})
    registrar.extended(WEB)
    assert registrar.take({}) == {"web"}
    assert registrar.extended(WEB) is WEB
