"""Walks one packet through the base chains of one family, whatever the language of its rules. Pure.

Facts of the kernel modelled here (6.18): the nat chains of a hook run only while their kind of translation
is undecided for the flow, and any result of theirs, even none, decides. So a flow that stays on the host
passes postrouting, but not the nat chains of prerouting and input again. Marks survive the way over `lo`. A
packet that arrived by an interface for this host passes input and never postrouting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from vipd.model.service import Family
from vipd.observe.simulator.outcome import Outcome, PacketVerdict, RuleVerdict, SimulationResult, Slots, Step
from vipd.observe.simulator.packet import Arrival, Host, Packet
from vipd.observe.simulator.packet_state import Manipulation, PacketState

_FIRST = {Arrival.FORWARDED: "prerouting", Arrival.LOCAL: "output"}
_AFTER = {
    # (arriving, destination on this host): the hooks that follow
    (Arrival.FORWARDED, False): ("forward", "postrouting"),
    (Arrival.FORWARDED, True): ("input",),
    (Arrival.LOCAL, False): ("postrouting",),
    (Arrival.LOCAL, True): ("postrouting", "prerouting", "input"),
}
DECIDES = {
    "prerouting": Manipulation.DESTINATION,
    "output": Manipulation.DESTINATION,
    "input": Manipulation.SOURCE,
    "postrouting": Manipulation.SOURCE,
}
"""The decision of the nat chains of a hook."""
_VERDICTS = {RuleVerdict.DROP: PacketVerdict.DROPPED, RuleVerdict.REJECT: PacketVerdict.REJECTED}

Position = TypeVar("Position")
ChainResult = tuple[PacketState, RuleVerdict]
"""A packet at the end of a base chain."""


class BaseChain(Protocol[Position]):
    """A chain that the kernel calls, with all that it calls."""

    @property
    def table(self) -> str:
        """As a step names it."""

    @property
    def name(self) -> str:
        """As a step names it."""

    @property
    def nat(self) -> bool:
        """Whether it runs only once for a flow."""

    @property
    def policy(self) -> RuleVerdict:
        """The verdict for a packet that no rule decided on."""

    def first(self) -> Position:
        """The first rule."""

    def follow(
        self, packet: PacketState, position: Position
    ) -> Sequence[tuple[PacketState, Position | RuleVerdict | None]]:
        """The effect of one rule, or some in a row, on a packet: the ways on in rule order, several for a
        random choice. None: the end of the chain, whose policy decides. Raises RulesetError."""


class Rules(Protocol):
    """All rules of one family."""

    @property
    def family(self) -> Family:
        """The family of packets that they apply to."""

    def base_chains(self, hook: str) -> Sequence[BaseChain[Any]]:
        """Those of `prerouting`, `input`, `forward`, `output` or `postrouting`, in the kernel's order."""


def trace(rules: Rules, packet: Packet, host: Host) -> SimulationResult:
    """Every way of `packet`, the first of its flow, with the rules on this host.

    The work is linear in the rules that the branches read; n equally likely backends make n branches.

    Raises:
        ValueError: the packet is not of the rules' family.
        RulesetError: a translation or a rejection is reached from a hook where the kernel does not allow it.
    """
    if packet.family is not rules.family:
        raise ValueError(f"{packet.destination} is not {rules.family}")
    first = _through_hook(
        rules, _FIRST[packet.arriving], [(PacketState.first(packet, host), RuleVerdict.ACCEPT)]
    )
    return SimulationResult(packet, _merged(_finished(rules, packet, first)))


def _finished(rules: Rules, packet: Packet, branches: Iterable[ChainResult]) -> Iterator[ChainResult]:
    """All branches after the hooks that follow the first."""
    for state, verdict in branches:
        going: Sequence[ChainResult] = [(state, verdict)]
        for hook in _AFTER[packet.arriving, state.for_this_host]:
            going = _through_hook(rules, hook, going)
        yield from going


def _through_hook(rules: Rules, hook: str, branches: Sequence[ChainResult]) -> Sequence[ChainResult]:
    decides = DECIDES.get(hook)
    going = list(branches)
    for chain in rules.base_chains(hook):
        asked = going
        going = []
        for state, verdict in asked:
            if verdict is not RuleVerdict.ACCEPT or (chain.nat and decides in state.decided):
                going.append((state, verdict))
            else:
                going.extend(_through_chain(chain, state))
    if decides is None:
        return going
    return [(state._replace(decided=state.decided | {decides}), verdict) for state, verdict in going]


def _through_chain(chain: BaseChain[Position], state: PacketState) -> Iterator[ChainResult]:
    """All branches, in rule order."""
    waiting: list[tuple[PacketState, Position | RuleVerdict | None]] = [(state, chain.first())]
    while waiting:
        reached, onward = waiting.pop()
        if onward is None:
            yield _by_policy(chain, reached)
        elif isinstance(onward, RuleVerdict):
            yield reached, onward
        else:
            waiting.extend(reversed(chain.follow(reached, onward)))


def _by_policy(chain: BaseChain[Position], state: PacketState) -> ChainResult:
    if chain.policy is RuleVerdict.ACCEPT:
        return state, chain.policy
    return state.with_step(Step(chain.table, chain.name, f"policy {chain.policy}")), chain.policy


def _merged(branches: Iterable[ChainResult]) -> tuple[Outcome, ...]:
    """One outcome for each verdict, backend and masquerade, with the steps of the first branch."""
    merged: dict[tuple[PacketVerdict, str | None, bool], Outcome] = {}
    for state, ruled in branches:
        ended = _VERDICTS.get(ruled)
        # A refused packet may have an address that a rule wrote into it as a number for a later rule.
        backend = state.sent_to if ended is None else state.backend
        masqueraded = state.has_new_source if ended is None else state.masqueraded
        sent = PacketVerdict.UNCHANGED if backend is None else PacketVerdict.DELIVERED
        key = (ended or sent, backend, masqueraded)
        steps = state.path.steps() if state.path else ()
        if before := merged.get(key):
            probability = before.probability + state.probability
            merged[key] = replace(before, probability=probability, steps=_merge_paths(before.steps, steps))
        else:
            merged[key] = Outcome(*key[:2], state.probability, key[2], steps)
    return tuple(merged.values())


def _merge_paths(first: tuple[Step, ...], second: tuple[Step, ...]) -> tuple[Step, ...]:
    """The first path, with the slots of both where they went through the same rules."""
    if [(s.chain, s.rule) for s in first] != [(s.chain, s.rule) for s in second]:
        return first
    return tuple(_with_slots(a, b.slots) for a, b in zip(first, second, strict=True))


def _with_slots(step: Step, more: Slots | None) -> Step:
    if step.slots is None or more is None or more.chosen[0] in step.slots.chosen:
        return step
    return replace(step, slots=step.slots | more)
