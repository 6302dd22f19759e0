import subprocess
import sys
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.declaration.strategies import PATIENT
from vipd.declaration.syntax import (
    InvalidTextError,
    duration_text,
    parse_address,
    parse_address_and_ports,
    parse_backend,
    parse_duration,
    parse_frontend,
    parse_ports,
)
from vipd.model.service import Backend, Frontend, Protocol, ServicePort, socket_text


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("10.0.0.5", Backend("10.0.0.5")),
        ("10.0.0.5:80", Backend("10.0.0.5", 80)),
        ("10.0.0.5@0", Backend("10.0.0.5", None, 0)),
        ("10.0.0.5:65535@65535", Backend("10.0.0.5", 65535, 65535)),
        ("FD00:0::5", Backend("fd00::5")),
        ("fd00::5@2", Backend("fd00::5", None, 2)),
        ("[fd00::5]:80@2", Backend("fd00::5", 80, 2)),
    ],
)
def test_backends(text: str, backend: Backend) -> None:
    assert parse_backend(text) == backend


@pytest.mark.parametrize(
    ("text", "frontend"),
    [
        ("10.96.0.10:53/udp", Frontend("10.96.0.10", 53, Protocol.UDP)),
        ("10.96.0.10:53", Frontend("10.96.0.10", 53, Protocol.TCP)),
        ("[fd00:0::10]:53/sctp", Frontend("fd00::10", 53, Protocol.SCTP)),
    ],
)
def test_frontends(text: str, frontend: Frontend) -> None:
    assert parse_frontend(text) == frontend


def test_ports() -> None:
    assert parse_ports("53") == (ServicePort(53, Protocol.TCP),)
    assert parse_ports("53/udp") == parse_ports("53/UDP") == (ServicePort(53, Protocol.UDP),)
    assert parse_ports("80:8080/tcp") == (ServicePort(80, Protocol.TCP, target=8080),)
    assert parse_ports("80:80") == parse_ports("80") == (ServicePort(80, Protocol.TCP),)
    assert parse_ports("54:5353/tcp, udp") == (
        ServicePort(54, Protocol.TCP, target=5353),
        ServicePort(54, Protocol.UDP, target=5353),
    )


@pytest.mark.parametrize(
    ("text", "address", "ports"),
    [
        ("10.96.0.10:53/udp", "10.96.0.10", "53/udp"),
        ("10.96.0.10:53", "10.96.0.10", "53"),
        ("10.96.0.10:80:8080/tcp", "10.96.0.10", "80:8080/tcp"),
        ("10.96.0.10:80:8080", "10.96.0.10", "80:8080"),
        ("10.96.0.10:53/tcp,udp", "10.96.0.10", "53/tcp,udp"),
        ("[FD00::10]:53:5353/tcp,udp", "fd00::10", "53:5353/tcp,udp"),
        ("[fd00::10]:53/UDP", "fd00::10", "53/udp"),
    ],
)
def test_address_and_ports(text: str, address: str, ports: str) -> None:
    assert parse_address_and_ports(text) == (address, parse_ports(ports))


@pytest.mark.parametrize(
    "text",
    ["10.96.0.10", "fd00::10:53", "fd00:96::1:80/tcp", "dns:53/udp", "http://10.96.0.1:80/", "[10.0.0.1]:80"],
)
def test_address_and_ports_refuses_as_a_frontend_is_refused(text: str) -> None:
    assert parsed_or_error(parse_address_and_ports, text) == parsed_or_error(parse_frontend, text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("3h", 10800), ("1d", 86400), ("0", 0)]
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


