"""The short forms of addresses, ports, backends, frontends and durations, in files and on the command line.

Imports the standard library and `vipd.model` only, so that a command line starts fast. Pure. Every
function takes text, returns a canonical value and raises `InvalidTextError` with the fault and the way out.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from ipaddress import AddressValueError, IPv6Address, ip_network
from typing import NoReturn

from vipd.model.service import MAX_WEIGHT, Backend, Frontend, Protocol, ServicePort, family_of, socket_text

MAX_PORT = 65535

MAX_SECONDS = 10**9
"""Longest duration in seconds, some thirty years: larger ones are typing errors."""

_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
IPV4_PATTERN = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_IPV4 = re.compile(IPV4_PATTERN)
_IPV4_BACKEND = re.compile(rf"({IPV4_PATTERN})(?::([1-9][0-9]{{0,4}}))?(?:@(0|[1-9][0-9]{{0,4}}))?")
_IPV4_LIKE = re.compile(r"[0-9]+(?:\.[0-9]+){3}")
_HOST_NAME = re.compile(r"(?=[0-9_.-]*[A-Za-z])[A-Za-z0-9_.-]+")
_PREFIX_LENGTH = re.compile(r"0|[1-9][0-9]{0,2}")
_DIGITS = re.compile(r"[0-9]{1,18}")
_ADDRESS_AND_PORTS = re.compile(
    r"(?:\[([0-9A-Fa-f.]*:[0-9A-Fa-f:.]*)\]|([^]:/\[]+)):([0-9]+:[^:/]*(?:/.*)?|[0-9]+/.*,.*)", re.DOTALL
)
"""Several ports, or one with the backends' port."""
_DURATION = re.compile(r"(0|[1-9][0-9]{0,17})([smhd]?)")
_PERIOD = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)(ms|s|m|)")
_PERIOD_UNITS = {"ms": 1, "s": 1000, "": 1000, "m": 60_000}
_PERCENT = re.compile(r"([0-9]{1,3})%")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_PROTOCOLS = {protocol.value: protocol for protocol in Protocol}
_WELL_KNOWN_PORTS = {
    "http": 80,
    "https": 443,
    "dns": 53,
    "domain": 53,
    "ssh": 22,
    "smtp": 25,
    "ldap": 389,
    "ldaps": 636,
    "imap": 143,
    "imaps": 993,
    "mysql": 3306,
    "postgres": 5432,
    "postgresql": 5432,
    "redis": 6379,
}
"""What a name that stands for a port means."""
_MAX_SHOWN_LENGTH = 60


