"""Resolves the target of `vipctl rules`, and finds what the kernel has of it; asks a daemon that answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vipd.dataplane.base import ApplyError
from vipd.dataplane.forward_accept.removal import find_leftovers
from vipd.dataplane.iptables.names import hashed
from vipd.dataplane.nftables.options import TableOptions
from vipd.declaration.syntax import InvalidTextError, parse_frontend
from vipd.host.process import Runner
from vipd.model.service import Family
from vipd.observe.api_client import Client, ClientError, RefusedError, url_path
from vipd.observe.doctor.collect.daemon import serves_elsewhere
from vipd.observe.rule_tree.expected import Expected, expected_of
from vipd.observe.rule_tree.kernel_rules import ChainName, InUse, KernelRules
from vipd.observe.rule_tree.read_iptables import Search, read_rules
from vipd.observe.rule_tree.read_nftables import read_tables
from vipd.observe.rule_tree.tree import Key, ServiceTree, SharedTree

_NOT_FOUND = 404
_OF_SERVICE = ("SVC", "SVL", "EXT")


class UnknownTargetError(LookupError):
    """The kernel has nothing of this name: what, and a hint."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}; hint: {hint}")
        self.what, self.hint = what, hint


@dataclass(frozen=True, slots=True)
class Question:
    """The request. Without a target everything."""

    target: str
    client: Client
    prefix: Callable[[], str]
    """Returns the prefix of chains, if no daemon does."""
    run: Runner
    warn: Callable[[str], None]
    """Receives the reason for a long duration."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result."""

    shared: Sequence[SharedTree] = ()
    services: Sequence[ServiceTree] = ()
    chain: str = ""
    """The requested chain."""
    said: str = ""
    """The owner of the chain."""
    notes: tuple[str, ...] = ()
    """The origin of names, and other notes."""
    seconds: float = 0.0
    """Duration of reading the kernel."""


