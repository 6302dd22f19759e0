"""Reading a file again of which little has changed: only the services between the first and the last change.

That is enough where both texts are the same up to the beginning of a service and again from the beginning of
another one: a YAML reader is then in the same state at both places. It is so in a file of vipd/v1 with one
document whose last key is `services`, in block style. What is read anew has to be without fault by itself.
In every other case the whole text is read, so that what is found never depends on an earlier text. Pure.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vipd import limits
from vipd.declaration.conflicts import backend_addresses, find_conflicts
from vipd.declaration.native import parse_declaration
from vipd.declaration.problems import Declaration
from vipd.model import Service

_VERSION = re.compile(r"^apiVersion: +vipd/v1 *$", re.MULTILINE)
_SERVICES = re.compile(r"^services: *(?:#.*)?$", re.MULTILINE)
_ITEM = re.compile(r"( *)- [^\s#]")
_OTHER_BREAKS = ("\r", "\x85", "\u2028", "\u2029")


def parse_again(text: str, path: str, earlier: str, known: Declaration, source: str = "file") -> Declaration:
    """What `parse_declaration` says of `text`, when it has said `known` of an earlier text of the same file.

    Services that stand where they stood and say the same stay the same objects.
    """
    change = _change(text, earlier, known)
    found = change and _combined(change, path, known, source)
    return found or parse_declaration(text, path, source)


@dataclass(frozen=True, slots=True)
class _Change:
    """Which services of an earlier text have to be read anew, and their new text."""

    first: int
    """Index of the first."""
    end: int
    """Index behind the last."""
    text: str
    """Lines at their places: what stands before the first service, and those that have to be read."""
    shift: int
    """By how many lines the services behind have moved."""


def _change(text: str, earlier: str, known: Declaration) -> _Change | None:
    """What has to be read; None if that is the whole text."""
    lines = [service.origin.line for service in known.services]
    layout = _layout(earlier, lines[0]) if lines and known.ok and not known.notes else None
    if layout is None or any(mark in text for mark in _OTHER_BREAKS):
        return None
    head, mark, outside = layout
    same = _common_prefix(earlier, text)
    start = earlier.rfind(mark, head - 1, same) + 1
    if start < head or outside.search(earlier, head - 1):
        return None
    left = min(len(earlier), len(text)) - start
    rest = _common_suffix(earlier, text, left)
    end = earlier.find(mark, len(earlier) - rest) + 1 if rest else 0
    end = end or len(earlier)
    new, old = text[start : len(text) - len(earlier) + end], earlier[start:end]
    if outside.search("\n" + new) or not new.startswith(mark[1:]) or any(c in new + old for c in "&*"):
        return None
    at = earlier.count("\n", 0, start) + 1
    behind = at + old.count("\n")
    first, last = bisect_left(lines, at), bisect_left(lines, behind)
    if lines[first : first + 1] != [at] or (end < len(earlier) and lines[last : last + 1] != [behind]):
        return None
    above = earlier[:head]
    padded = above + "\n" * (at - 1 - above.count("\n")) + new
    return _Change(
        first, last if end < len(earlier) else len(lines), padded, new.count("\n") - old.count("\n")
    )


def _layout(text: str, line: int) -> tuple[int, str, re.Pattern[str]] | None:
    """Where the first service begins, what each begins with, and how to find what stands outside of all. None
    unless the text is one of those that can be read in part."""
    start = 0
    for _ in range(line - 1):
        start = text.find("\n", start) + 1
    item = _ITEM.match(text, start)
    head = text[:start]
    if item is None or not start or not _VERSION.search(head) or not _SERVICES.search(head):
        return None
    if head.count("\n---") or head.startswith("---") or any(mark in text for mark in _OTHER_BREAKS):
        return None
    mark = f"\n{item[1]}- "
    return start, mark, re.compile(r"\n(?!- )[^ #\n]" if not item[1] else r"\n[^ #\n]")


def _combined(change: _Change, path: str, known: Declaration, source: str) -> Declaration | None:
    """The known services with those that were read anew; None if there is anything to be said of them."""
    read = parse_declaration(change.text, path, source)
    if not read.ok or read.notes:
        return None
    before, between, behind = _split(known.services, change.first, change.end)
    fresh = _kept(between, read.services)
    if change.shift:
        behind = tuple(_moved(service, change.shift) for service in behind)
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
    return sum(map(limits.size_of, services))


def _within_limits(services: Sequence[Service]) -> bool:
    return len(services) <= limits.SERVICES and _size(services) <= limits.UNIT_ENDPOINTS


def _split(services: Sequence[Service], first: int, end: int) -> tuple[tuple[Service, ...], ...]:
    return tuple(services[:first]), tuple(services[first:end]), tuple(services[end:])


def _kept(before: Sequence[Service], after: Sequence[Service]) -> list[Service]:
    """The services of `after`, those that are equal to one before and at the same line being that one."""
    known = {service.origin.line: service for service in before}
    found = []
    for service in after:
        twin = known.get(service.origin.line)
        found.append(twin if twin == service else service)
    return [service for service in found if service is not None]


def _moved(service: Service, lines: int) -> Service:
    return replace(service, origin=replace(service.origin, line=service.origin.line + lines))


def _claims(services: Sequence[Service]) -> set[object]:
    return {claim for service in services for claim in (service.name, *service.frontends())}


def _backends(services: Sequence[Service]) -> set[str]:
    return {address for service in services for address in backend_addresses(service)}


def _has_vips(services: Sequence[Service], addresses: set[str]) -> bool:
    """Whether one of these addresses is a service's. All are looked through, which takes no call for each."""
    return bool(addresses) and not addresses.isdisjoint({a for each in services for a in each.addresses})


def _common_prefix(one: str, other: str) -> int:
    """How many characters are the same at the beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common_suffix(one: str, other: str, most: int) -> int:
    """How many characters are the same at the end, at most so many."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if one[len(one) - middle : len(one) - low] == other[len(other) - middle : len(other) - low]:
            low = middle
        else:
            high = middle - 1
    return low
