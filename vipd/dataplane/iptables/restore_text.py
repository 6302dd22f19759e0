"""The text of restores: blocks that write or delete whole chains, and the size limit of one restore. Pure."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from vipd.dataplane.iptables.names import ChainId, Rules
from vipd.dataplane.iptables.words import target_of

T = TypeVar("T")

Group = Mapping[ChainId, Rules]
"""The chains of one forwarding."""


@dataclass(frozen=True, slots=True)
class Batches:
    """Size limits of one restore in a large load."""

    lines: int
    """Chains and rules of whole forwardings; the new part of a larger forwarding is written in pieces."""
    deletions: int
    """Chains of a restore that only deletes."""
    jumps: int
    """Rules of a new chain that one restore adds, where the chain is long."""

    @staticmethod
    def of(*, legacy: bool) -> Batches:
        """The limits for a variant of iptables."""
        return LEGACY_BATCHES if legacy else NFT_BATCHES


NFT_BATCHES = Batches(5000, 2000, 1000)
"""iptables-nft-restore 1.8.9 is quadratic in chains per call, and in jumps to chains: 7.3 s against more than
100 s in one piece for 10,000 services (performance.md), or for one of 100 ports and 250 backends. One port of
9,900 backends took 3.3 to 5.6 s in these pieces and 13 to 27 s at once, beside other work."""
LEGACY_BATCHES = Batches(sys.maxsize, sys.maxsize, sys.maxsize)
"""Each restore of iptables-legacy copies the whole table out of the kernel and back: in batches of 250
forwardings 3,000 services took 3.8 s of processor time, in one piece 0.33 s."""


def load_blocks(groups: Iterable[Group], installed: Collection[ChainId], batches: Batches) -> Iterator[str]:
    """Restores of the nat table that write these groups, in order. It holds those of one restore at a time.

    If a group is too large for a restore, its new chains are written first: those that lead to no other chain
    of the group, then long ones that lead to these, some rules at a time. No packet reaches a new chain
    before the rest of its group is written.
    """
    part: list[Group] = []
    size = 0
    for piece in _pieces(groups, installed, batches):
        lines = line_count(piece) if not isinstance(piece, str) else 0
        if part and (isinstance(piece, str) or size + lines > batches.lines):
            yield write_block("nat", joined(part), ())
            part, size = [], 0
        if isinstance(piece, str):
            yield piece
        else:
            part.append(piece)
            size += lines
    if part:
        yield write_block("nat", joined(part), ())


def _pieces(
    groups: Iterable[Group], installed: Collection[ChainId], batches: Batches
) -> Iterator[Group | str]:
    """Groups to write, of which one restore may contain several, and complete restores between them."""
    for group in groups:
        if line_count(group) <= batches.lines:
            yield group
            continue
        first, long, rest = _in_pieces(group, installed, batches.jumps)
        yield from ({chain: rules} for chain, rules in first.items())
        for chain, rules in long.items():
            yield from _grown(chain, rules, batches.jumps)
        yield rest


def _in_pieces(group: Group, installed: Collection[ChainId], jumps: int) -> tuple[Group, Group, Group]:
    """New chains that lead to no other one of the group, long new chains that lead to these alone, and the
    rest."""
    new = {chain: rules for chain, rules in group.items() if chain not in installed}
    first = _leading_to_none_of(frozenset(chain.name for chain in group), new)
    unwritten = frozenset(chain.name for chain in group if chain not in first)
    long = {
        chain: rules
        for chain, rules in _leading_to_none_of(unwritten, new).items()
        if len(rules) > jumps and chain not in first
    }
    return first, long, {c: rules for c, rules in group.items() if c not in first and c not in long}


def _leading_to_none_of(names: frozenset[str], chains: Group) -> Group:
    return {chain: rules for chain, rules in chains.items() if names.isdisjoint(map(target_of, rules))}


def write_block(table: str, chains: Group, extra: Sequence[str]) -> str:
    """A block that writes whole chains, then runs other lines. Empty when there is nothing to do."""
    if not chains and not extra:
        return ""
    declared = [f":{chain.name} - [0:0]" for chain in chains]
    added = [f"-A {chain.name} {rule}" for chain, rules in chains.items() for rule in rules]
    return "\n".join([f"*{table}", *declared, *added, *extra, "COMMIT", ""])


def _grown(chain: ChainId, rules: Rules, most: int) -> Iterator[str]:
    """A new chain written in several restores, of at most so many rules each."""
    yield write_block(chain.table, {chain: rules[:most]}, ())
    for part in _parts(rules[most:], most):
        yield write_block(chain.table, {}, [f"-A {chain.name} {rule}" for rule in part])


def delete_block(chains: Sequence[ChainId]) -> str:
    """A block that removes chains; all are emptied first, as they may refer to each other."""
    if not chains:
        return ""
    emptied = [f":{chain.name} - [0:0]" for chain in chains]
    removed = [f"-X {chain.name}" for chain in chains]
    return "\n".join([f"*{chains[0].table}", *emptied, *removed, "COMMIT", ""])


def delete_blocks(chains: Sequence[ChainId], most: int) -> list[str]:
    """Blocks that remove any number of chains; with several, all are emptied before the first is removed."""
    parts = list(_parts(chains, most))
    emptied = [write_block("nat", dict.fromkeys(part, ()), ()) for part in parts] if len(parts) > 1 else []
    return [*emptied, *map(delete_block, parts)]


def joined(groups: Iterable[Group]) -> Group:
    """All chains of these groups."""
    return {chain: rules for group in groups for chain, rules in group.items()}


def line_count(group: Group) -> int:
    """Number of lines of a group in a restore: its chains and their rules."""
    return len(group) + sum(map(len, group.values()))


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
