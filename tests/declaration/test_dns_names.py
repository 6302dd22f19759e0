"""Backends by name in vipd/v1: what is read, written back and refused."""

import pytest

from tests.lab.inside import declare, vipctl, written
from vipd.model.service import Backend, NamedBackend, NameKind, RejectAction, Service

HEAD = "apiVersion: vipd/v1\nservices:\n  - address: 10.96.0.10\n    ports: {}\n    backends: {}\n"


def read(backends: str, ports: str = "80/tcp", more: str = "") -> tuple[Service, ...]:
    found = declare(HEAD.format(ports, backends) + more, "web.yaml")
    assert not found.problems, found.problems
    return found.services


def problems(backends: str, ports: str = "80/tcp", more: str = "") -> list[str]:
    return [str(p) for p in declare(HEAD.format(ports, backends) + more, "web.yaml").problems]


def test_names_are_read_in_every_form_and_written_back() -> None:
    text = (
        "[10.0.0.1, dns:Web.Internal.:8080@2, {dns: db.internal, backup: true, state: drain}, "
        "{srv: _http._tcp.web.internal, check: tcp, zone: east}, srv:web.service.consul]"
    )
    (service,) = read(text)
    assert list(map(str, service.backends)) == ["10.0.0.1"]
    web, db, http, consul = service.named_backends
    assert web == NamedBackend(NameKind.DNS, "web.internal", Backend("", 8080, 2))
    assert (db.template.backup, str(db)) == (True, "dns:db.internal")
    assert (http.kind, http.name, http.template.zones) == (NameKind.SRV, "_http._tcp.web.internal", ("east",))
    assert str(consul) == "srv:web.service.consul"
    again = declare(written([service]), "again.yaml")
    assert again.services == (service,)


NO_NAMES = [
    *(".", "-a.b", "a-.b", "a..b", "a b", "a/b", "1.2.3.4", "é.de"),
    *("x" * 64, ".".join(["abcdefghi"] * 26)),
]
ODD_FORMS = ["srv:_http._tcp.x.internal:80", "srv:x.internal@2", "dns:x.internal:0", "dns:"]


def test_what_is_no_name_is_refused() -> None:
    texts = [f"dns:{name}" for name in NO_NAMES] + ODD_FORMS
    assert [text for text in texts if not problems(f'["{text}"]')] == []
    assert [name for name in (*NO_NAMES, "") if not problems(f'[{{dns: "{name}"}}]')] == []


@pytest.mark.parametrize("text", ["web.internal", "web.internal:80", "localhost", "10.0.0.1O"])
def test_a_name_without_its_prefix_is_refused_with_what_to_write(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert f'write dns:{text}"' in f'{problems(f"[{text}]")[0]}"'
    assert vipctl(["--socket", "/nowhere", "add", "10.96.0.10:80", text]) == 2
    assert capsys.readouterr().err.endswith(f"write dns:{text}\n")


@pytest.mark.parametrize(
    ("backends", "ports", "told"),
    [
        ("[{srv: a.b, port: 80}]", "80/tcp", "srv and port exclude each other"),
        ("[{srv: a.b, weight: 2}]", "80/tcp", "srv and weight exclude each other"),
        ("[{dns: a.b, address: 10.0.0.1}]", "80/tcp", "dns and address exclude each other"),
        ("[{dns: a.b, srv: a.b}]", "80/tcp", "dns and srv exclude each other"),
        ("[srv:a.b]", "[80/tcp, 81/tcp]", "srv fits a service with one port; this one has 2"),
        (
            "[dns:a.b:1, {dns: a.b, port: 1, weight: 3}]",
            "80/tcp",
            "dns:a.b:1 is already services[0].backends[0]",
        ),
        ("[{dns: a.b, ports: {http: 1}}]", "80/tcp", 'the service has no port named "http"'),
        ("[{address: web.internal}]", "80/tcp", "write dns: web.internal in place of address"),
        ("[{dns: 10.0.0.1}]", "80/tcp", "is not a DNS name"),
    ],
)
def test_combinations_that_mean_nothing_are_problems(backends: str, ports: str, told: str) -> None:
    assert any(told in each for each in problems(backends, ports)), problems(backends, ports)


@pytest.mark.parametrize(
    "fallback",
    [
        "dns:web.internal:80",
        "[dns:web.internal:80]",
        "{dns: web.internal, port: 80}",
        "{backends: [{dns: web.internal, port: 80}]}",
    ],
)
def test_a_fallback_has_names_as_a_service_has_them(fallback: str) -> None:
    (service,) = read("10.0.0.1", more=f"    fallback: {fallback}\n")
    (name,) = service.named_fallback
    assert (name, service.fallback) == (NamedBackend(NameKind.DNS, "web.internal", Backend("", 80)), ())
    assert "    fallback: {backends: [{dns: web.internal, port: 80}]}\n" in written([service])


def test_a_fallback_of_defaults_has_names_too() -> None:
    defaults = "apiVersion: vipd/v1\ndefaults: {fallback: [10.0.0.9, srv:_x._tcp.a.b]}\nservices:\n"
    services = "  - {address: 10.96.0.1, ports: 80}\n  - {address: 10.96.0.2, ports: 80, fallback: drop}\n"
    inheriting, own = declare(defaults + services, "web.yaml").services
    inherited = (*inheriting.fallback, *inheriting.named_fallback)
    assert list(map(str, inherited)) == ["10.0.0.9", "srv:_x._tcp.a.b"]
    assert (own.fallback, own.named_fallback, own.refusal) == ((), (), RejectAction.DROP)


@pytest.mark.parametrize(
    ("fallback", "ports", "told"),
    [
        ("web.internal", "80/tcp", "write dns:web.internal"),
        ("[dns:a.b, dns:a.b]", "80/tcp", "dns:a.b is already services[0].fallback[0]"),
        ("srv:a.b", "[80/tcp, 81/tcp]", "srv fits a service with one port; this one has 2"),
        ("{srv: a.b, port: 80}", "80/tcp", "srv and port exclude each other"),
        ("[dns:a.b, drop]", "80/tcp", "write reject, drop or keep alone, or only backends"),
        ("{dns: a.b, backends: [10.0.0.9]}", "80/tcp", '"backends"'),
    ],
)
def test_names_of_a_fallback_that_mean_nothing_are_problems(fallback: str, ports: str, told: str) -> None:
    found = problems("10.0.0.1", ports, f"    fallback: {fallback}\n")
    assert any(told in each for each in found), found
