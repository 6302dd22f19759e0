"""Reads a slightly changed file again: only the services between the first and the last change.

That is enough if both texts are equal up to the beginning of a service and again from the beginning of
another one: a YAML reader is then in the same state at both places. This applies to a file of vipd/v1 with
one document whose last key is `services`, in block style. The changed part must be free of faults by itself.
In every other case, and after large changes, the whole text is read, so that the result never depends on an
earlier text. Pure.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vipd.declaration.conflicts import backend_addresses, find_conflicts
from vipd.declaration.native import parse_declaration
from vipd.declaration.pieces import Utf8, common_prefix, common_suffix, find, find_last, lines_before, search
from vipd.declaration.problems import Declaration
from vipd.model import limits
from vipd.model.service import Service

_VERSION = re.compile(rb"^apiVersion: +vipd/v1 *$", re.MULTILINE)
_SERVICES = re.compile(rb"^services: *(?:#.*)?$", re.MULTILINE)
_ITEM = re.compile(rb"( {0,100})- [^\s#]")
_OTHER_BREAKS = re.compile(rb"\r|\xc2\x85|\xe2\x80[\xa8\xa9]")
_REFERS = re.compile(rb"[&*]")

_LARGEST_HEAD = 2**20
"""Bytes before the first service."""
_LARGEST_CHANGE = 2**22
"""Bytes from the first change to the last: some ten thousand services."""
_LAST_LINE = 2**20
"""Last line of a change: that many empty lines replace the text before it, where no value may be as long."""


def parse_incrementally(
    text: str | Utf8, path: str, earlier: str | Utf8, earlier_declaration: Declaration, written_by: str = ""
) -> Declaration:
    """Returns what `parse_declaration` would for `text`.

    `earlier_declaration`: its result for an earlier text of the file.

    Services with the same lines and content stay the same objects.
    """
    text, earlier = (each.encode() if isinstance(each, str) else each for each in (text, earlier))
    change = _change(text, earlier, earlier_declaration)
    if change is not None:
        part = parse_declaration(change.text, path, written_by=written_by)
        found = _combined(earlier_declaration, change, part)
        if found is not None:
            return found
    return parse_declaration(text, path, written_by=written_by)


@dataclass(frozen=True, slots=True)
class _Change:
    """Which services of an earlier text must be read again, and their new text."""

    first: int
    """Index of the first."""
    end: int
    """Index behind the last."""
    text: bytes
    """Lines at their places: those before the first service, and those to be read."""
    shift: int
    """By how many lines the later services have moved."""


def _change(text: Utf8, earlier: Utf8, known: Declaration) -> _Change | None:
    """The part to read; None if that is the whole text."""
    lines = [service.origin.line for service in known.services]
    layout = _layout(earlier, lines[0]) if lines and known.ok and not known.notes else None
    if layout is None or _has_other_breaks(text):
        return None
    head, mark, outside = layout
    same = common_prefix(earlier, text)
    start = find_last(earlier, mark, head - 1, same) + 1
    if start < head or search(earlier, outside, head - 1):
        return None
    left = min(len(earlier), len(text)) - start
    rest = common_suffix(earlier, text, left)
    end = find(earlier, mark, len(earlier) - rest) + 1 if rest else 0
    end = end or len(earlier)
    if end - start > _LARGEST_CHANGE or len(text) - len(earlier) + end - start > _LARGEST_CHANGE:
        return None
    new, old = bytes(text[start : len(text) - len(earlier) + end]), bytes(earlier[start:end])
    if search(b"\n" + new, outside) or not new.startswith(mark[1:]) or _refers(new) or _refers(old):
        return None
    at = lines_before(earlier, start) + 1
    behind = at + lines_before(old, len(old))
    first, last = bisect_left(lines, at), bisect_left(lines, behind)
    if lines[first : first + 1] != [at] or (end < len(earlier) and lines[last : last + 1] != [behind]):
        return None
    above = bytes(earlier[:head])
    if at > _LAST_LINE:
        return None
    padded = above + b"\n" * (at - 1 - lines_before(above, head)) + new
    shift = lines_before(new, len(new)) - lines_before(old, len(old))
    return _Change(first, last if end < len(earlier) else len(lines), padded, shift)


def _has_other_breaks(text: Utf8) -> bool:
    return search(text, _OTHER_BREAKS)


def _refers(text: bytes) -> bool:
    return search(text, _REFERS)


def _layout(text: Utf8, line: int) -> tuple[int, bytes, re.Pattern[bytes]] | None:
    """Where the first service begins, the prefix of each, and a pattern for lines outside of all. None
    if the text cannot be read in part."""
    start = 0
    for _ in range(line - 1):
        start = find(text, b"\n", start) + 1
        if start > _LARGEST_HEAD:
            return None
    item = _ITEM.match(text, start)
    head = bytes(text[:start])
    if item is None or not start or not _VERSION.search(head) or not _SERVICES.search(head):
        return None
    if head.count(b"\n---") or head.startswith(b"---") or _has_other_breaks(text):
        return None
    mark = b"\n" + item[1] + b"- "
    return start, mark, re.compile(rb"\n(?!- )[^ #\n]" if not item[1] else rb"\n[^ #\n]")


def _combined(known: Declaration, change: _Change, read: Declaration) -> Declaration | None:
    """The known services with those that were read again; None if those have problems or notes."""
    if not read.ok or read.notes:
        return None
    before, between, behind = _split(known.services, change.first, change.end)
    fresh = _reuse_equal(between, read.services)
    if change.shift:
        behind = tuple(_shift_lines(service, change.shift) for service in behind)
    services = (*before, *fresh, *behind)
    more = not _claims(fresh) <= _claims(between) or _has_vips(
        services, _backends(fresh) - _backends(between)
    )
    if more and find_conflicts(services):
        return None
    if _size(fresh) > _size(between) and not _within_limits(services):
        return None
    return Declaration(services)


def _size(services: Sequence[Service]) -> int:
    return sum(map(limits.declared_size, services))


def _within_limits(services: Sequence[Service]) -> bool:
    return len(services) <= limits.SERVICES and _size(services) <= limits.MAX_UNIT_SIZE


def _split(services: Sequence[Service], first: int, end: int) -> tuple[tuple[Service, ...], ...]:
    return tuple(services[:first]), tuple(services[first:end]), tuple(services[end:])


def _reuse_equal(before: Sequence[Service], after: Sequence[Service]) -> list[Service]:
    """The services of `after`, those that are equal to one before and at the same line being that one."""
    known = {service.origin.line: service for service in before}
    found = []
    for service in after:
        twin = known.get(service.origin.line)
        found.append(twin if twin == service else service)
    return [service for service in found if service is not None]


def _shift_lines(service: Service, lines: int) -> Service:
    return replace(service, origin=replace(service.origin, line=service.origin.line + lines))


def _claims(services: Sequence[Service]) -> set[object]:
    return {claim for service in services for claim in (service.name, *service.frontends())}


def _backends(services: Sequence[Service]) -> set[str]:
    return {address for service in services for address in backend_addresses(service)}


def _has_vips(services: Sequence[Service], addresses: set[str]) -> bool:
    """Whether one of these addresses is a service's. Checks all services without a call for each."""
    return bool(addresses) and not addresses.isdisjoint({a for each in services for a in each.addresses})