async def look(question: Question) -> Answer:
    """Raises UnknownTargetError, and ApplyError when the kernel cannot be read, or not be understood."""
    try:
        return await _Look(question).answer()
    except (UnknownTargetError, ApplyError, ClientError):
        raise
    except (ValueError, LookupError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ApplyError("what the kernel has cannot be read", why, "please report it") from error


class _Look:
    """The work on one question."""

    def __init__(self, question: Question) -> None:
        self._question, self._client = question, question.client
        self._target, self._prefix = question.target, ""
        self._chain = ChainName.read(question.target)
        self._notes: list[str] = []
        self._seconds = 0.0
        self._places: dict[Family, str] | None = None
        """Where the daemon keeps its rules; None when none answers."""

    async def answer(self) -> Answer:
        """By the kind of target."""
        self._places = self._ask_status()
        self._prefix = self._prefix or self._question.prefix()
        if not self._target:
            return await self._everything()
        return await (self._of_chain(self._chain) if self._chain else self._of_service())

    async def _everything(self) -> Answer:
        forest = await self._read(None, self._wanted(self._ask("services")))
        for found in await find_leftovers((self._prefix,), (), self._question.run):
            self._notes.append(f"{found.place} has a rule of vipd that accepts translated flows")
        shared, services = forest.everything()
        return self._answer(forest, services, shared)

    async def _of_service(self) -> Answer:
        wanted = self._wanted(self._ask("services", self._target)) or self._of_port(self._target)
        forest = await self._read(self._search(wanted), wanted)
        services = forest.named(self._target)
        if not services:
            raise self._unknown(f"no service {self._target} in the kernel", forest)
        return self._answer(forest, services)

    async def _of_chain(self, chain: ChainName) -> Answer:
        self._prefix = chain.prefix
        forest = await self._read(Search(chains=frozenset({chain.name})), [])
        there = forest.chain(chain.name)
        if not chain.of_service:
            if not there:
                raise self._unknown(f"no chain {chain.name} of vipd", forest)
            return self._answer(forest, (), there, chain.name)
        keys = forest.owners(chain.name)
        wanted = self._wanted_by(keys) if keys else self._claiming(chain)
        if not (keys or wanted):
            if there:
                said = f"{chain.name} belongs to no service that is known"
                return self._answer(forest, (), there, chain.name, said)
            raise self._unknown(f"no chain {chain.name}, and no service has had one of that name", forest)
        search = self._search(wanted, keys) if wanted else await self._search_by_rules(keys, chain.name)
        forest = await self._read(search, wanted)
        services = forest.keyed({*keys, *(each.key for each in wanted)})
        return self._answer(forest, services, (), chain.name, self._said(chain, keys, wanted, there))

    def _said(
        self, chain: ChainName, keys: Sequence[Key], wanted: Sequence[Expected], there: Sequence[SharedTree]
    ) -> str:
        by_hash = next((meant for each in wanted if (meant := chain.meant_by(each))), "")
        owner = by_hash or ", ".join(key.service_port for key in keys)
        return f"{chain.name} is of {owner}" if there else f"{chain.name} was of {owner}; it is not there now"

    async def _read(self, search: Search | None, wanted: Sequence[Expected]) -> KernelRules:
        began = time.monotonic()
        iptables = await read_rules(self._prefix, search, self._question.run, self._question.warn)
        tables = await read_tables(self._prefix, self._question.run)
        self._seconds += time.monotonic() - began
        return KernelRules(iptables, tables, None if self._places is None else InUse(self._places, wanted))

    def _answer(
        self,
        forest: KernelRules,
        services: Sequence[ServiceTree],
        shared: Sequence[SharedTree] = (),
        chain: str = "",
        said: str = "",
    ) -> Answer:
        notes = [*self._notes]
        if self._places is None and forest.tables and not forest.iptables:
            notes.append("nftables has no names of services: each frontend stands for itself")
        elif self._places is None:
            notes.append("names are those in the comments on rules; nothing could be compared")
        for place in forest.left_over():
            notes.append(f"{place} has rules that vipd does not use now; hint: vipctl doctor")
        return Answer(shared, services, chain, said, tuple(notes), self._seconds)

    def _unknown(self, what: str, forest: KernelRules) -> UnknownTargetError:
        if not forest.places():
            return UnknownTargetError(what, "the kernel has no rule of vipd; see vipctl status")
        if self._places is None and forest.tables:
            hint = "the daemon does not answer, and nftables knows no names: give a frontend"
            return UnknownTargetError(what, hint)
        return UnknownTargetError(what, "vipctl rules shows all; vipctl list what vipd has")

    def _ask_status(self) -> dict[Family, str] | None:
        """Where the daemon keeps its rules, and its prefix noted."""
        try:
            status = self._client.get(url_path("status"))
        except ClientError as error:
            self._notes.append(f"the daemon does not answer ({error})")
            return None
        if serves_elsewhere(int(status["pid"]), Path("/")):
            self._notes.append("the daemon that answers works in another network namespace")
            return None
        self._prefix = str(status["settings"].get("chain_prefix", ""))
        dataplane = status["dataplane"]
        if dataplane["name"] == "nftables":
            return {f: f"table {TableOptions(f, self._prefix).table}" for f in Family}
        return {family: str(dataplane[str(family)]) for family in Family if dataplane.get(str(family))}

    def _ask(self, *segments: str) -> list[dict[str, Any]]:
        """ServiceViews; none when the daemon does not answer or knows no such service."""
        if self._places is None:
            return []
        try:
            answer = self._client.get(url_path(*segments))
        except RefusedError as error:
            if error.status == _NOT_FOUND:
                return []
            raise
        return [answer["service"]] if "service" in answer else list(answer["services"])

    def _wanted(self, views: Iterable[dict[str, Any]]) -> list[Expected]:
        found = [wanted for view in views for wanted in expected_of(view)]
        for name, message in {w.service: w.message for w in found if w.state == "quarantined"}.items():
            self._notes.append(f"{name} is quarantined: {message}")
        if any(wanted.state == "pending" for wanted in found):
            self._notes.append("a change is on its way to the kernel")
        return found

    def _of_port(self, service_port: str) -> list[Expected]:
        """A service port, by its name: that of its service, a colon, and the port's own."""
        service = service_port.rpartition(":")[0]
        views = self._ask("services", service) if service else []
        return [wanted for wanted in self._wanted(views) if wanted.key.service_port == service_port]

    def _wanted_by(self, keys: Iterable[Key]) -> list[Expected]:
        """What the daemon means by service ports. An unnamed port's is its service's name."""
        found: list[Expected] = []
        for key in keys:
            named = self._wanted(self._ask("services", key.service_port)) or self._of_port(key.service_port)
            found += [wanted for wanted in named if wanted.key == key]
        return found

    def _claiming(self, chain: ChainName) -> list[Expected]:
        """The service port whose chain it would be, by its hash."""
        return [wanted for wanted in self._wanted(self._ask("services")) if chain.meant_by(wanted)]

    def _search(self, wanted: Sequence[Expected], keys: Sequence[Key] = ()) -> Search | None:
        """What has to be read of a large table; None where only all of it will do."""
        addresses = {address for each in wanted for address in each.addresses}
        if not wanted:
            try:
                addresses.add(parse_frontend(self._target).address)
            except InvalidTextError:
                return None
        known = {*keys, *(each.key for each in wanted)}
        chains = {name for each in wanted for name in each.chains.values() if name} | self._chains(known)
        return Search(frozenset(addresses), frozenset(key.service_port for key in known), frozenset(chains))

    async def _search_by_rules(self, keys: Sequence[Key], chain: str) -> Search | None:
        """The same without a daemon: most services' own chains have the addresses that lead to them."""
        chains = frozenset({chain, *self._chains(keys)})
        forest = await self._read(Search(chains=chains), [])
        addresses = forest.addresses_in(chains)
        if not addresses:
            return None
        return Search(frozenset(addresses), frozenset(key.service_port for key in keys), chains)

    def _chains(self, keys: Iterable[Key]) -> set[str]:
        """The chains of iptables that are named after service ports."""
        return {f"{self._prefix}-{kind}-{hashed(''.join(key))}" for key in keys for kind in _OF_SERVICE}
