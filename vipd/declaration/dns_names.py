"""DNS names in backend lists: `dns:web.internal:80`, `srv:_http._tcp.web.internal`. Pure.

Every function takes text, returns a canonical value and raises `InvalidTextError`.
"""

from __future__ import annotations

import re

from vipd.declaration.syntax import (
    InvalidTextError,
    parse_address,
    parse_backend,
    parse_port_number,
    parse_weight,
    quoted,
)
from vipd.model.service import Backend, NamedBackend, NameKind

MAX_NAME = 253
"""Characters of a DNS name without its final dot (RFC 1035, 2.3.4: 255 octets on the wire)."""

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
DNS_NAME_PATTERN = rf"(?=[^@:]{{1,254}}(?:[:@]|$)){_LABEL}(?:\.{_LABEL})*\.?"
"""Labels of 1 to 63 letters, digits, hyphens and underscores, which SRV names begin with."""
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_BARE_NAME = re.compile(rf"((?=[0-9_.-]*[A-Za-z])(?!(?:dns|srv):){_LABEL}(?:\.{_LABEL})*\.?)((?::.*)?)")
_PREFIXES = tuple(f"{kind}:" for kind in NameKind)

NAME_HINT = f"labels of 1 to 63 of A-Z a-z 0-9 - _, separated by dots, {MAX_NAME} characters at most"


def parse_dns_name(text: str) -> str:
    """A DNS name in lower case without its final dot. It is looked up as it is, never below a search
    domain."""
    if not text.isascii():
        raise InvalidTextError(f"{quoted(text)} has letters beyond ASCII", "write it in its xn-- form")
    name = text.removesuffix(".").lower()
    if not _NAME.fullmatch(text) or len(name) > MAX_NAME:
        raise InvalidTextError(f"{quoted(text)} is not a DNS name", NAME_HINT)
    if name.rpartition(".")[2].isdecimal():
        raise InvalidTextError(f"{quoted(text)} is not a DNS name", "its last label has no letter")
    return name


def is_bare_name(text: str) -> bool:
    """Whether a host is meant by its name alone, as other programs write it."""
    return ":" not in text and _BARE_NAME.fullmatch(text) is not None


def is_named(text: str) -> bool:
    """Whether a backend is meant that has a name in place of an address."""
    return text.startswith(_PREFIXES)


def parse_named_backend(text: str) -> NamedBackend:
    """`dns:NAME`, `dns:NAME:PORT`, each optionally with `@WEIGHT`, or `srv:NAME`."""
    kind, _, rest = text.partition(":")
    body, at, weight = rest.partition("@")
    host, colon, port = body.partition(":")
    name = parse_dns_name(host)
    if kind == NameKind.SRV:
        if at or colon:
            raise InvalidTextError(
                f"{quoted(text)} has a port or weight", f"SRV records have their own: write srv:{name}"
            )
        return NamedBackend(NameKind.SRV, name)
    template = Backend("", parse_port_number(port) if colon else None, parse_weight(weight) if at else 1)
    return NamedBackend(NameKind.DNS, name, template)


def parse_any_backend(text: str) -> Backend | NamedBackend:
    """A backend by address or by name. A name without `dns:` is refused with the text to write: a mistyped
    address is never looked up."""
    try:
        return parse_backend(text)  # most are addresses
    except InvalidTextError:
        if is_named(text):
            return parse_named_backend(text)
        if _BARE_NAME.fullmatch(text) and "://" not in text:
            raise _name_without_prefix(text) from None
        raise


def parse_backend_address(text: str) -> str:
    """The value of `address` in a backend."""
    try:
        return parse_address(text)
    except InvalidTextError:
        if is_bare_name(text):
            what = f"{quoted(text)} is a name, not an IP address"
            hint = f"for the addresses that DNS has for it write dns: {text} in place of address"
            raise InvalidTextError(what, hint) from None
        raise


def _name_without_prefix(text: str) -> InvalidTextError:
    what = f"{quoted(text)} is a name, not an IP address"
    try:
        parse_named_backend(f"dns:{text}")
    except InvalidTextError as error:
        return InvalidTextError(what, f"write an IP address; {error}")
    return InvalidTextError(what, f"for the addresses that DNS has for it write dns:{text}")
