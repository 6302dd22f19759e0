"""Digests of the rules of a chain: what vipd keeps of them once the kernel has them. Pure.

The text of its rules is most of what 10,000 services need, and a changed forwarding is compiled again anyway.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

from vipd.dataplane.iptables.names import Rules

Digest = bytes
KnownRules = Rules | Digest
"""The rules of a chain, or what was kept of them."""

_BYTES = 15
"""Of 10**9 chains two have the same digest by chance once in 10**18 times. 16 bytes take a third more."""
_PROBABILITY = re.compile(r"--probability (\d\.\d+)")
_PROBABILITY_SCALE = 1 << 31
"""xt_statistic stores a probability as a whole number of 1/2^31 (contract 1.8)."""


def digest_of(rules: KnownRules) -> Digest:
    """The digest of rules; that of a digest is itself."""
    return rules if isinstance(rules, bytes) else digest_of_text("\n".join(rules))


def digest_of_text(text: str) -> Digest:
    """The digest of rules, one in each line. The same for vipd's spelling and the kernel's, which prints a
    probability as it stored it: 0.3333333333 becomes 0.33333333349."""
    spelt = stored_spelling(text) if "--probability" in text else text
    return hashlib.blake2b(spelt.encode(), digest_size=_BYTES).digest()


def same_rules(one: KnownRules | None, other: KnownRules | None) -> bool:
    """Whether two chains have the same rules, or neither exists."""
    if one is None or other is None:
        return one is other
    return one == other or digest_of(one) == digest_of(other)


def text_of(rules: KnownRules | None) -> Rules:
    """The rules, as far as they are known."""
    return rules if isinstance(rules, tuple) else ()


def stored_spelling(text: str) -> str:
    """Rules as iptables-save prints them after the kernel has stored them."""
    return _PROBABILITY.sub(lambda found: _stored_probability(found[1]), text)


@lru_cache(maxsize=1024)  # most services have few endpoints, of the same weight
def _stored_probability(text: str) -> str:
    stored = round(float(text) * _PROBABILITY_SCALE)
    return f"--probability {stored / _PROBABILITY_SCALE:.11f}"
