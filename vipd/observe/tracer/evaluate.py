"""The walk of one packet through the chains, with a branch for every throw of dice.

Facts of the kernel kept here (6.18): nat is asked once per flow and direction of change, so a flow that stays
on the host meets POSTROUTING but not PREROUTING or nat INPUT again; marks survive the way over `lo`; one that
came in by an interface for this host meets INPUT and never POSTROUTING.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from ipaddress import ip_address

from vipd.observe.tracer.errors import RulesetError, UnknownRule
from vipd.observe.tracer.matches import Remember
from vipd.observe.tracer.passing import Passing, Path
from vipd.observe.tracer.rules import Rule
from vipd.observe.tracer.ruleset import Ruleset
from vipd.observe.tracer.targets import End, Jump, Opaque, Return, Ruling
from vipd.observe.tracer.trace import Arrival, Host, Outcome, Packet, Step, Trace, Verdict

_FIRST = {Arrival.FORWARDED: ("nat", "PREROUTING"), Arrival.LOCAL: ("nat", "OUTPUT")}
_AFTER = {
    # (arriving, destination on this host): the table and built-in chain of each further stage
    (Arrival.FORWARDED, False): (("filter", "FORWARD"), ("nat", "POSTROUTING")),
    (Arrival.FORWARDED, True): (("filter", "INPUT"), ("nat", "INPUT")),
    (Arrival.LOCAL, False): (("filter", "OUTPUT"), ("nat", "POSTROUTING")),
    (Arrival.LOCAL, True): (("filter", "OUTPUT"), ("nat", "POSTROUTING"), ("filter", "INPUT")),
}
_VERDICTS = {Ruling.DROP: Verdict.DROPPED, Ruling.REJECT: Verdict.REJECTED}

Ruled = tuple[Passing, Ruling]
"""A branch at the end of a stage."""


def trace(ruleset: Ruleset, packet: Packet, host: Host) -> Trace:
    """Every way `packet`, the first of its flow, can go under the rules on this host.

    The work is linear in the rules that the branches look at; a probability ladder of n makes n branches.

    Raises:
        ValueError: the packet is not of the ruleset's family.
        UnknownRule: the packet reaches a rule that was not understood (rulesets read without `strict`).
        RulesetError: a NAT target is reached from a built-in chain that the kernel does not allow it in.
    """
    if packet.family is not ruleset.family:
        raise ValueError(f"{packet.destination} is not {ruleset.family}")
    table, hook = _FIRST[packet.arriving]
    branches = _stage(ruleset, packet, table, hook, Passing.first(packet, host))
    return Trace(packet, _merged(_finished(ruleset, packet, branches)))


def _finished(ruleset: Ruleset, packet: Packet, branches: Iterable[Ruled]) -> Iterator[Ruled]:
    for branch, ruling in branches:
        if ruling is not Ruling.ACCEPT:
            yield branch, ruling
            continue
        going: list[Ruled] = [(branch, ruling)]
        for table, hook in _AFTER[packet.arriving, branch.for_this_host]:
            going = list(_through(ruleset, packet, (table, hook), going))
        yield from going


def _through(
    ruleset: Ruleset, packet: Packet, stage: tuple[str, str], branches: Iterable[Ruled]
) -> Iterator[Ruled]:
    for branch, ruling in branches:
        if ruling is Ruling.ACCEPT:
            yield from _stage(ruleset, packet, *stage, branch)
        else:
            yield branch, ruling


def _stage(ruleset: Ruleset, packet: Packet, table: str, hook: str, passing: Passing) -> Iterator[Ruled]:
    entering = replace(
        passing,
        in_interface=_incoming(packet, hook) or "",
        out_interface=_outgoing(packet, hook, passing) or "",
    )
    return _Walk(ruleset, table, hook).run(entering)


def _incoming(packet: Packet, hook: str) -> str | None:
    if packet.arriving is Arrival.LOCAL:
        return "lo" if hook == "INPUT" else None
    return packet.in_interface


def _outgoing(packet: Packet, hook: str, passing: Passing) -> str | None:
    if hook in ("PREROUTING", "INPUT"):
        return None
    # All of OUTPUT keeps the way out chosen for the first destination, even after DNAT (measured, 6.18).
    destination = int(ip_address(packet.destination)) if hook == "OUTPUT" else passing.destination
    stays = packet.arriving is Arrival.LOCAL and passing.locality.holds(destination)
    return "lo" if stays else packet.out_interface


@dataclass(frozen=True, slots=True)
class _Place:
    """The next rule to look at, and where to go on when its chain ends."""

    chain: str
    index: int
    caller: _Place | None

    def next(self) -> _Place:
        """The place behind this one."""
        return _Place(self.chain, self.index + 1, self.caller)


class _Walk:
    """One built-in chain of one table, with all it calls."""

    def __init__(self, ruleset: Ruleset, table: str, hook: str) -> None:
        self._chains = ruleset.chains[table]
        self._policy = ruleset.policies[table][hook]
        self._table = table
        self._hook = hook
        self._waiting: list[tuple[Passing, _Place]] = []

    def run(self, passing: Passing) -> Iterator[Ruled]:
        """All branches, in rule order."""
        self._waiting = [(passing, _Place(self._hook, 0, None))]
        while self._waiting:
            yield self._follow(*self._waiting.pop())

    def _follow(self, passing: Passing, place: _Place | None) -> Ruled:
        """Follow one branch to its ruling; what the dice leave aside waits."""
        while place is not None:
            found = self._matching(passing, place)
            if found is None:
                place = place.caller
                continue
            place, rule = found
            if rule.probability < 1:
                aside = replace(passing, probability=passing.probability * (1 - rule.probability))
                self._waiting.append((aside, place.next()))
            passing = self._taken(passing, place, rule)
            ruling, passing, place = self._obey(rule, passing, place)
            if ruling is not None:
                return passing, ruling
        return self._by_policy(passing)

    def _matching(self, passing: Passing, place: _Place) -> tuple[_Place, Rule] | None:
        rules = self._chains[place.chain]
        for index in range(place.index, len(rules)):
            rule = rules[index]
            for condition in rule.conditions:
                if not condition.accepts(passing):
                    break
            else:
                if rule.probability > 0:
                    return _Place(place.chain, index, place.caller), rule
        return None

    def _taken(self, passing: Passing, place: _Place, rule: Rule) -> Passing:
        names = {m.list_name for m in rule.conditions if isinstance(m, Remember)}
        return replace(
            passing,
            probability=passing.probability * rule.probability,
            recent=passing.recent | names if names else passing.recent,
            path=Path(Step(self._table, place.chain, rule.text, rule.comment), passing.path),
        )

    def _obey(
        self, rule: Rule, passing: Passing, place: _Place
    ) -> tuple[Ruling | None, Passing, _Place | None]:
        target = rule.target
        match target:
            case None:
                return None, passing, place.next()
            case End():
                return target.ruling, passing, None
            case Return():
                return None, passing, place.caller
            case Jump():
                return None, passing, self._jumped(target, rule, place)
            case Opaque():
                raise UnknownRule(rule.text, target.why)
        if target.hooks and self._hook not in target.hooks:
            raise RulesetError(rule.text, f"{type(target).__name__.upper()} is reached from {self._hook}")
        return Ruling.ACCEPT if target.final else None, target.rewrite(passing), place.next()

    def _jumped(self, jump: Jump, rule: Rule, place: _Place) -> _Place:
        if jump.chain not in self._chains:
            raise UnknownRule(rule.text, f"unknown rule ({jump.chain} is neither a known target nor a chain)")
        return _Place(jump.chain, 0, place.caller if jump.forget else place.next())

    def _by_policy(self, passing: Passing) -> Ruled:
        if self._policy is Ruling.ACCEPT:
            return passing, self._policy
        step = Step(self._table, self._hook, f"policy {self._policy}")
        return replace(passing, path=Path(step, passing.path)), self._policy


def _merged(branches: Iterable[Ruled]) -> tuple[Outcome, ...]:
    """One outcome per verdict, backend and masquerade, with the steps of the first branch."""
    merged: dict[tuple[Verdict, str | None, bool], Outcome] = {}
    for branch, ruling in branches:
        sent = Verdict.UNCHANGED if branch.backend is None else Verdict.DELIVERED
        key = (_VERDICTS.get(ruling, sent), branch.backend, branch.masqueraded)
        if before := merged.get(key):
            merged[key] = replace(before, probability=before.probability + branch.probability)
        else:
            steps = branch.path.steps() if branch.path else ()
            merged[key] = Outcome(*key[:2], branch.probability, key[2], steps)
    return tuple(merged.values())