class InvalidTextError(ValueError):
    """Text in the wrong form: `what` is wrong, and a `hint` at the remedy (may be empty)."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(f"{what}; {hint}" if hint else what)
        self.what = what
        self.hint = hint


def quoted(text: str) -> str:
    """The text in the form of messages: in quotes, on one line, truncated if long, other scripts as
    escapes."""
    cut = text if len(text) <= _MAX_SHOWN_LENGTH else text[: _MAX_SHOWN_LENGTH - 3] + "..."
    return json.dumps(cut).replace("\x7f", "\\u007f")


def parse_address(text: str) -> str:
    """An IPv4 or IPv6 address in its canonical form. No port, prefix, zone or IPv4-mapped form."""
    if _IPV4.fullmatch(text):
        return text
    if ":" not in text or "/" in text or "%" in text:
        _refuse_address(text)
    try:
        address = IPv6Address(text)
    except AddressValueError:
        _refuse_address(text)
    if address.ipv4_mapped is not None:
        what = f"{quoted(text)} is an IPv4-mapped IPv6 address"
        raise InvalidTextError(what, f"write the IPv4 address {address.ipv4_mapped}")
    return str(address)


def parse_network(text: str, *, mask: bool = False) -> str:
    """A network as `ADDR/LENGTH` in its canonical spelling; an address alone is the network of it alone. Host
    bits are refused, or cleared with `mask`."""
    base, slash, length = text.partition("/")
    address = parse_address(base)
    most = family_of(address).bits
    if not slash:
        return f"{address}/{most}"
    if not _PREFIX_LENGTH.fullmatch(length) or int(length) > most:
        hint = f"a whole number from 0 to {most} after the slash"
        raise InvalidTextError(f"{quoted(text)} has no usable prefix length", hint)
    network = str(ip_network(f"{address}/{length}", strict=False))
    if not mask and network != f"{address}/{length}":
        raise InvalidTextError(f"{quoted(text)} has bits set beyond its prefix", f"write {network}")
    return network


@lru_cache(maxsize=4096)
def parse_ports(text: str) -> tuple[ServicePort, ...]:
    """`53/udp`, `80:8080/tcp` with the backends' port, `53/tcp,udp` for a port of each protocol; `53` alone
    is TCP."""
    numbers, slash, protocols = text.partition("/")
    number, colon, behind = numbers.partition(":")
    port = parse_port_number(number)
    target = parse_port_number(behind) if colon else port
    words = protocols.replace(", ", ",").split(",") if slash else ["tcp"]
    named = [parse_protocol(word) for word in words]
    if len({*named}) < len(named):
        raise InvalidTextError(f"{quoted(text)} names a protocol twice", "name each protocol once")
    return tuple([ServicePort(port, p, target=None if target == port else target) for p in named])


def parse_port_number(text: str) -> int:
    """A port, 1..65535, in decimal without leading zeros."""
    number = _WELL_KNOWN_PORTS.get(text.lower())
    hint = f"a port is a number from 1 to {MAX_PORT}" + (f": write {number}" if number else "")
    return _decimal(text, "port", range(1, MAX_PORT + 1), hint)


def parse_protocol(text: str) -> Protocol:
    """`tcp`, `udp` or `sctp`, in upper or lower case."""
    protocol = _PROTOCOLS.get(text) or _PROTOCOLS.get(text.lower())
    if protocol is None:
        raise InvalidTextError(f"{quoted(text)} is not a protocol", f"one of {', '.join(_PROTOCOLS)}")
    return protocol


def parse_backend(text: str) -> Backend:
    """`ADDR`, `ADDR:PORT` or `[IPV6]:PORT`, each optionally with `@WEIGHT`."""
    if _IPV4.fullmatch(text):  # most are an address alone
        return Backend(text)
    fast = _IPV4_BACKEND.fullmatch(text)
    if fast:
        address, port, weight = fast.groups()
        if int(port or 1) <= MAX_PORT and int(weight or 1) <= MAX_WEIGHT:
            return Backend(address, int(port) if port else None, int(weight) if weight else 1)
    if "://" in text:
        raise InvalidTextError(
            f"{quoted(text)} is a URL", "write an address, and a port if it needs one of its own"
        )
    body, at, weight = text.partition("@")
    number = parse_weight(weight) if at else 1
    address, port = _split_socket(body)
    return Backend(parse_address(address), parse_port_number(port) if port is not None else None, number)


def parse_weight(text: str) -> int:
    """A weight, 0..65535, in decimal without leading zeros."""
    hint = f"a weight is a whole number from 0 to {MAX_WEIGHT}"
    return _decimal(text, "weight", range(MAX_WEIGHT + 1), hint)


def _decimal(text: str, noun: str, allowed: range, hint: str) -> int:
    if not _DIGITS.fullmatch(text):
        raise InvalidTextError(f"{quoted(text)} is not a {noun}", hint)
    if text[0] == "0" and len(text) > 1:
        raise InvalidTextError(f"the {noun} {quoted(text)} has a leading zero", "write it in plain decimal")
    if int(text) not in allowed:
        raise InvalidTextError(f"the {noun} {text} is out of range", hint)
    return int(text)


def parse_frontend(text: str) -> Frontend:
    """`10.96.0.10:53/udp` or `[fd00::10]:53/udp`; without `/PROTOCOL` it is TCP."""
    if "://" in text:
        _refuse_url(text)
    body, slash, protocol = text.partition("/")
    address, port = _split_socket(body)
    if port is None:
        _refuse_network(text)
        _refuse_bare_ipv6(text, body, protocol or "tcp")
        canonical = parse_address(address)
        example = f"[{canonical}]:53/udp" if ":" in canonical else f"{canonical}:53/udp"
        raise InvalidTextError(f"{quoted(text)} has no port", f"write it like {example}")
    number = parse_port_number(port)
    return Frontend(parse_address(address), number, parse_protocol(protocol) if slash else Protocol.TCP)


def parse_address_and_ports(text: str) -> tuple[str, tuple[ServicePort, ...]]:
    """What a new service is reached at: a frontend, whose port has any form of `parse_ports`."""
    found = _ADDRESS_AND_PORTS.fullmatch(text)
    if found:
        return parse_address(found[1] or found[2]), parse_ports(found[3])
    frontend = parse_frontend(text)
    return frontend.address, (ServicePort(frontend.port, frontend.protocol),)


def parse_duration(text: str) -> int:
    """`90s`, `10m`, `3h`, `1d` or a bare number of seconds, as whole seconds."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise InvalidTextError(
            f"{quoted(text)} is not a duration", "write a whole number and a unit: 90s, 10m, 3h or 1d"
        )
    seconds = int(match[1]) * _UNITS[match[2]]
    if seconds > MAX_SECONDS:
        raise InvalidTextError(f"the duration {quoted(text)} is out of range", f"at most {MAX_SECONDS}s")
    return seconds


