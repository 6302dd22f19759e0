"""Recognises requests of browsers, and the names by which they may address this host.

A web page elsewhere can make its own name resolve to this host (DNS rebinding), and so make the browser of a
user who can connect read the answers. All such requests come from browsers; monitoring may use any name.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Collection

from aiohttp import web

_MARKS = ("Accept-Language", "Origin", "Referer", "Sec-Fetch-Site", "Sec-Fetch-Mode")
"""Every browser sends the first: a page's script may change it, but cannot leave it out. Prometheus, its kin
and curl send none of them."""

NOT_OUR_NAME = (
    "this host is not called so here; hint: in a browser use its address, its host name, or localhost"
)
"""The text of the refusal."""


def foreign_browser(request: web.BaseRequest, names: Collection[str]) -> bool:
    """Whether a browser addresses this host by a name that others may control: its Host is neither an address
    of this host nor localhost nor one of `names`, which are this host's own, in lower case."""
    browser = any(mark in request.headers for mark in _MARKS)
    if not browser and not request.headers.get("User-Agent", "").startswith("Mozilla/"):
        return False
    own = request.transport.get_extra_info("sockname") if request.transport else None
    host = request.headers.get("Host", "")
    return not own_name(host, own[0] if own else "") and _without_port(host).lower() not in names


def own_name(host: str, address: str) -> bool:
    """Whether a Host header contains localhost, a loopback address, or the connection's local address."""
    name = _without_port(host)
    if name.lower() == "localhost":
        return True
    with contextlib.suppress(ValueError):
        found = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        return found.is_loopback or found == ipaddress.ip_address(address)
    return False


def _without_port(host: str) -> str:
    return re.sub(r":\d+$", "", host)
