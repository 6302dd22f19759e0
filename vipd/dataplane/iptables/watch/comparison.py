"""Compares the output of iptables-save with the expected rules. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from vipd.dataplane.iptables.digest import same_rules
from vipd.dataplane.iptables.names import ChainId, Names, Rules
from vipd.dataplane.iptables.plan import Installed
from vipd.dataplane.iptables.saved_rules import read_saved
from vipd.dataplane.iptables.watch.external_change import ENTRIES
from vipd.dataplane.iptables.words import target_of


def digest(saved: str) -> bytes:
    """Equal for equal rules: times and packet counters are ignored.

    Only built-in chains have counters there, and their lines come first in each table, so the bulk of the
    text is hashed unchanged.
    """
    found, place = hashlib.blake2b(digest_size=16), saved.find("*")
    while place >= 0:
        end = saved.find("\nCOMMIT", place)
        end = len(saved) if end < 0 else end
        head = saved.find(" - [", place, end)
        head = end if head < 0 else head
        # The table's name and the policies, then everything from the first chain that has no policy.
        found.update(" ".join(word for word in saved[place:head].split() if word[0] != "[").encode())
        found.update(saved[head:end].encode())
        place = saved.find("\n*", end)
    return found.digest()


def differing_chains(saved: str, expected: Installed, names: Names) -> frozenset[ChainId]:
    """vipd's chains that differ from the expected ones, and the built-in chains whose jumps to vipd
    differ."""
    found = read_saved(saved, names)
    ours = {
        chain
        for chain in found.chains.keys() | expected.chains.keys()
        if not same_rules(found.chains.get(chain), expected.chains.get(chain))
    }
    return frozenset(ours | {chain for chain in ENTRIES if _jumps_differ(chain, found, expected, names)})


def _jumps_differ(chain: ChainId, found: Installed, expected: Installed, names: Names) -> bool:
    """vipd's jumps must be equal, and what is before them; later rules belong to others."""
    return _up_to_last(chain, found.builtins, names) != _up_to_last(chain, expected.builtins, names)


def _up_to_last(chain: ChainId, builtins: Mapping[ChainId, Rules], names: Names) -> Rules:
    """The rules of a chain up to the last jump of vipd's."""
    rules = builtins.get(chain, ())
    ours = [i for i, rule in enumerate(rules) if names.owns(ChainId(chain.table, target_of(rule)))]
    return rules[: ours[-1] + 1] if ours else ()
