"""The common part of verbs that compile declarations without a daemon: settings, addresses, forwardings.

It imports parts of the daemon, which are slow to import: verbs that can also use a daemon import it on
demand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vipd.cli.errors import NOT_FOUND, USAGE, CliError
from vipd.cli.inputs import Inputs
from vipd.control.address_policy import AddressPolicy, admit_addresses, admit_service, port_share_problem
from vipd.control.selection import SelectionPolicy, select_backends
from vipd.dataplane.chosen import ChosenDataplane
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.nftables.options import TableOptions
from vipd.declaration.problems import Problem
from vipd.declaration.syntax import MAX_PORT
from vipd.host.facts import NO_FACTS, HostFacts
from vipd.host.settings.settings import Settings, balances_of, load_settings
from vipd.host.settings.settings_file import DEFAULT_CONFIG, SettingsError, parse_assignments
from vipd.model.forwarding import Forwarding
from vipd.model.service import Family, Service
from vipd.observe.api_client import Json
from vipd.observe.explain.explanation import explain
from vipd.observe.explain.query import QueryError, ask


@dataclass(frozen=True, slots=True)
class Compilation:
    """Services as a daemon with these settings would forward them on a host with these addresses."""

    settings: Settings
    host_addresses: frozenset[str]
    forwardings: tuple[Forwarding, ...]

    @classmethod
    def of(
        cls, services: Iterable[Service], settings: Settings, host_addresses: Collection[str]
    ) -> Compilation:
        """Choose the backends of every service."""
        policy = SelectionPolicy.of(settings, host_addresses)
        chosen = tuple(forwarding for service in services for forwarding in select_backends(service, policy))
        return cls(settings, frozenset(host_addresses), chosen)

    def options(self, family: Family) -> RuleOptions:
        """The options of one family's rules, for an iptables that can do everything."""
        return RuleOptions.of(self.settings, family, random_fully=True, host_addresses=self.host_addresses)

    def table_options(self, family: Family) -> TableOptions:
        """The options of one family's table, for an nftables that can do everything."""
        return TableOptions.of(self.settings, family, self.host_addresses)


def read_settings(file: str | None, assignments: Sequence[str]) -> Settings:
    """The settings of a file, else of the default one, and of assignments. Raises CliError."""
    default = DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None
    try:
        return load_settings(Path(file) if file else default, parse_assignments(assignments))
    except SettingsError as error:
        raise CliError("unusable settings", code=USAGE, details=tuple(error.problems)) from None


def admitted(
    inputs: Inputs,
    settings: Settings,
    own: Collection[str],
    facts: HostFacts = NO_FACTS,
    *,
    any_port: bool = False,
    lan_holders: bool = True,
) -> Inputs:
    """The inputs with a problem for each thing that services may not claim on such a host. `any_port`:
    whatever ports of the host they claim; `lan_holders`: as of AddressPolicy."""
    compatible = settings.compat == "kube-proxy"
    policy = AddressPolicy(
        settings.allowed_addresses,
        () if compatible else tuple(own),
        settings.exec_sources,
        balances_of(ChosenDataplane(settings.state_dir).read() or settings.dataplane),
        host=facts.without_addresses() if compatible else facts,
        backends=settings.allowed_backends,
        host_ports=() if any_port else settings.host_ports,
        host_ports_per_author=MAX_PORT if any_port else settings.host_ports_per_author,
        announced=settings.announce_addresses,
        names=settings.allowed_names,
        flow_limits=settings.has_own_chains,
        lan_holders=lan_holders,
    )
    left_out, services = list[Problem](), list[Service]()
    for declared in inputs.services:
        service, problems = admit_addresses(declared, policy)
        services.append(service)
        left_out += (*problems, *admit_service(service, policy))
    by_author: dict[str, list[Service]] = {}
    for service in services:
        by_author.setdefault(service.origin.author, []).append(service)
    shares = (port_share_problem(some, (), policy.host_ports_per_author) for some in by_author.values())
    left_out += filter(None, shares)
    return inputs._replace(services=tuple(services), problems=tuple(sorted({*inputs.problems, *left_out})))


def host_addresses(settings: Settings) -> Collection[str]:
    """This host's addresses as set, else read from the kernel."""
    if settings.host_addresses is not None:
        return settings.host_addresses
    # Imported on use: asyncio and netlink are slow to import.
    import asyncio

    from vipd.control.host import host_addresses as read

    return asyncio.run(read())


def host_facts(settings: Settings, own: Collection[str]) -> HostFacts:
    """The facts about this host that limit claims; none for a host whose addresses settings name."""
    if settings.host_addresses is not None:
        return NO_FACTS
    import asyncio

    from vipd.host.reader import HostReader

    return asyncio.run(HostReader(settings).read(frozenset(own)))


def explain_files(
    services: Sequence[Service], settings: Settings, source: str, target: str, dataplane: str = ""
) -> Json:
    """The API's explanation of a packet, computed here, by the rules of a dataplane; by default the one in
    the settings, where `auto` means iptables. Raises CliError."""
    compiled = Compilation.of(services, settings, host_addresses(settings))
    try:
        question = ask(source, target, compiled.forwardings, compiled.host_addresses)
    except QueryError as error:
        code = NOT_FOUND if error.unknown else USAGE
        shown = "" if error.hint.startswith("vipctl list") else error.hint
        raise CliError(error.what, error.why, shown, code=code) from None
    by_table = (dataplane or settings.dataplane) == "nftables"
    options = (compiled.table_options if by_table else compiled.options)(question.packet.family)
    return explain(question, compiled.forwardings, options, compiled.host_addresses).view()
