"""The formats that can be converted, and how a text is recognised. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from vipd.declaration.conversion.directives import Report
from vipd.declaration.conversion.draft import Conversion
from vipd.declaration.conversion.haproxy import read_haproxy
from vipd.declaration.conversion.ipvsadm import read_ipvsadm
from vipd.declaration.conversion.keepalived import read_keepalived
from vipd.declaration.conversion.nginx import read_nginx
from vipd.declaration.problems import Declaration, internal_problem

KUBERNETES = "kubernetes"
"""Also vipd/v1 itself: `native.parse_declaration` reads both."""

_READERS: dict[str, tuple[str, Callable[[Conversion, str], None]]] = {
    "ipvsadm": ("IPVS", read_ipvsadm),
    "keepalived": ("keepalived", read_keepalived),
    "haproxy": ("HAProxy", read_haproxy),
    "nginx": ("nginx", read_nginx),
}
FORMATS = (*_READERS, KUBERNETES)

_FIRST_LINE = re.compile(
    r"^[ \t]*+(?:"
    r"(?P<ipvsadm>(?:(?:\S*/)?ipvsadm[ \t]+)?"
    r"(?:-[AaEeDdC]|--(?:add|edit|delete)-(?:service|server)|--clear)\b)"
    r"|(?P<keepalived>(?:virtual_server(?:_group)?|vrrp_\w+|global_defs|static_\w+)(?=[ \t{]|$))"
    r"|(?P<haproxy>(?:global|defaults)[ \t]*+(?:\#|$)"
    r"|(?:defaults|frontend|backend|listen|peers)[ \t]++[^\s{;:#]++(?![^\n]*+[{;]))"
    r"|(?P<nginx>(?:stream|http|events|server|upstream[ \t]+\S++)\s*+\{)"
    r"|(?P<kubernetes>[\"']?(?:apiVersion|kind|items|services)[\"']?[ \t]*:|[{\[])"
    r")",
    re.MULTILINE,
)
"""What only one format has; the first such line decides."""


def format_of(text: str) -> str:
    """The format of a text, one of FORMATS; empty if it looks like none of them."""
    line = _FIRST_LINE.search(text)
    return (line.lastgroup if line else "") or ""


def convert_text(text: str, path: str, source_format: str, addresses: Sequence[str] = ()) -> Declaration:
    """The services that a configuration means. Never raises.

    `source_format`: one of FORMATS except KUBERNETES. `addresses`: virtual IPs for what listens on every
    address of the host, one of each family. Each service is one that vipd/v1 can declare, and none claims
    what another has. Problems are lines whose effect the services do not have; they are valid without it.
    """
    program, read = _READERS[source_format]
    report = Report(program, path)
    conversion = Conversion(report, addresses)
    try:
        read(conversion, text)
    except Exception as error:
        report.problems.add(internal_problem(error, f"converting from {source_format}", path))
    return conversion.finish()
