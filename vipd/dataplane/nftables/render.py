"""The whole table of some forwardings as one input for `nft -f`, for an empty namespace. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from functools import partial

from vipd.dataplane.engine import ObjectId
from vipd.dataplane.nftables.base_chains import HOOKS
from vipd.dataplane.nftables.layout import (
    REPLY_FRONTENDS,
    REPLY_SOURCES,
    TABLE_COMMENT,
    NftSet,
    allowed_sources_named,
    digest,
)
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.table import CHAIN, SET, WantedTable
from vipd.model.forwarding import Forwarding


def render(forwardings: Iterable[Forwarding], options: TableOptions) -> str:
    """The table, or nothing without forwardings. Forwardings of other families are left out."""
    table = WantedTable(options)
    for forwarding in forwardings:
        if forwarding.key.family is options.family:
            table.update(forwarding.key, forwarding)
    objects = dict(table.engine.objects())
    if not objects:
        return ""
    elements: dict[str, list[str]] = {}
    for (kind, key), value in objects.items():
        elements.setdefault(kind, []).append(f"{key} : {value}" if value else key)
    sets = sorted((name for kind, name in objects if kind == SET), key=partial(_rank, table.engine.frame()))
    chains = {name: text.split("\n")[1:] for (kind, name), text in objects.items() if kind == CHAIN}
    parts = [f'\tcomment "{TABLE_COMMENT}"']
    parts += ["\n".join(_holder(table.sets[name], options, elements.get(name, ()))) for name in sets]
    parts += ["\n".join(_chain(name, rules)) for name, rules in chains.items()]
    return "\n\n".join([f"table {options.table} {{", *parts]).replace("{\n\n", "{\n", 1) + "\n}\n"


def _rank(frame: Container[ObjectId], name: str) -> tuple[int, str]:
    """The place of a set: first those that always exist, then those of sources, replies and limits."""
    if name in (REPLY_SOURCES.name, REPLY_FRONTENDS.name):
        return 2, ""
    if (SET, name) in frame:
        return 0, ""
    return (1, name) if allowed_sources_named(name) else (3, "")


def _holder(holder: NftSet, options: TableOptions, elements: Sequence[str]) -> Iterator[str]:
    yield f"\t{holder.kind} {holder.name} {{"
    for line in holder.declaration(options.family).split("; "):
        yield f"\t\t{line.rstrip(';')}"
    if elements:
        yield "\t\telements = {"
        yield from (f"\t\t\t{element}," for element in sorted(elements))
        yield "\t\t}"
    yield "\t}"


def _chain(name: str, rules: Iterable[str]) -> Iterator[str]:
    hook = HOOKS.get(name)
    yield f"\tchain {name} {{"
    yield from (f"\t\t{hook}",) if hook else ()
    yield from (f'\t\t{rule} comment "{digest(rule)}"' for rule in rules)
    yield "\t}"
