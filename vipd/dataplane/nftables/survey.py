"""Reads the content of a table concurrently with other work, and computes what must be written. The cached
state of the kernel stays, so that this does not slow the next change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from vipd.dataplane.nftables.layout import DISPATCH_MAP, NftSet
from vipd.dataplane.nftables.plan import Installed, Plan, make_plan, must_replace
from vipd.dataplane.nftables.reader import TableReader
from vipd.dataplane.nftables.table import DesiredTable, Elements, Step

Survey: TypeAlias = tuple[Installed, Elements]
"""A table as read: its structure, and the elements of its services."""


def service_sets(table: DesiredTable) -> dict[str, NftSet]:
    """The maps and sets whose elements belong to services, by name."""
    wanted = table.structure().sets
    return {n: h for n, h in wanted.items() if not h.dynamic_flags and h is not DISPATCH_MAP}


def read_survey(reader: TableReader, holders: Mapping[str, NftSet]) -> Survey:
    """Read a table. It blocks; raises ApplyError."""
    installed = reader.structure()
    return installed, reader.elements([h for n, h in holders.items() if n in installed.sets])


def difference(table: DesiredTable, surveyed: Survey) -> Plan:
    """The plan for a kernel in the surveyed state."""
    options, wanted = table.options, table.structure()
    installed, found = surveyed
    if not wanted.chains:
        return make_plan(options, wanted, installed, (), Step((), {}, {}))
    anew = must_replace(options, wanted, installed) or installed.comment is None
    steps, shared = table.compare({} if anew else found, service_sets(table))
    return make_plan(options, wanted, installed, steps, shared)
