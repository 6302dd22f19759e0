"""Reads a file of plain services in a fraction of the time that its YAML nodes take.

The file must be one of vipd/v1, whose only keys are `apiVersion` and, at its end, `services` in block style.
Then a YAML reader is in the same state at the beginning of each service. One that has no keys but name,
address, ports and backends is read by one pattern; any other one as YAML, by itself. Whatever else the file
contains, and if anything in it is wrong, the result is None: then all of it must be read as YAML, so that no
problem depends on this module. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from vipd.declaration.conflicts import has_conflicts
from vipd.declaration.fields import Report
from vipd.declaration.nodes import Mapping, Scalar, Sequence, other_meaning
from vipd.declaration.pieces import Utf8, find, lines_before
from vipd.declaration.policy_reader import ServiceDefaults
from vipd.declaration.port_reader import read_ports
from vipd.declaration.service_reader import SERVICE_NAME, read_service
from vipd.declaration.service_rules import address_kind, unique_ports
from vipd.declaration.service_size import check_total_size
from vipd.declaration.syntax import InvalidTextError, parse_address, parse_backend
from vipd.declaration.yaml_tree import read_tree
from vipd.model import limits
from vipd.model.frozen import fast_constructor
from vipd.model.service import Frontend, Origin, Service, ServicePort

_LARGEST_HEAD = 2**20
"""Bytes before the first service."""
_LONGEST = 2**16
"""Bytes of what is read at once: a service by pattern with the comments behind it, or others as YAML."""
_MOST_BACKENDS, _MOST_PORTS = 1000, 10
"""Of a service that is read by pattern: below every limit."""

_BLANK = rb"(?: *(?:#[\t -~]*)?\n)*"
_HEAD = re.compile(rb"%bapiVersion: +vipd/v1 *\n%bservices: *\n%b( {0,100})- " % (_BLANK, _BLANK, _BLANK))
_WORD = rb"[0-9.]+(?::[0-9]+)?(?:@[0-9]+)?"
_WORDS = re.compile(_WORD)
_FOREIGN = re.compile(rb"[\r&*]|\xc2\x85|\xe2\x80[\xa8\xa9]|^(?!- )[^ #\n]", re.MULTILINE)
"""Other ends of lines than those counted here, references, which may lead to another service, and lines that
are of no service: the end of a document is one."""
_NODE_STARTS = (b"[", b"{", b",", b":", b"\n", b"\n", b"- ", b"- ", b"?")
"""Characters after which a YAML node may begin, as often as several may."""

_new_service, _new_origin = fast_constructor(Service), fast_constructor(Origin)


def read_plain_services(text: Utf8, origin: Origin, *, accepted: bool = False) -> list[Service] | None:
    """The services that `parse_declaration` reads of a text without a problem or note. None if it has any,
    and for every other text."""
    head = _HEAD.match(text, 0, _LARGEST_HEAD)
    if head is None:
        return None
    services, values = [], 0
    report = Report(origin.path, accepted)
    for found, more in _services(text, head.start(1), len(head[1]), origin):
        values += more
        for service in found:
            services.append(service)
            if not check_total_size(report, service, len(services)):
                return None
        if not found or values > limits.YAML_VALUES:
            return None
    return None if has_conflicts(services, addresses=not accepted) else services


def _services(text: Utf8, at: int, indent: int, origin: Origin) -> Iterator[tuple[list[Service], int]]:
    """The services from an offset on, some at a time, each time with the number of their YAML nodes at most.
    None of them: there is a problem."""
    line, dash = lines_before(text, at) + 1, b" " * indent + b"- "
    match = _match(text, at, dash)
    while at < len(text):
        place = _new_origin(origin.source, origin.path, line, "", origin.written_by)
        service = match and _plain_service(match, place)
        if match and service:
            end = match.end()
            yield [service], 10 + len(service.backends) + _ports(match[4])[1]
            match = _match(text, end, dash)
        else:
            end = _next(text, dash, at)
            while (match := _match(text, end, dash)) is None and end < min(at + _LONGEST, len(text)):
                end = _next(text, dash, end)
            part = bytes(text[at:end])
            yield _read_as_yaml(part, line, origin), sum(map(part.count, _NODE_STARTS))
        line += lines_before(text, end, at)
        at = end


def _match(text: Utf8, at: int, dash: bytes) -> re.Match[bytes] | None:
    """The service at an offset, if the pattern reads all of it."""
    match = _item(len(dash) - 2).match(text, at, at + _LONGEST)
    whole = match and (match.end() == len(text) or text.startswith(dash, match.end()))
    return match if whole else None


def _next(text: Utf8, dash: bytes, at: int) -> int:
    """Where the next service begins; at the last one the end of the text."""
    return find(text, b"\n" + dash, at) + 1 or len(text)


@lru_cache(maxsize=8)
def _item(indent: int) -> re.Pattern[bytes]:
    """A service with these keys alone, each once. Its groups: the dash before it, name, address, ports,
    backends, and the dash before each of these."""
    pad = b" " * (indent + 2)
    fields = (
        rb"(?(2)(?!)|name: ([A-Za-z0-9][A-Za-z0-9._/-]*))",
        rb"(?(3)(?!)|address: ([0-9.]+))",
        rb"(?(4)(?!)|ports: ([0-9][a-z0-9:/]*|\[[!-~ ]*\]))",
        rb"(?(5)(?!)|backends:( \[%b(?:,(?: |\n%b +)%b)*\]|\n(%b *- )%b(?:\n\6%b)*))"
        % (_WORD, pad, _WORD, pad, _WORD, _WORD),
    )
    return re.compile(rb"(?:(?(1)%b|(%b- ))(?:%b)\n)+%b" % (pad, b" " * indent, b"|".join(fields), _BLANK))


def _plain_service(match: re.Match[bytes], origin: Origin) -> Service | None:
    """A service that was read by pattern; None unless it is without fault by itself."""
    _, name, address, ports, backends, _ = match.groups()
    if address is None or ports is None or backends is None:
        return None
    found, own = _ports(ports)[0], address.decode()
    words = _WORDS.findall(backends)
    if not found or len(words) > _MOST_BACKENDS:
        return None
    try:
        parsed = tuple([parse_backend(word.decode()) for word in words])
        parse_address(own)
    except InvalidTextError:
        return None
    addresses = {backend.address for backend in parsed}
    if own in addresses or len(addresses) < len(parsed) or any(map(address_kind, (own, *addresses))):
        return None
    service_name = str(Frontend(own, found[0].port, found[0].protocol)) if name is None else name.decode()
    if name is not None and (
        not SERVICE_NAME.fullmatch(service_name) or other_meaning(Scalar(0, service_name, plain=True))
    ):
        return None
    service: Service = _new_service(service_name, (own,), found, parsed, origin=origin)
    return service


@lru_cache(maxsize=256)
def _ports(text: bytes) -> tuple[tuple[ServicePort, ...], int]:
    """The ports of a service, and how many YAML nodes they have at most. None of them unless all is right."""
    tree, report = read_tree(text, ""), Report("")
    values = 1 + sum(map(text.count, _NODE_STARTS))
    if tree.problems or len(tree.documents) != 1:
        return (), values
    found = tuple([port.value for port in unique_ports(report, read_ports(report, tree.documents[0], ""))])
    unlike = len(report.problems) or len(found) > _MOST_PORTS or any(port.node_port for port in found)
    return () if unlike else found, values


def _read_as_yaml(part: bytes, line: int, origin: Origin) -> list[Service]:
    """The services in a part of a text that begins at this line; none if anything is wrong with one."""
    if _FOREIGN.search(part):
        return []
    tree = read_tree(b"services:\n" + part, origin.path)
    document = tree.documents[0] if len(tree.documents) == 1 and not tree.problems else None
    items = (
        document.items.get("services") if isinstance(document, Mapping) and len(document.items) == 1 else None
    )
    if not isinstance(items, Sequence):
        return []
    report, services = Report(origin.path), []
    for item in items.items:
        place = origin.at(item.line + line - 2)
        service = read_service(report, item, "services[]", ServiceDefaults(), place)
        if service is None or len(report.problems) or report.notes():
            return []
        services.append(service)
    return services
