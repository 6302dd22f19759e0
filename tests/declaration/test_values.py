"""Addresses, backends, ports and durations: how each is written, and what is said of the rest."""

from __future__ import annotations

import json
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.declaration.strategies import PATIENT
from tests.lab.inside import Problem, declare, vipctl, written
from vipd.model.service import Affinity, Backend, Protocol, Service, ServicePort, socket_text

VALUES: dict[str, object] = {"address": ["10.96.0.10", "fd00:96::10"], "ports": "53/udp"}


def declared(**values: object) -> tuple[Service | None, tuple[Problem, ...]]:
    """A service with these values, each a text, and what is wrong with them."""
    found = declare(json.dumps({"apiVersion": "vipd/v1", "services": [VALUES | values]}))
    return next(iter(found.services), None), found.problems


def service(**values: object) -> Service:
    found, problems = declared(**values)
    assert found is not None
    assert problems == ()
    return found


def test_backends() -> None:
    meant = {
        "10.0.0.5": Backend("10.0.0.5"),
        "10.0.0.5:80": Backend("10.0.0.5", 80),
        "10.0.0.5@0": Backend("10.0.0.5", None, 0),
        "10.0.0.5:65535@65535": Backend("10.0.0.5", 65535, 65535),
        "FD00:0::5": Backend("fd00::5"),
        "fd00::5@2": Backend("fd00::5", None, 2),
        "[fd00::5]:80@2": Backend("fd00::5", 80, 2),
    }
    assert {text: service(backends=text).backends for text in meant} == {
        text: (backend,) for text, backend in meant.items()
    }


def test_ports() -> None:
    tcp, udp = Protocol.TCP, Protocol.UDP
    meant = {
        "53": (ServicePort(53, tcp),),
        "53/udp": (ServicePort(53, udp),),
        "53/UDP": (ServicePort(53, udp),),
        "80:8080/tcp": (ServicePort(80, tcp, target=8080),),
        "80:80": (ServicePort(80, tcp),),
        "54:5353/tcp, udp": (ServicePort(54, tcp, target=5353), ServicePort(54, udp, target=5353)),
        "55/sctp": (ServicePort(55, Protocol.SCTP),),
    }
    assert {text: service(ports=text).ports for text in meant} == meant


def test_durations() -> None:
    meant = {"90": 90, "90s": 90, "10m": 600, "3h": 10800, "1d": 86400, "24h": 86400}
    assert {text: service(affinity=text).affinity for text in meant} == {
        text: Affinity(seconds) for text, seconds in meant.items()
    }
    assert service(slow_start="0").slow_start == 0


REFUSED: list[tuple[str, str, str, str]] = [
    ("address", "\n%eth0", "zone id", "leave out the part from % on"),
    ("address", "::ffff:10.0.0.1", "IPv4-mapped", "10.0.0.1"),
    ("address", "10.0.0.1\n", "not an IP address", "write"),
    ("address", "١٠.0.0.1", "not an IP address", "write"),
    ("address", "a" * 1_000 + "!", "not an IP address", "write"),
    ("backends", "10.0.0.1:", "not a port", "1 to 65535"),
    ("backends", "10.0.0.1:65536", "out of range", "1 to 65535"),
    ("backends", "10.0.0.1@01", "leading zero", "decimal"),
    ("backends", "http://10.0.0.1:80", "a URL", "write an address"),
    ("ports", "53/icmp", "not a protocol", "tcp, udp, sctp"),
    ("ports", "53:0/tcp", "out of range", "1 to 65535"),
    ("ports", "53:1:2/tcp", "not a port", "1 to 65535"),
    ("ports", "dns", "not a port", "1 to 65535"),
    ("affinity", "1.5h", "not a duration", "90s"),
    ("affinity", "3 h", "not a duration", "90s"),
    ("slow_start", "-1s", "not a duration", "90s"),
    ("affinity", "010", "not a duration", "90s"),
    ("slow_start", "99999d", "out of range", "at most"),
]
"""Beside those of `broken/`."""


def test_a_refusal_says_what_is_wrong_and_what_to_write() -> None:
    differing = []
    for key, text, what, hint in REFUSED:
        _, problems = declared(**{key: text})
        said = [problem for problem in problems if what in problem.what and hint in problem.hint]
        if len(said) != 1 or len(problems) != 1 or len(said[0].what) > 200:
            differing.append((key, text[:40], list(map(str, problems))))
    assert not differing


@pytest.mark.parametrize(
    ("word", "what", "hint"),
    [
        ("10.96.0.10", "no port", "10.96.0.10:80/tcp"),
        ("fd00::10", "no port", "fd00::10"),
        ("dns:53/udp", "a name", "write the address"),
        ("[10.0.0.1]:80:81", "brackets", "leave the brackets out"),
        ("10.96.0.10:80:x/tcp", "not a port", "1 to 65535"),
        ("fd00:96::1:80/tcp", "without brackets", "write it like [fd00:96::1]:80/tcp, or, if all of it"),
        ("1:2:3:4:5:6:7:8:80", "without brackets", "[1:2:3:4:5:6:7:8]:80/tcp"),
        ("http://10.96.0.1/", "a URL", "10.96.0.1:80/tcp"),
        ("https://[fd00::1]", "a URL", "[fd00::1]:443/tcp"),
        ("https://10.96.0.1:8443/x", "a URL", "10.96.0.1:8443/tcp"),
        ("tcp://web:80", "a URL", "10.96.0.10:80/tcp"),
    ],
)
def test_a_frontend_that_is_none_is_refused_before_the_daemon_is_asked(
    capsys: pytest.CaptureFixture[str], word: str, what: str, hint: str
) -> None:
    assert vipctl(["--socket", "/nowhere", "add", word, "10.0.0.1"]) == 2
    refused = capsys.readouterr().err
    assert what in refused
    assert hint in refused.partition("hint: ")[2]


@PATIENT
@given(
    st.text(max_size=40) | st.text("[]0123456789abcdef:.@/%stpu", max_size=30),
    st.sampled_from(["address", "backends", "ports", "affinity", "allow_from", "slow_start"]),
)
def test_any_text_is_read_or_refused_by_name(text: str, key: str) -> None:
    found, problems = declared(**{key: text})
    assert not any(problem.internal for problem in problems)
    assert all(str(problem).isprintable() for problem in problems)
    assert problems or declare(written([found] if found else [])).ok


@PATIENT
@given(st.ip_addresses(), st.none() | st.integers(1, 65535), st.integers(0, 65535), st.integers(1, 86400))
def test_canonical_spelling_is_read_back(
    address: IPv4Address | IPv6Address, port: int | None, weight: int, seconds: int
) -> None:
    text = str(address) if port is None else socket_text(str(address), port)
    spellings = [f"{text}@{weight}"]
    if isinstance(address, IPv6Address):
        spellings.append(spellings[0].replace(str(address), address.exploded.upper()))
    for spelling in spellings:
        found, problems = declared(backends=spelling, affinity=f"{seconds}s")
        assert problems or (found and found.backends == (Backend(str(address), port, weight),))
        assert found is None or declare(written([found])).services[0].affinity == Affinity(seconds)
