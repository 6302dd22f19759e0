"""Rules without a kernel: what vipd would write for services, read as if the kernel had said it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vipd.control.selection import HostIdentity, SelectionPolicy, select_backends
from vipd.dataplane.base import Dataplane
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.render import render as render_rules
from vipd.dataplane.iptables.saved_rules import read_tables
from vipd.dataplane.nftables.layout import fixed_sets
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.render import render as render_table
from vipd.dataplane.nftables.table import DesiredTable
from vipd.host.settings.settings import Settings
from vipd.model.forwarding import Endpoint, Forwarding
from vipd.model.service import Family, Service
from vipd.observe.endpoint_views import forwarding_view
from vipd.observe.rule_tree.expected import Expected, expected_of
from vipd.observe.rule_tree.iptables_tree import IptablesRules
from vipd.observe.rule_tree.kernel_rules import DaemonRules
from vipd.observe.rule_tree.nftables_table import TableReading, read_table_rules

PLACE = "iptables v1.8.9 (nf_tables)"


def forwardings(services: Iterable[Service], own: Iterable[str] = ()) -> list[Forwarding]:
    """As the daemon chooses on a host with these addresses."""
    settings = Settings()
    masquerade = {family: settings.masquerade_for(family) for family in Family}
    policy = SelectionPolicy(masquerade, HostIdentity(frozenset(own)))
    return [forwarding for service in services for forwarding in select_backends(service, policy)]


def saved(found: Iterable[Forwarding], options: RuleOptions) -> IptablesRules:
    """The rules of one family, as iptables-save would print them."""
    text = render_rules(tuple(found), options)
    return read(text, options.prefix, options.family)


def read(text: str, prefix: str = "VIPD", family: Family = Family.IPV4) -> IptablesRules:
    """What iptables-save has printed."""
    return IptablesRules(read_tables(text), prefix, family, PLACE)


def table(found: Iterable[Forwarding], family: Family) -> TableReading:
    """A table of the nftables dataplane that holds just these."""
    options = TableOptions(family)
    chosen = [forwarding for forwarding in found if forwarding.key.family is family]
    wanted = DesiredTable(options)
    for forwarding in chosen:
        wanted.update(forwarding.key, forwarding)
    handlers = dict(wanted.structure().dispatch_map)
    names = (holder.name for holder in fixed_sets(family, 1000) if holder.name != "pins")
    elements: dict[str, dict[str, str]] = {name: {} for name in names} | {"handlers": handlers}
    for slot, value in wanted.elements():
        elements.setdefault(slot.set_name, {})[slot.key] = value
    chains = read_table_rules(render_table(chosen, options))
    return TableReading(family, options.table, chains, elements, {}, {})


class _Named:
    """Names chains as the iptables dataplane does."""

    def chains_of(self, forwarding: Forwarding) -> tuple[str, Mapping[Endpoint, str]]:
        """The names alone."""
        names = Names("VIPD")
        key = forwarding.key
        return names.service(key), {e: names.endpoint(key, e) for e in forwarding.reachable()}


def meant(found: Iterable[Forwarding]) -> list[Expected]:
    """What the daemon would say of these, by its own API."""
    dataplane: Dataplane = _Named()  # type: ignore[assignment]  # only its names are asked for
    return [
        wanted
        for forwarding in found
        for wanted in expected_of(
            {
                "name": forwarding.key.service,
                "status": {"state": "ok", "message": ""},
                "forwardings": [forwarding_view(forwarding, dataplane, {})],
            }
        )
    ]


def in_use(found: Iterable[Forwarding], place: str = PLACE) -> DaemonRules:
    """A daemon that means these, and keeps all rules in one place."""
    return DaemonRules(dict.fromkeys(Family, place), meant(found))
