"""Resolves the target of `vipctl rules`, and finds what the kernel has of it.

Three steps: `resolve_*` ask the daemon which service ports are meant, `search_*` derive what has to be read
of a large table, and `read_kernel` reads it. Without a daemon the rules themselves say whose they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vipd.dataplane.base import ApplyError
from vipd.dataplane.forward_accept.removal import find_leftovers
from vipd.dataplane.iptables.names import hashed
from vipd.dataplane.nftables.options import TableOptions
from vipd.declaration.syntax import InvalidTextError, parse_frontend
from vipd.host.process import Runner
from vipd.model.service import Family
from vipd.observe.api_client import Client, ClientError, DaemonError, url_path
from vipd.observe.doctor.collect.daemon import serves_elsewhere
from vipd.observe.rule_tree.expected import Expected, expected_of
from vipd.observe.rule_tree.iptables_tree import IptablesRules
from vipd.observe.rule_tree.kernel_rules import ChainName, DaemonRules, KernelRules
from vipd.observe.rule_tree.nftables_table import TableReading
from vipd.observe.rule_tree.read_iptables import Search, read_rules
from vipd.observe.rule_tree.read_nftables import read_tables
from vipd.observe.rule_tree.tree import ServicePortKey, ServiceTree, SharedTree

_NOT_FOUND = 404
_OF_SERVICE = ("SVC", "SVL", "EXT", "LIM")


class UnknownTargetError(LookupError):
    """The kernel has nothing of this name: what, and a hint."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}; hint: {hint}")
        self.what, self.hint = what, hint


@dataclass(frozen=True, slots=True)
class RulesQuery:
    """The request. Without a target everything."""

    target: str
    client: Client
    prefix: Callable[[], str]
    """Returns the prefix of chains, if no daemon does."""
    run: Runner
    warn: Callable[[str], None]
    """Receives the reason for a long duration."""


@dataclass(frozen=True, slots=True)
class RulesResult:
    """The result."""

    shared: Sequence[SharedTree] = ()
    services: Sequence[ServiceTree] = ()
    chain: str = ""
    """The requested chain."""
    owner_text: str = ""
    """The owner of the chain."""
    notes: tuple[str, ...] = ()
    """The origin of names, and other notes."""
    seconds: float = 0.0
    """Duration of reading the kernel."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """What the daemon said of itself, or why it says nothing of this kernel."""

    client: Client
    places: Mapping[Family, str] | None
    """Where it keeps its rules; None when no daemon of this network namespace answers."""
    prefix: str = ""
    """That of its chains, where it answers."""
    notes: tuple[str, ...] = ()
    """Why it does not answer."""

    def in_use(self, expected: Sequence[Expected] = ()) -> DaemonRules | None:
        """What the kernel's rules are compared with."""
        return None if self.places is None else DaemonRules(self.places, expected)


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the daemon has of a target; nothing when it does not answer, or knows no such service."""

    expected: Sequence[Expected] = ()
    notes: tuple[str, ...] = ()
    """What the services that it was asked about suffer from."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read of the kernel, and how long that took."""

    iptables: Sequence[IptablesRules]
    tables: Sequence[TableReading]
    seconds: float

    def rules(self, in_use: DaemonRules | None = None) -> KernelRules:
        """The rules, compared with what the daemon means."""
        return KernelRules(self.iptables, self.tables, in_use)


