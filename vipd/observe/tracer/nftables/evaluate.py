"""The walk of one packet through the base chains, with a branch for every throw of dice.

Facts of the kernel kept here (6.18): a nat chain is asked only while its kind of translation is undecided for
the flow, and whatever it says, also nothing, decides; so a flow that stays on the host meets postrouting, but
not the nat chains of prerouting and input again. A rule whose look-up finds nothing ends there, and the next
one follows; what it has changed stays changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from vipd.observe.tracer.errors import RulesetError
from vipd.observe.tracer.nftables.branch import Branch, Manipulation
from vipd.observe.tracer.nftables.expressions import Look
from vipd.observe.tracer.nftables.holders import Ending
from vipd.observe.tracer.nftables.rules import Rule
from vipd.observe.tracer.nftables.statements import (
    Done,
    Masquerade,
    Redirect,
    Reject,
    Statement,
    Translate,
    Write,
)
from vipd.observe.tracer.nftables.tables import Chain, Tables
from vipd.observe.tracer.passing import Path
from vipd.observe.tracer.targets import Ruling
from vipd.observe.tracer.trace import Arrival, Host, Outcome, Packet, Slots, Step, Trace, Verdict

_FIRST = {Arrival.FORWARDED: "prerouting", Arrival.LOCAL: "output"}
_AFTER = {
    # (arriving, destination on this host): the hooks that follow
    (Arrival.FORWARDED, False): ("forward", "postrouting"),
    (Arrival.FORWARDED, True): ("input",),
    (Arrival.LOCAL, False): ("postrouting",),
    (Arrival.LOCAL, True): ("postrouting", "prerouting", "input"),
}
_DECIDES = {
    "prerouting": Manipulation.DESTINATION,
    "output": Manipulation.DESTINATION,
    "input": Manipulation.SOURCE,
    "postrouting": Manipulation.SOURCE,
}
_VERDICTS = {Ruling.DROP: Verdict.DROPPED, Ruling.REJECT: Verdict.REJECTED}
_RULINGS = {"accept": Ruling.ACCEPT, "drop": Ruling.DROP}

Ruled = tuple[Branch, Ruling]
"""A branch at the end of a chain."""


def trace(tables: Tables, packet: Packet, host: Host) -> Trace:
    """Every way `packet`, the first of its flow, can go under the tables on this host.

    The work is linear in the rules that the branches look at; dice of n sides make n branches. `host.pinned`
    does not count: dynamic maps are in the text.

    Raises:
        ValueError: the packet is not of the tables' family.
        RulesetError: a translation or a rejection is reached from a hook where the kernel does not allow it.
    """
    if packet.family is not tables.family:
        raise ValueError(f"{packet.destination} is not {tables.family}")
    first = _through(tables, _FIRST[packet.arriving], [(Branch.first(packet, host), Ruling.ACCEPT)])
    return Trace(packet, _merged(_finished(tables, packet, first)))


def _finished(tables: Tables, packet: Packet, branches: Iterable[Ruled]) -> Iterator[Ruled]:
    for branch, ruling in branches:
        going: list[Ruled] = [(branch, ruling)]
        for hook in _AFTER[packet.arriving, branch.packet.for_this_host]:
            going = list(_through(tables, hook, going))
        yield from going


def _through(tables: Tables, hook: str, branches: Iterable[Ruled]) -> Iterable[Ruled]:
    """All base chains of one hook."""
    going = branches
    for chain in tables.at(hook):
        going = [ruled for branch in going for ruled in _asked(tables, chain, hook, *branch)]
    decides = _DECIDES.get(hook)
    return going if decides is None else [(_decided(b, decides), ruling) for b, ruling in going]


def _asked(tables: Tables, chain: Chain, hook: str, branch: Branch, ruling: Ruling) -> Iterable[Ruled]:
    nat = chain.hook is not None and chain.hook.type == "nat"
    if ruling is not Ruling.ACCEPT or (nat and _DECIDES.get(hook) in branch.decided):
        return [(branch, ruling)]
    return _Walk(tables, chain, hook).run(branch)


def _decided(branch: Branch, manipulation: Manipulation) -> Branch:
    return replace(branch, decided=branch.decided | {manipulation})


@dataclass(frozen=True, slots=True)
class _Place:
    """The rule to look at next, and where to go on when its chain ends. Within a rule that has dice, the
    statement with them, and what they gave."""

    chain: Chain
    index: int
    caller: _Place | None
    statement: int = 0
    drawn: int | None = None
    elements: tuple[str, ...] = ()

    def next(self) -> _Place:
        """The place behind this rule."""
        return _Place(self.chain, self.index + 1, self.caller)


class _Walk:
    """One base chain, with all it calls."""

    def __init__(self, tables: Tables, chain: Chain, hook: str) -> None:
        self._chains, self._base, self._hook = tables.chains, chain, hook
        self._waiting: list[tuple[Branch, _Place | None]] = []

    def run(self, branch: Branch) -> Iterator[Ruled]:
        """All branches, in the order of what the dice give."""
        self._waiting = [(branch, _Place(self._base, 0, None))]
        while self._waiting:
            yield self._follow(*self._waiting.pop())

    def _follow(self, branch: Branch, place: _Place | None) -> Ruled:
        """Follow one branch to its ruling; what the dice leave aside waits."""
        while place is not None:
            if place.index == len(place.chain.rules):
                place = place.caller
                continue
            branch, done, step = self._carried_out(branch, place)
            if done is None or step is None:
                place = place.next()
                continue
            branch = _with_step(branch, step)
            onward = self._onward(done.end, place)
            if isinstance(onward, Ruling):
                return (_decided(branch, _DECIDES[self._hook]) if done.translated else branch), onward
            place = onward
        return self._by_policy(branch)

    def _carried_out(self, branch: Branch, place: _Place) -> tuple[Branch, Done | None, Step | None]:
        """Do what a rule says, statement by statement; without a step it did not match as a whole."""
        rule, elements = place.chain.rules[place.index], list(place.elements)
        slots: Slots | None = None
        done = Done(branch)
        for index in range(place.statement, len(rule.statements)):
            statement = rule.statements[index]
            if statement.dice > 1 and place.drawn is None:
                place = self._thrown(done.branch, place, index, statement.dice, elements)
                done = Done(_less_likely(done.branch, statement.dice))
            self._allowed(rule, statement)
            look = Look(done.branch, place.drawn or 0, elements)
            obeyed = statement.obey(look)
            if obeyed is None:
                return done.branch, None, None
            slots = statement.slots(look) or slots if isinstance(statement, Write) else slots
            done = obeyed
        step = Step(place.chain.table, place.chain.name, rule.text, rule.comment, ", ".join(elements), slots)
        return done.branch, done, step

    def _thrown(self, branch: Branch, place: _Place, index: int, sides: int, elements: list[str]) -> _Place:
        """Go on with the first thing that dice may give, and let the others wait."""
        found = tuple(elements)
        aside = _less_likely(branch, sides)
        ways = [_Place(place.chain, place.index, place.caller, index, way, found) for way in range(sides)]
        self._waiting.extend((aside, way) for way in reversed(ways[1:]))
        return ways[0]

    def _allowed(self, rule: Rule, statement: Statement) -> None:
        if not isinstance(statement, Translate | Redirect | Masquerade | Reject):
            return
        if self._hook not in statement.hooks:
            raise RulesetError(rule.text, f"{type(statement).__name__.lower()} is reached from {self._hook}")

    def _onward(self, end: Ending | Ruling | None, place: _Place) -> _Place | Ruling | None:
        match end:
            case Ruling():
                return end
            case None | Ending("continue"):
                return place.next()
            case Ending("return"):
                return place.caller
            case Ending(word) if word in _RULINGS:
                return _RULINGS[word]
        chain = self._chains[place.chain.table, end.chain]
        return _Place(chain, 0, place.next() if end.word == "jump" else place.caller)

    def _by_policy(self, branch: Branch) -> Ruled:
        policy = self._base.hook.policy if self._base.hook else Ruling.ACCEPT
        if policy is Ruling.ACCEPT:
            return branch, policy
        step = Step(self._base.table, self._base.name, f"policy {policy}")
        return _with_step(branch, step), policy


def _with_step(branch: Branch, step: Step) -> Branch:
    return branch.with_packet(replace(branch.packet, path=Path(step, branch.packet.path)))


def _less_likely(branch: Branch, sides: int) -> Branch:
    return branch.with_packet(replace(branch.packet, probability=branch.packet.probability / sides))


def _merged(branches: Iterable[Ruled]) -> tuple[Outcome, ...]:
    """One outcome per verdict, backend and masquerade, with the steps of the first branch."""
    merged: dict[tuple[Verdict, str | None, bool], Outcome] = {}
    for branch, ruling in branches:
        packet, ended = branch.packet, _VERDICTS.get(ruling)
        # What is written into a packet that does not go on was a note from one rule to another.
        backend = branch.backend if ended is None else packet.backend
        masqueraded = branch.masqueraded if ended is None else packet.masqueraded
        sent = Verdict.UNCHANGED if backend is None else Verdict.DELIVERED
        key = (ended or sent, backend, masqueraded)
        steps = packet.path.steps() if packet.path else ()
        if before := merged.get(key):
            merged[key] = replace(
                before,
                probability=before.probability + packet.probability,
                steps=_together(before.steps, steps),
            )
        else:
            merged[key] = Outcome(*key[:2], packet.probability, key[2], steps)
    return tuple(merged.values())


def _together(first: tuple[Step, ...], second: tuple[Step, ...]) -> tuple[Step, ...]:
    """The first path, with the slots of both where they went through the same rules."""
    if [(s.chain, s.rule) for s in first] != [(s.chain, s.rule) for s in second]:
        return first
    return tuple(_with_slots(a, b.slots) for a, b in zip(first, second, strict=True))


def _with_slots(step: Step, more: Slots | None) -> Step:
    if step.slots is None or more is None or more.chosen[0] in step.slots.chosen:
        return step
    return replace(step, slots=step.slots | more)