REFUSED: list[tuple[Callable[[str], object], str, str, str]] = [
    (parse_address, "", "empty", "write"),
    (parse_address, "010.0.0.1", "leading zeros", "write 10.0.0.1"),
    (parse_address, "10.0.0.256", "not an IPv4 address", "0..255"),
    (parse_address, "10.0.0.1/24", "prefix", "10.0.0.1"),
    (parse_address, "fe80::1%eth0", "zone id", "fe80::1"),
    (parse_address, "\n%eth0", "zone id", "leave out the part from % on"),
    (parse_address, "::ffff:10.0.0.1", "IPv4-mapped", "10.0.0.1"),
    (parse_address, "web-1.example.com", "a name", "write the address"),
    (parse_address, "10.0.0.1\n", "not an IP address", "write"),
    (parse_address, "١٠.0.0.1", "not an IP address", "write"),
    (parse_address, "fd00::10::1", "not an IP address", "write"),
    (parse_address, "[fd00::1]", "brackets", "alone"),
    (parse_address, "10.0.0.1:80", "has a port", "10.0.0.1"),
    (parse_address, "a" * 1_000_000 + "!", "not an IP address", "write"),
    (parse_backend, "10.0.0.1:", "not a port", "1 to 65535"),
    (parse_backend, "10.0.0.1:080", "leading zero", "decimal"),
    (parse_backend, "10.0.0.1:65536", "out of range", "1 to 65535"),
    (parse_backend, "10.0.0.1@65536", "out of range", "0 to 65535"),
    (parse_backend, "10.0.0.1@", "not a weight", "0 to 65535"),
    (parse_backend, "10.0.0.1@01", "leading zero", "decimal"),
    (parse_backend, "[fd00::1]", "no port", "alone: fd00::1"),
    (parse_backend, "[fd00::1", "closing bracket", "[fd00::10]:53"),
    (parse_backend, "[10.0.0.1]:80", "not IPv6", "brackets"),
    (parse_ports, "53/icmp", "not a protocol", "tcp, udp, sctp"),
    (parse_ports, "53/tcp,tcp", "twice", "once"),
    (parse_ports, "53:/tcp", "not a port", "1 to 65535"),
    (parse_ports, "53:0/tcp", "out of range", "1 to 65535"),
    (parse_ports, "53:1:2/tcp", "not a port", "1 to 65535"),
    (parse_address_and_ports, "[10.0.0.1]:80:81", "brackets", "leave"),
    (parse_address_and_ports, "10.96.0.10:80:x/tcp", "not a port", "1 to 65535"),
    (parse_ports, "53/", "not a protocol", "tcp"),
    (parse_ports, "dns", "not a port", "1 to 65535"),
    (parse_ports, "0", "out of range", "1 to 65535"),
    (parse_frontend, "10.96.0.10", "no port", "10.96.0.10:53/udp"),
    (parse_frontend, "fd00::10", "no port", "[fd00::10]:53/udp"),
    (parse_frontend, "dns:53/udp", "a name", "write the address"),
    (
        parse_frontend,
        "fd00:96::1:80/tcp",
        "without brackets",
        "write it like [fd00:96::1]:80/tcp, or, if all of it",
    ),
    (parse_frontend, "1:2:3:4:5:6:7:8:80", "without brackets", "[1:2:3:4:5:6:7:8]:80/tcp"),
    (parse_frontend, "http://10.96.0.1/", "a URL", "10.96.0.1:80/tcp"),
    (parse_frontend, "https://[fd00::1]", "a URL", "[fd00::1]:443/tcp"),
    (parse_frontend, "https://10.96.0.1:8443/x", "a URL", "10.96.0.1:8443/tcp"),
    (parse_frontend, "tcp://web:80", "a URL", "10.96.0.10:80/tcp"),
    (parse_backend, "http://10.0.0.1:80", "a URL", "write an address"),
    (parse_duration, "1.5h", "not a duration", "90s"),
    (parse_duration, "3 h", "not a duration", "90s"),
    (parse_duration, "-1s", "not a duration", "90s"),
    (parse_duration, "010", "not a duration", "90s"),
    (parse_duration, "99999d", "out of range", "at most"),
]


@pytest.mark.parametrize(("parse", "text", "what", "hint"), REFUSED)
def test_refusals_say_what_and_hint(parse: Callable[[str], object], text: str, what: str, hint: str) -> None:
    with pytest.raises(InvalidTextError) as refusal:
        parse(text)
    assert what in refusal.value.what
    assert hint in refusal.value.hint
    assert len(refusal.value.what) < 200


@PATIENT
@given(st.text(max_size=40) | st.text("[]0123456789abcdef:.@/%stpu", max_size=30))
def test_any_text_is_read_or_refused_by_name(text: str) -> None:
    for parse in (
        parse_address,
        parse_backend,
        parse_ports,
        parse_frontend,
        parse_address_and_ports,
        parse_duration,
    ):
        assert parsed_or_error(parse, text).isprintable()


def parsed_or_error(parse: Callable[[str], object], text: str) -> str:
    """What a refusal says, or the value as text; any other error passes through."""
    try:
        return str(parse(text))
    except InvalidTextError as refusal:
        return str(refusal)


@PATIENT
@given(st.ip_addresses(), st.none() | st.integers(1, 65535), st.integers(0, 65535))
def test_canonical_spelling_is_read_back(
    address: IPv4Address | IPv6Address, port: int | None, weight: int
) -> None:
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        return
    text = str(address) if port is None else socket_text(str(address), port)
    assert parse_backend(f"{text}@{weight}") == Backend(str(address), port, weight)
    if isinstance(address, IPv6Address):
        assert parse_address(address.exploded.upper()) == str(address)


@PATIENT
@given(st.integers(1, 10**9))
def test_durations_are_written_as_they_are_read(seconds: int) -> None:
    assert parse_duration(duration_text(seconds)) == seconds


def test_a_command_line_pays_for_the_standard_library_only() -> None:
    program = "import sys, vipd.declaration.syntax; print('yaml' in sys.modules or 'asyncio' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