async def resolve_target(query: RulesQuery) -> RulesResult:
    """Raises UnknownTargetError, and ApplyError when the kernel cannot be read, or not be understood."""
    try:
        daemon = ask_daemon(query.client)
        if chain := ChainName.read(query.target):
            return await _of_chain(query, daemon, chain)
        prefix = daemon.prefix or query.prefix()
        if query.target:
            return await _of_service(query, daemon, prefix)
        return await _everything(query, daemon, prefix)
    except (UnknownTargetError, ApplyError, ClientError):
        raise
    except (ValueError, LookupError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ApplyError("what the kernel has cannot be read", why, "please report it") from error


async def _everything(question: RulesQuery, daemon: Daemon, prefix: str) -> RulesResult:
    resolved = resolve_all(daemon)
    reading = await read_kernel(question, prefix, None)
    rules = reading.rules(daemon.in_use(resolved.expected))
    accepts = [
        f"{found.forward_chain} has a rule of vipd that accepts translated flows"
        for found in await find_leftovers((prefix,), (), question.run)
    ]
    shared, services = rules.all_trees()
    notes = (*daemon.notes, *resolved.notes, *accepts, *_notes_on(rules))
    return RulesResult(shared, services, notes=notes, seconds=reading.seconds)


async def _of_service(question: RulesQuery, daemon: Daemon, prefix: str) -> RulesResult:
    target = question.target
    resolved = resolve_name(daemon, target)
    expected = resolved.expected
    search = search_owned(prefix, expected) if expected else search_frontend(target)
    reading = await read_kernel(question, prefix, search)
    rules = reading.rules(daemon.in_use(expected))
    services = rules.find(target)
    if not services:
        raise _unknown(f"no service {target} in the kernel", rules)
    notes = (*daemon.notes, *resolved.notes, *_notes_on(rules))
    return RulesResult(services=services, notes=notes, seconds=reading.seconds)


async def _of_chain(question: RulesQuery, daemon: Daemon, chain: ChainName) -> RulesResult:
    """The services that a chain is of; the chain alone if it is of all services, or of none that is known."""
    name = chain.name
    alone = await read_kernel(question, chain.prefix, Search(chains=frozenset({name})))
    rules = alone.rules(daemon.in_use())
    there = rules.chain(name)
    keys = rules.owners(name) if chain.of_service else []
    resolved = resolve_chain(daemon, chain, keys)
    expected, notes = resolved.expected, (*daemon.notes, *resolved.notes)
    if keys or expected:
        owned = await _read_owners(question, chain, keys, expected)
        rules = owned.rules(daemon.in_use(expected))
        services = rules.trees_of({*keys, *(each.key for each in expected)})
        said, seconds = _owner_of(chain, keys, expected, bool(there)), alone.seconds + owned.seconds
        return RulesResult((), services, name, said, (*notes, *_notes_on(rules)), seconds)
    if not there:
        never = ", and no service has had one of that name" if chain.of_service else " of vipd"
        raise _unknown(f"no chain {name}{never}", rules)
    said = f"{name} belongs to no service that is known" if chain.of_service else ""
    return RulesResult(there, (), name, said, (*notes, *_notes_on(rules)), alone.seconds)


async def _read_owners(
    question: RulesQuery, chain: ChainName, keys: Sequence[ServicePortKey], expected: Sequence[Expected]
) -> Reading:
    """What the kernel has of the service ports of a chain."""
    prefix = chain.prefix
    if expected:
        return await read_kernel(question, prefix, search_owned(prefix, expected, keys))
    chains = frozenset({chain.name, *_chains(prefix, keys)})
    first = await read_kernel(question, prefix, Search(chains=chains))
    reading = await read_kernel(question, prefix, search_leading(first.rules(), keys, chains))
    return replace(reading, seconds=first.seconds + reading.seconds)


def ask_daemon(client: Client) -> Daemon:
    """What the daemon says of itself. Raises LookupError, ValueError or TypeError for what no daemon says."""
    try:
        status = client.get(url_path("status"))
    except ClientError as error:
        return Daemon(client, None, notes=(f"the daemon does not answer ({error})",))
    if serves_elsewhere(int(status["pid"]), Path("/")):
        return Daemon(client, None, notes=("the daemon that answers works in another network namespace",))
    prefix = str(status["settings"].get("chain_prefix", ""))
    dataplane = status["dataplane"]
    if dataplane["name"] == "nftables":
        return Daemon(client, {f: f"table {TableOptions(f, prefix).table}" for f in Family}, prefix)
    return Daemon(client, {f: str(dataplane[str(f)]) for f in Family if dataplane.get(str(f))}, prefix)


def resolve_all(daemon: Daemon) -> Resolved:
    """Every service. Raises ClientError, here and below."""
    return _ask_services(daemon, "services")


def resolve_name(daemon: Daemon, name: str) -> Resolved:
    """A service by its name or a frontend, or a service port: its service's name, a colon and its own."""
    found = _ask_services(daemon, "services", name)
    service = name.rpartition(":")[0]
    if found.expected or not service:
        return found
    found = _ask_services(daemon, "services", service)
    return replace(found, expected=[each for each in found.expected if each.key.service_port == name])


def resolve_chain(daemon: Daemon, chain: ChainName, keys: Sequence[ServicePortKey]) -> Resolved:
    """The owners of a chain: `keys` by the rules that lead to it; without any the service port whose chain it
    would be, by its hash. An unnamed port has its service's name.
    """
    if not chain.of_service:
        return Resolved()
    if not keys:
        found = resolve_all(daemon)
        return replace(found, expected=[each for each in found.expected if chain.role_in(each)])
    named = [(key, resolve_name(daemon, key.service_port)) for key in keys]
    expected = [each for key, found in named for each in found.expected if each.key == key]
    return Resolved(expected, tuple(note for _, found in named for note in found.notes))


def _ask_services(daemon: Daemon, *segments: str) -> Resolved:
    """The forwardings of ServiceViews."""
    if daemon.places is None:
        return Resolved()
    try:
        answer = daemon.client.get(url_path(*segments))
    except DaemonError as error:
        if error.status == _NOT_FOUND:
            return Resolved()
        raise
    views = [answer["service"]] if "service" in answer else answer["services"]
    expected = [each for view in views for each in expected_of(view)]
    quarantined = {each.service: each.message for each in expected if each.state == "quarantined"}
    notes = [f"{name} is quarantined: {message}" for name, message in quarantined.items()]
    if any(each.state == "pending" for each in expected):
        notes.append("a change is on its way to the kernel")
    return Resolved(expected, tuple(notes))


def search_owned(prefix: str, expected: Sequence[Expected], keys: Sequence[ServicePortKey] = ()) -> Search:
    """What leads to service ports that the daemon has, and their chains."""
    addresses = frozenset(address for each in expected for address in each.addresses)
    known = {*keys, *(each.key for each in expected)}
    chains = {name for each in expected for name in each.chains.values() if name} | _chains(prefix, known)
    return Search(addresses, frozenset(key.service_port for key in known), frozenset(chains))


def search_frontend(target: str) -> Search | None:
    """What leads on from a frontend; None for anything else: only all of the table will do."""
    try:
        return Search(frozenset({parse_frontend(target).address}))
    except InvalidTextError:
        return None


def search_leading(
    rules: KernelRules, keys: Sequence[ServicePortKey], chains: frozenset[str]
) -> Search | None:
    """What leads to service ports that no daemon knows: most services' own chains, of which `rules` are, have
    the addresses that lead to them. None where they have not.
    """
    addresses = frozenset(rules.addresses_in(chains))
    return Search(addresses, frozenset(key.service_port for key in keys), chains) if addresses else None


def _chains(prefix: str, keys: Iterable[ServicePortKey]) -> set[str]:
    """The chains of iptables that are named after service ports."""
    return {f"{prefix}-{kind}-{hashed(''.join(key))}" for key in keys for kind in _OF_SERVICE}


async def read_kernel(question: RulesQuery, prefix: str, search: Search | None) -> Reading:
    """The rules under a prefix; of large tables what is searched for at least. Raises ApplyError."""
    began = time.monotonic()
    iptables = await read_rules(prefix, search, question.run, question.warn)
    tables = await read_tables(prefix, question.run)
    return Reading(iptables, tables, time.monotonic() - began)


def _notes_on(rules: KernelRules) -> list[str]:
    """Where names come from, and what is of no use."""
    notes = []
    if rules.daemon is None and rules.tables and not rules.iptables:
        notes.append("nftables has no names of services: each frontend stands for itself")
    elif rules.daemon is None:
        notes.append("names are those in the comments on rules; nothing could be compared")
    for place in rules.unused_places():
        notes.append(f"{place} has rules that vipd does not use now; hint: vipctl doctor")
    return notes


def _owner_of(
    chain: ChainName, keys: Sequence[ServicePortKey], expected: Sequence[Expected], there: bool
) -> str:
    """Whose chain it is, or was."""
    by_hash = next((meant for each in expected if (meant := chain.role_in(each))), "")
    owner = by_hash or ", ".join(key.service_port for key in keys)
    return f"{chain.name} is of {owner}" if there else f"{chain.name} was of {owner}; it is not there now"


def _unknown(what: str, rules: KernelRules) -> UnknownTargetError:
    if not rules.places():
        return UnknownTargetError(what, "the kernel has no rule of vipd; see vipctl status")
    if rules.daemon is None and rules.tables:
        hint = "the daemon does not answer, and nftables knows no names: give a frontend"
        return UnknownTargetError(what, hint)
    return UnknownTargetError(what, "vipctl rules shows all; vipctl list what vipd has")
