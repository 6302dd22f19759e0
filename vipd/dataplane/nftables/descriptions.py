"""Describes each rule that the compiler writes, and its lookups in maps and sets, in words. Pure.

`vipctl explain`, `vipctl trace` and `vipctl rules` print these words. Patterns match rules in the form of the
compiler and of nft's listings. A rule is recognised as vipd's by its digest, not by these patterns.
"""

from __future__ import annotations

import re

from vipd.dataplane.nftables.chains import RejectChain, limits_sources
from vipd.dataplane.nftables.layout import (
    CLAIMED,
    DISPATCH_MAP,
    FRONTENDS,
    NODE_PORTS,
    PINGED,
    UNUSED,
    allowed_sources_named,
)
from vipd.declaration.syntax import duration_text
from vipd.model.service import Frontend, Protocol, socket_text

_WHY = {
    RejectChain().name: "no backend is ready",
    RejectChain(drop=True).name: "no backend is ready, or none on this host",
    RejectChain(drop=True, resets_old_flows=True).name: "no backend is ready, or none on this host",
    UNUSED: "no service has this port",
}
"""Chains that end flows, and why."""

_TIME = re.compile(r"(\d+)([dhms])")
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_MASQUERADED = "this host's address becomes the source"
_MARKED = "marked for masquerade"

_PATTERNS = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (rf"map @{FRONTENDS.name} goto", "by address and port"),
        (rf"vmap @{DISPATCH_MAP.name}$", "the chain for services of its kind"),
        (rf"vmap @{NODE_PORTS.name}$", "node ports"),
        (rf"@{PINGED.name} .* redirect", "ping: answered by this host"),
        (rf"@{CLAIMED.name} goto \S+$", "other ports of virtual IPs"),
        (r"vmap @(?:node_)?allowed_(\d+)$", r"allowed sources, by /\1"),
        (
            r"update @(new_per_\w+?)_\d+_\d+ .* limit rate over (\d+)/second burst (\d+)",
            r"over \1 \2/s, \3 at once: refused",
        ),
        (r"add @(connections_per_client|connections)_\d+ .* ct count over (\d+)", r"over \1 \2: refused"),
        (r"update @refused_(\w+) ", r"refused flow counted, \1"),
        (r"daddr set ct original .* daddr goto", "within all limits: the address that was asked put back"),
        (r"set .* map @\w*services$", "the service's number, for its limits"),
        (r"update @pins .* timeout (\w+)", "client remembered for {kept}"),
        (r"delete @pins ", "client pinned to a backend that is gone: forgotten"),
        (r"^ip6? daddr .* daddr set .* map @pins$", "of flows at the same moment: the first one's backend"),
        (r"map @pins$", "backend of a pinned client"),
        (r"dnat .* map @\w*numbered$", "DNAT to that backend"),
        (r"dnat .* map @\w*endpoints$", "DNAT to the backend in that slot"),
        (r"set .* map @\w*picks$", "the backend in that slot"),
        (r"set numgen (?:inc|random) mod 1\b", "the first slot"),
        (r"set numgen random mod (\d+)", r"one of \1 slots at random"),
        (r"set numgen inc mod (\d+)", r"the next of \1 slots"),
        (r"set jhash .* mod (\d+)", r"one of \1 slots, by the client's address"),
        (r"^ip6? saddr set ct original", "the client's address put back"),
        (r"^ip6? daddr set ct original", "the address that was asked put back"),
        (r"^ct mark set ", "flow marked as vipd's"),
        (r"^fib saddr type != local meta mark set", f"{_MARKED}, unless from this host"),
        (r"^fib saddr type local goto", "from this host: let in"),
        (r"^fib saddr type local .* goto", f"from this host: {_MARKED}, to every backend"),
        (r"saddr != (\{.*\}|\S+) meta mark set", rf"{_MARKED}, unless from \1"),
        (r"saddr (\S+) meta mark set", rf"from \1: {_MARKED}"),
        (r"saddr (\{.*\}|\S+) goto", r"from \1: to every backend"),
        (r"^meta mark set ", _MARKED),
        (r"^meta mark & .* masquerade", _MASQUERADED),
        (r"@hairpin masquerade", f"a backend meets itself: {_MASQUERADED}"),
        (r"^fib daddr type != local return", "not for this host: back"),
        (r"daddr != (\{.*\}|\S+) return", r"not to \1: back"),
        (r"daddr (\{.*\}|\S+) return", r"to \1: back"),
        (r"^return$", "back"),
        (r"^tcp flags .* @reply_sources ct mark set", "a backend's reply in a flow of another host: vipd's"),
        (r"^tcp flags .* snat .* map @reply_frontends", "such a reply: the service becomes its source"),
        (r"^tcp flags .* @reply_sources drop", "such a reply, of several services: dropped, sent again"),
        (r"^ct mark & .* return", "not vipd's: nothing to do"),
        (r"^ct mark & .* jump (\S+)$", r"vipd's flows: on to \1"),
        (r"update @flows .* (tcp|udp|sctp) dport", r"flow counted, \1"),
        (r"^(?:goto|jump) (\S+)$", r"on to \1"),
        (r"^tcp flags .* reject", "flows that began before: reset"),
        (r"^drop$", "dropped{why}"),
        (r"^accept$", "accepted"),
        (r"\breject\b", "refused{why}"),
    )
)
"""The first that matches counts."""


