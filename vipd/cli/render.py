"""`vipctl render`: the rules that declarations compile to, without a daemon and without root."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

import click

from vipd.cli.argument_types import FILE, settings_options
from vipd.cli.errors import USAGE, CliError
from vipd.cli.inputs import read_inputs
from vipd.cli.offline import Compilation, admitted, host_addresses, read_settings
from vipd.dataplane.iptables.render import TABLES
from vipd.dataplane.iptables.render import render as render_rules
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.render import render as render_table
from vipd.host.settings.settings import Settings
from vipd.host.settings.settings_file import DEFAULT_CONFIG
from vipd.model.service import Family, Service, TrafficDistribution, TrafficPolicy, family_of

FAMILIES = {str(family): family for family in Family}


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=FILE)
@click.option(
    "--dataplane",
    type=click.Choice(["iptables", "nftables"]),
    default="iptables",
    show_default=True,
    help="Whose rules.",
)
@click.option(
    "--family",
    type=click.Choice(list(FAMILIES), case_sensitive=False),
    help="Address family; default: that of the services, ipv4 if they have both.",
)
@click.option("--table", type=click.Choice(TABLES), help="Only this table.")
@settings_options(f"Settings, instead of {DEFAULT_CONFIG}.")
def render(
    files: tuple[str, ...],
    dataplane: str,
    family: str | None,
    table: str | None,
    settings_file: str | None,
    assignments: tuple[str, ...],
) -> None:
    """Print the rules that declarations compile to, as one input for iptables-restore, or for nft -f.

    They hold vipd's own chains and the jumps to them from the built-in ones, so that an empty network
    namespace that loads them behaves as if vipd had programmed it. FILE may be a directory, or - for
    standard input.

    \b
    vipctl render dns.yaml | ip netns exec lab iptables-restore
    """
    settings = read_settings(settings_file, assignments)
    own = settings.host_addresses or ()
    services = admitted(read_inputs(files), settings, own, any_port=True).require_ok()
    chosen = FAMILIES[family.lower()] if family else _family_of(services)
    if any(service.names for service in services):
        print("vipctl: backends by name are left out: the daemon looks names up", file=sys.stderr)
    compiled = Compilation.of(services, settings, _host_addresses(settings, services))
    if dataplane == "nftables":
        if table:
            raise CliError("--table is for iptables", hint="the nftables dataplane has one table", code=USAGE)
        options = TableOptions.of(settings, chosen, frozenset(compiled.host_addresses))
        sys.stdout.write(render_table(compiled.forwardings, options))
        return
    tables = (table,) if table else TABLES
    sys.stdout.write(render_rules(compiled.forwardings, compiled.options(chosen), tables))


def _host_addresses(settings: Settings, services: Sequence[Service]) -> Collection[str]:
    """The host's addresses as set; read from the kernel only where the rules depend on them."""
    local = any(
        TrafficPolicy.LOCAL in (s.internal_policy, s.external_policy)
        or s.traffic_distribution is TrafficDistribution.PREFER_SAME_NODE
        for s in services
    )
    limited = any(s.allow_from or any(e.allow_from for e in s.external_addresses) for s in services)
    if settings.host_addresses is None and not (local or limited or settings.node_port_addresses):
        return ()
    return host_addresses(settings)


def _family_of(services: Sequence[Service]) -> Family:
    """The only family of the services, or IPv4 with a word about the other."""
    families = {family_of(address) for service in services for address in service.all_addresses()}
    if len(families) > 1:
        print("vipctl: these are the IPv4 rules; --family ipv6 prints the others", file=sys.stderr)
    return min(families, default=Family.IPV4)