def duration_text(seconds: int) -> str:
    """The shortest form that `parse_duration` reads back: 10800 is `3h`. For `seconds` >= 1."""
    for unit in ("d", "h", "m"):
        if seconds % _UNITS[unit] == 0:
            return f"{seconds // _UNITS[unit]}{unit}"
    return f"{seconds}s"


def parse_period(text: str) -> float:
    """A duration that may be short: `500ms`, `2.5s`, `1m` or a number of seconds, as seconds."""
    match = _PERIOD.fullmatch(text)
    if match is None:
        raise InvalidTextError(
            f"{quoted(text)} is not a duration", "write a number and a unit: 500ms, 2s or 1m"
        )
    # Whole milliseconds, so that equal durations are equal however they are written.
    return round(float(match[1]) * _PERIOD_UNITS[match[2]]) / 1000


def period_text(seconds: float) -> str:
    """The short form that `parse_period` reads back: 0.5 is `500ms`, 60 is `1m`. For whole milliseconds."""
    milliseconds = round(seconds * 1000)
    if milliseconds % 1000:
        return f"{milliseconds}ms"
    return duration_text(milliseconds // 1000) if milliseconds < 3_600_000 else f"{milliseconds // 1000}s"


def parse_percent(text: str) -> float:
    """`10%` as 0.1, from 0% to 100%."""
    match = _PERCENT.fullmatch(text)
    if match is None or int(match[1]) > 100:
        raise InvalidTextError(f"{quoted(text)} is not a percentage", "write a whole number and %: 10%")
    return int(match[1]) / 100


def _split_socket(text: str) -> tuple[str, str | None]:
    """Address and port text, with the brackets off; the port is None when there is none."""
    if text.startswith("["):
        return _split_brackets(text)
    if text.count(":") == 1:
        address, _, port = text.partition(":")
        return address, port
    return text, None


def _split_brackets(text: str) -> tuple[str, str]:
    address, closed, rest = text[1:].partition("]")
    if not closed:
        raise InvalidTextError(f"{quoted(text)} lacks the closing bracket", "write it like [fd00::10]:53")
    if ":" not in address:
        raise InvalidTextError(
            f"{quoted(text)} has brackets around what is not IPv6", "leave the brackets out"
        )
    if not rest.startswith(":"):
        hint = f"write a port after the brackets, or the address alone{_spelled(address)}"
        raise InvalidTextError(f"{quoted(text)} has brackets but no port", hint)
    return address, rest[1:]


def _spelled(text: str) -> str:
    """The end of a hint with the correct address: `: fd00::5`. Empty if the text is none."""
    try:
        return f": {parse_address(text)}"
    except InvalidTextError:
        return ""


def _refuse_url(text: str) -> NoReturn:
    scheme, _, rest = text.partition("://")
    host = rest.partition("/")[0]
    has_port = ":" in host.rpartition("]")[2]
    port = "" if has_port else {"http": ":80", "https": ":443"}.get(scheme.lower(), "")
    try:
        found = parse_frontend(f"{host}{port}")
        example = f"{socket_text(found.address, found.port)}/tcp"
    except InvalidTextError:
        example = "10.96.0.10:80/tcp"
    raise InvalidTextError(f"{quoted(text)} is a URL", f"write address, port and protocol: {example}")


def _refuse_bare_ipv6(text: str, body: str, protocol: str) -> None:
    """Raise NotationError for `fd00::10:53`, in which the end of the address is ambiguous."""
    address, _, port = body.rpartition(":")
    if not _DIGITS.fullmatch(port) or address.count(":") < 2 or not _spelled(address):
        return
    address = parse_address(address)
    hint = f"write it like [{address}]:{port}/{protocol}"
    if _spelled(body):
        hint += f", or, if all of it is the address, [{parse_address(body)}]:PORT/{protocol}"
    raise InvalidTextError(f"{quoted(text)} has an IPv6 address without brackets", hint)


def _refuse_network(text: str) -> None:
    """Raise InvalidTextError for `10.96.0.0/24`, also with a port behind it."""
    base, _, rest = text.partition("/")
    address, length = base.strip("[]"), re.match("[0-9]{1,3}", rest)
    if not (length and _spelled(address)):
        return
    address = parse_address(address)
    try:
        several = ip_network(f"{address}/{length[0]}").num_addresses > 1
    except ValueError:
        several = False  # it has bits beyond the prefix: an address is meant, with its network
    if several:
        what = f"{quoted(text)} is a network, not an address"
        raise InvalidTextError(what, f"write one address, as {address}")
    raise InvalidTextError(f"{quoted(text)} has a prefix or protocol", f"write the address alone: {address}")


def _refuse_address(text: str) -> NoReturn:
    name = quoted(text)
    bare = text.partition("/")[0].partition("%")[0]
    if not text:
        raise InvalidTextError("the address is empty", "write an IPv4 or IPv6 address")
    if "%" in text:
        raise InvalidTextError(f"{name} has a zone id", f"leave out the part from % on{_spelled(bare)}")
    _refuse_network(text)
    if "/" in text:
        raise InvalidTextError(f"{name} has a prefix or protocol", f"write the address alone{_spelled(bare)}")
    if "[" in text or "]" in text:
        raise InvalidTextError(f"{name} has brackets", "write the address alone, without brackets or a port")
    if _IPV4_LIKE.fullmatch(text):
        _refuse_ipv4(text)
    address, colon, port = text.partition(":")
    if colon and _DIGITS.fullmatch(port) and _IPV4.fullmatch(address):
        raise InvalidTextError(f"{name} has a port", f"write the address alone: {address}")
    if _HOST_NAME.fullmatch(text):
        raise InvalidTextError(
            f"{name} is a name, not an IP address", "names are not resolved: write the address"
        )
    raise InvalidTextError(f"{name} is not an IP address", "write an IPv4 or IPv6 address")


def _refuse_ipv4(text: str) -> NoReturn:
    octets = text.split(".")
    plain = ".".join(octet.lstrip("0") or "0" for octet in octets)
    if plain != text and _IPV4.fullmatch(plain):
        raise InvalidTextError(
            f"{quoted(text)} has leading zeros, which some programs read as octal", f"write {plain}"
        )
    raise InvalidTextError(f"{quoted(text)} is not an IPv4 address", "each of the four numbers is 0..255")


_SPECIAL_OCTETS = {"0", "127", "169", "255", *map(str, range(224, 240))}

FORBIDDEN_VIP_KINDS = {
    "unspecified": "a service needs one definite address",
    "loopback": "loopback addresses never leave a host: choose an address of its own for the service",
    "multicast": "a service needs a unicast address",
    "link-local": "link-local addresses are not routed: choose another one",
    "broadcast": "a service needs a unicast address",
}
"""Kinds of addresses that cannot be a service's, with the hint."""

FORBIDDEN_BACKEND_KINDS = {
    "unspecified": "write the address that the backend listens on",
    "loopback": "DNAT to loopback needs the sysctl route_localnet, which vipd never sets: let the backend "
    "listen on another address of this host",
    "multicast": "a backend needs a unicast address",
    "link-local": "link-local IPv6 addresses need an interface: use a routed address",
    "broadcast": "a backend needs a unicast address",
}
"""The same for backends; there link-local counts for IPv6 only."""


def address_kind(address: str) -> str:
    """`unspecified`, `loopback`, `multicast`, `link-local` or `broadcast` of a canonical address, else ""."""
    if ":" in address:
        return _ipv6_kind(address)
    first = address.partition(".")[0]
    if first not in _SPECIAL_OCTETS:
        return ""
    if first == "127":
        return "loopback"
    if first == "169":
        return "link-local" if address.startswith("169.254.") else ""
    if first in {"0", "255"}:
        return {"0.0.0.0": "unspecified", "255.255.255.255": "broadcast"}.get(address, "")  # noqa: S104
    return "multicast"


def _ipv6_kind(address: str) -> str:
    parsed = IPv6Address(address)
    if parsed.is_unspecified:
        return "unspecified"
    if parsed.is_loopback:
        return "loopback"
    if parsed.is_multicast:
        return "multicast"
    return "link-local" if parsed.is_link_local else ""


def resolved_address_fault(address: str) -> str:
    """Why an address that a name resolved to can be no backend; empty: it can."""
    try:
        kind = address_kind(parse_address(address))
    except InvalidTextError as error:
        return error.what
    return f"it is {with_article(kind)} address" if kind and (kind != "link-local" or ":" in address) else ""


def with_article(kind: str) -> str:
    """A kind of address as in "an unspecified address"."""
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
