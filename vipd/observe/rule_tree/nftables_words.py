"""What the rules of the nftables dataplane do, in words. Pure.

That a rule is vipd's is known by its digest; here it gets words. One that has none is shown as nft has it.
"""

from __future__ import annotations

import re

_WORDS = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"map @frontends goto", "by address and port"),
        (r"vmap @handlers$", "the chain for services of its kind"),
        (r"vmap @node_ports$", "node ports"),
        (r"@pinged .* redirect", "ping"),
        (r"@claimed goto \S+$", "other ports of virtual IPs"),
        (r"vmap @allowed_(\d+)$", r"sources that may come, of /\1"),
        (r"update @pins ", "client remembered"),
        (r"delete @pins ", "pinned to a backend that is gone: forgotten"),
        (r"^ip6? daddr .* daddr set .* map @pins$", "of flows at the same moment: the first one's backend"),
        (r"map @pins$", "pinned clients: their backend"),
        (r"dnat .* map @\w*numbered$", "DNAT to that backend"),
        (r"dnat .* map @\w*endpoints$", "DNAT to the backend in that slot"),
        (r"set .* map @\w*picks$", "the backend in that slot"),
        (r"set numgen inc mod 1\b", "found nothing: slot 0"),
        (r"set numgen random mod (\d+)", r"one of \1 slots at random"),
        (r"set numgen inc mod (\d+)", r"the next of \1 slots"),
        (r"set jhash .* mod (\d+)", r"one of \1 slots, by the client"),
        (r"^ip6? saddr set ct original", "source address put back"),
        (r"^ip6? daddr set ct original", "destination address put back"),
        (r"^ct mark set ", "flow marked as vipd's"),
        (r"^fib saddr type != local meta mark set", "masquerade mark, unless from this host"),
        (r"^fib saddr type local .* goto", "from this host: masquerade mark, every backend"),
        (r"saddr != (\{.*\}|\S+) meta mark set", r"masquerade mark, unless from \1"),
        (r"saddr (\S+) meta mark set", r"from \1: masquerade mark"),
        (r"saddr (\{.*\}|\S+) goto", r"from \1: every backend"),
        (r"^meta mark set ", "masquerade mark"),
        (r"^meta mark & .* masquerade", "marked: this host becomes the source"),
        (r"@hairpin masquerade", "to itself: this host becomes the source"),
        (r"^fib daddr type != local return", "not for this host: back"),
        (r"daddr != (\{.*\}|\S+) return", r"not to \1: back"),
        (r"daddr (\{.*\}|\S+) return", r"to \1: back"),
        (r"^ct mark & .* return", "not vipd's: nothing to do"),
        (r"^ct mark & .* jump", "vipd's flows"),
        (r"update @flows .* (tcp|udp|sctp) dport", r"\1: counted in flows"),
        (r"^(?:goto|jump) (\S+)$", r"on to \1"),
        (r"^drop$", "dropped"),
        (r"^tcp flags .* reject", "flows that began before: reset"),
        (r"\breject\b", "refused"),
    )
)
"""The first that is found counts."""


def nft_rule_words(rule: str) -> str:
    """What a rule does, as nft lists it without its comment."""
    for pattern, words in _WORDS:
        if found := pattern.search(rule):
            return found.expand(words)
    return rule
