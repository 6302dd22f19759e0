"""Hints for unquoted IPv6 addresses that YAML parses as something else. Pure."""

from __future__ import annotations

import re
from ipaddress import AddressValueError, IPv6Address

_BRACKETS = re.compile(r"""(?<!["'])\[([0-9A-Fa-f:.]{2,45})\]:[ ]?([0-9]{1,5}(?:@[0-9]{1,5})?)""")
"""A list as the key of a mapping."""
_EDGES = re.compile(
    r"""(?<![\w"':.\[])((?:::[0-9A-Fa-f:.]{0,43})|(?:[0-9A-Fa-f:]{2,43}::(?!/)))(/[0-9]{1,3})?(?=[\s,}\]]|$)"""
    r"""|(?<=\[)((?:::[0-9A-Fa-f:.]{0,43})|(?:[0-9A-Fa-f:]{2,43}::(?!/)))(/[0-9]{1,3})?(?=[\s,\]])"""
)
"""An address that begins or ends with a colon, which separates keys from values."""
_MAX_LINE_LENGTH = 4096


def hint_for_line(line: str) -> str:
    """The remedy for a line that is no YAML, if an IPv6 address in it is the cause; else empty."""
    if len(line) > _MAX_LINE_LENGTH:
        return ""
    for found in _BRACKETS.finditer(line):
        if _is_ipv6(found[1]):
            return _hint(f"[{found[1]}]:{found[2]}")
    for found in _EDGES.finditer(line):
        address = found[1] or found[3]
        if _is_ipv6(address):
            return _hint(address + (found[2] or found[4] or ""))
    return ""


def hint_for_value(value: object) -> str:
    """The same for a list or a mapping where text is required."""
    if isinstance(value, list) and len(value) == 1:
        (item,) = value
        return _hint(item) if isinstance(item, str) and _is_ipv6(item) else hint_for_value(item)
    if isinstance(value, dict) and len(value) == 1:
        return hint_for_key(next(iter(value)))
    return ""


def hint_for_key(key: str) -> str:
    """The same of a key: `fd00::` is `fd00:` and nothing."""
    address = next((text for text in (key, f"{key}:") if _is_ipv6(text)), "")
    return _hint(address) if address else ""


def _hint(text: str) -> str:
    return f'put IPv6 in quotes: "{text}"'


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except AddressValueError:
        return False
    return True
