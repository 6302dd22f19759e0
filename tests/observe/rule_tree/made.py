"""Rules without a kernel: what vipd would write for services, read as if the kernel had said it."""

from __future__ import annotations

from collections.abc import Iterable

from tests.lab.inside import forwardings as forwardings
from tests.observe.rule_tree.test_damage import SVC as SVC
from tests.observe.rule_tree.test_damage import TEXT as TEXT
from tests.observe.rule_tree.test_damage import with_first as with_first
from vipd.dataplane.iptables.saved_rules import read_tables
from vipd.dataplane.nftables.layout import fixed_sets
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.render import render as render_table
from vipd.dataplane.nftables.table import CHAIN, SET, WantedTable
from vipd.model.forwarding import Forwarding
from vipd.model.service import Affinity, Backend, Family, Protocol, Service, ServicePort
from vipd.observe.rule_tree.iptables_tree import IptablesRules
from vipd.observe.rule_tree.nftables_table import TableReading, read_table_rules

PLACE = "iptables v1.8.9 (nf_tables)"
WEB = Service(
    "shop/web",
    ("10.96.0.1",),
    (ServicePort(80, Protocol.TCP, "http", 8080, 30080),),
    (Backend("10.244.0.1"), Backend("10.244.0.2"), Backend("10.244.0.3")),
    affinity=Affinity(600),
)


def read(text: str, prefix: str = "VIPD", family: Family = Family.IPV4) -> IptablesRules:
    """What iptables-save has printed."""
    return IptablesRules(read_tables(text), prefix, family, PLACE)


def table(found: Iterable[Forwarding], family: Family) -> TableReading:
    """A table of the nftables dataplane that holds just these."""
    options = TableOptions(family)
    chosen = [forwarding for forwarding in found if forwarding.key.family is family]
    wanted = WantedTable(options)
    for forwarding in chosen:
        wanted.update(forwarding.key, forwarding)
    names = (holder.name for holder in fixed_sets(family, 1000) if holder.name != "pins")
    elements: dict[str, dict[str, str]] = {name: {} for name in names}
    for (kind, key), value in wanted.engine.objects():
        if kind not in (CHAIN, SET):
            elements.setdefault(kind, {})[key] = value
    chains = read_table_rules(render_table(chosen, options))
    return TableReading(family, options.table, chains, elements, {}, {})