def describe(chain: str, rule: str) -> str:
    """Describes a rule of this chain in words. `rule` is its text without its comment; a rule that vipd does
    not write is returned as it is."""
    for pattern, words in _PATTERNS:
        if found := pattern.search(rule):
            text = found.expand(words)
            if "{kept}" in words:
                text = text.replace("{kept}", _duration(found[1]))
            return text.replace("{why}", _why(chain))
    return rule


def _why(chain: str) -> str:
    why = "this source may not come" if limits_sources(chain) else _WHY.get(chain)
    if chain.startswith("over-"):
        why = f"over {chain.split('-')[1]}"
    return f": {why}" if why else ""


def _duration(text: str) -> str:
    """A timeout in one unit: the compiler writes `5400s`, nft lists `1h30m`."""
    return duration_text(sum(int(number) * _SECONDS[unit] for number, unit in _TIME.findall(text)))


def describe_element(holder: str, element: str, service_port: str = "") -> str:
    """Describes an element that a rule found in a map or set; empty if its name or value adds nothing.

    `element` is `KEY` or `KEY : VALUE`. `service_port` is the owner of a frontend: maps contain no name.
    """
    key, _, value = element.partition(" : ")
    fields, owner = key.split(" . "), f" of {service_port}" if service_port else ""
    if holder in (FRONTENDS.name, NODE_PORTS.name):
        return frontend_of(key) + owner
    if holder == DISPATCH_MAP.name:
        return (value or key).rpartition(" ")[2]
    if allowed_sources_named(holder):
        return f"{fields[0]}/{holder.rpartition('_')[2]}"
    if holder.endswith(("endpoints", "numbered")) and value:
        return socket_of(value)
    if holder.endswith(("picks", "pins")) and value:
        return f"number {value}"
    return key if holder == CLAIMED.name else ""


def describe_limit(holder: str, source: str) -> str:
    """Describes an element of a map of allowed sources."""
    return f"from {source}/{holder.rpartition('_')[2]}: let in"


def frontend_of(key: str) -> str:
    """The frontend of a key, `10.96.0.10 . udp . 53` or `tcp . 30080`, in the syntax of `vipctl`."""
    *address, protocol, port = key.split(" . ")
    return str(Frontend(address[0] if address else "", int(port), Protocol(protocol)))


def socket_of(endpoint: str) -> str:
    """`ADDRESS:PORT` for `ADDRESS . PORT`; other texts unchanged."""
    address, _, port = endpoint.partition(" . ")
    return socket_text(address, int(port)) if port else endpoint
