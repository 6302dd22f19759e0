"""Reading the tables of the nftables dataplane: chains from nft, elements over netlink. It only reads."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator

from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.saved_rules import Count
from vipd.dataplane.nftables import codec
from vipd.dataplane.nftables.layout import (
    AFFINITY_MAP,
    COMMENT_START,
    FLOWS,
    NftSet,
    allowed_sources_named,
    fixed_sets,
)
from vipd.dataplane.nftables.options import DEFAULT_AFFINITY_MAP_SIZE, TableOptions
from vipd.dataplane.nftables.reader import TableReader
from vipd.dataplane.programs import finish
from vipd.host.netlink import attributes, text
from vipd.host.process import Runner
from vipd.model.service import Family
from vipd.observe.rule_tree.nftables_table import TableReading, read_table_rules

_COUNTER, _COUNTERS = 7, 11
"""NFTA_SET_ELEM_EXPR, and since 5.11 a list of them."""


async def read_tables(prefix: str, run: Runner) -> list[TableReading]:
    """The table of each family that has one. Raises ApplyError; empty if the kernel has no nf_tables."""
    found = []
    for family in Family:
        table = TableOptions(family, prefix).table
        try:
            elements = await asyncio.to_thread(_read_elements, family, table.partition(" ")[2])
        except ApplyError as error:
            if "modprobe" in error.hint:
                continue
            raise
        if elements is None:
            continue
        listing = await _list(table, run)
        by_holder, flows, pins = elements
        found.append(TableReading(family, table, read_table_rules(listing), by_holder, flows, pins))
    return found


_Elements = tuple[dict[str, dict[str, str]], dict[str, Count], dict[tuple[str, str], int]]


def _read_elements(family: Family, table: str) -> _Elements | None:
    """The content of the maps, including elements that packets added; None if there is no table of vipd's."""
    reader = _ElementReader(family, table)
    with reader:
        there = reader.structure()
        if there.comment is None or not there.comment.startswith(COMMENT_START):
            return None
        known = [h for h in fixed_sets(family, DEFAULT_AFFINITY_MAP_SIZE) if h.name in there.sets]
        known += filter(None, map(allowed_sources_named, there.sets))
        found: dict[str, dict[str, str]] = defaultdict(dict)
        read = reader.elements([holder for holder in known if not holder.dynamic_flags])
        for (name, key), value in read.items():
            found[name][key] = value
        if FLOWS.name in there.sets:
            found.setdefault(FLOWS.name, {})
        flows = reader.counts(FLOWS) if FLOWS.name in there.sets else {}
        pins = next((holder for holder in known if holder.name == AFFINITY_MAP), None)
        return dict(found), flows, reader.affinity_counts(pins) if pins else {}


class _ElementReader(TableReader):
    """Reads the elements that packets add to a table."""

    def counts(self, nft_set: NftSet) -> dict[str, Count]:
        """The counters of elements, by their keys."""
        with self.understood():
            return {
                " . ".join(codec.key_fields(codec.data_of(element, 1), nft_set.key, self._of)): _counter(
                    element
                )
                for element in self._elements_of(nft_set)
            }

    def affinity_counts(self, nft_set: NftSet) -> dict[tuple[str, str], int]:
        """Number of pinned clients, by number of a service port (empty with IPv6) and of an endpoint."""
        with self.understood():
            return self._affinity_counts(nft_set)

    def _affinity_counts(self, nft_set: NftSet) -> dict[tuple[str, str], int]:
        found: Counter[tuple[str, str]] = Counter()
        for element in self._elements_of(nft_set):
            number = codec.key_fields(codec.data_of(element, 2), nft_set.value, self._of)[0]
            # With IPv6 the key is a hash of client and service port.
            plain = self._of is Family.IPV4
            key = codec.data_of(element, 1)
            service = codec.key_fields(key, nft_set.key, self._of)[1] if plain else ""
            found[service, number] += 1
        return dict(found)

    def _elements_of(self, nft_set: NftSet) -> Iterator[dict[int, bytes]]:
        for message in self._messages(codec.GET_ELEMENTS, self._table, nft_set.name):
            yield from codec.element_attributes(message.attributes)


def _counter(element: dict[int, bytes]) -> Count:
    expression = element.get(_COUNTER) or attributes(element.get(_COUNTERS, b"")).get(1)
    if expression is None:
        return Count(0, 0)
    found = attributes(expression)
    if text(found.get(1)) != "counter":
        return Count(0, 0)
    data = attributes(found.get(2, b""))
    return Count(codec.number(data.get(2)), codec.number(data.get(1)))


async def _list(table: str, run: Runner) -> str:
    """The chains as nft prints them; `-t` leaves out the elements."""
    finished = await finish(["nft", "-a", "-t", "list", "table", *table.split()], "", run)
    if finished.exit_code:
        why = " ".join(finished.stderr.split()) or f"exit code {finished.exit_code}"
        raise ApplyError(f"cannot list table {table}", why)
    return finished.stdout
