"""The chains that exist once, whatever the services: hooks, dispatch, VIPs as a whole, masquerade. Pure."""

from __future__ import annotations

from typing import NamedTuple

from vipd.dataplane.nftables.layout import (
    CLAIMED,
    DISPATCH_MAP,
    FLOWS,
    FRONTENDS,
    HAIRPIN,
    NODE_PORTS,
    PINGED,
    REPLY_FRONTENDS,
    REPLY_SOURCES,
    UNUSED,
    Rules,
)
from vipd.dataplane.nftables.options import TableOptions
from vipd.model.service import Family, Protocol

REFUSED = (Protocol.UDP, Protocol.SCTP)
"""Protocols, besides TCP, of which unused ports of a VIP are refused."""


class Hook(NamedTuple):
    """The hook of a base chain: its names for nft, and its numbers in the kernel."""

    name: str
    number: int
    priority: int

    def __str__(self) -> str:
        return f"type nat hook {self.name} priority {self.priority}; policy accept;"


HOOKS = {
    "prerouting": Hook("prerouting", 0, -100),
    "input": Hook("input", 1, 100),
    "output": Hook("output", 3, -100),
    "postrouting": Hook("postrouting", 4, 100),
}
"""Base chains, all of nat: the kernel runs them for the first packet of a flow only, at the priorities of
iptables' nat. Once a nat rule has translated a flow, the kernel runs no further ones for it."""

ENTRANCES = ("prerouting", "output")
"""Those in which packets are led to services."""


def fixed_chains(options: TableOptions, takeover: bool = False) -> dict[str, Rules]:
    """Every chain that always exists, with its rules. From `dispatch` to `handover` the destination address
    contains the number of a chain. `takeover`: with the rules for flows of other hosts."""
    ip, dispatch = options.ip, ("goto dispatch",)
    frontend = f"{ip} daddr . meta l4proto . th dport map @{FRONTENDS.name}"
    echo = "icmp type echo-request" if options.family is Family.IPV4 else "icmpv6 type echo-request"
    return {
        "prerouting": (*((_reply_marked(options),) if takeover else ()), *dispatch),
        "output": dispatch,
        "dispatch": (
            f"{ip} daddr set {frontend} goto handover",
            f"meta l4proto . th dport vmap @{NODE_PORTS.name}",
            *((f"{ip} daddr @{PINGED.name} {echo} redirect",) if options.ping else ()),
            f"{ip} daddr @{CLAIMED.name} goto {UNUSED}",
        ),
        "handover": (f"{ip} daddr vmap @{DISPATCH_MAP.name}", "drop"),
        UNUSED: ("meta l4proto tcp reject with tcp reset", _refused()),
        "input": (_ours(options, "jump counting"),) if options.counts else (),
        "counting": _counting(options),
        "postrouting": _postrouting(options, takeover),
    }


_CONTINUES = "tcp flags & 0x2 == 0x0"
"""Matches a first packet that continues a TCP flow: it has no SYN. The kernel evaluates nat rules for it,
too, because it tracks flows from any segment (nf_conntrack_tcp_loose)."""


def _endpoint(options: TableOptions) -> str:
    return f"{options.ip} saddr . tcp sport"


def _reply_marked(options: TableOptions) -> str:
    """The flow of such a segment from an endpoint becomes vipd's, before the forward hook."""
    replies = f"{_CONTINUES} {_endpoint(options)} @{REPLY_SOURCES.name}"
    return f"{replies} ct mark set ct mark | {options.flow_mark:#x}"


def _replies(options: TableOptions) -> Rules:
    """A reply that arrives before any packet of its client: without translation, the client would reset the
    flow, and the entry would take the place of the right one. If the service is known, it becomes the source:
    an entry that begins at the endpoint translates both directions, too. If not, it is dropped, so that the
    client's next packet makes the entry; the endpoint retransmits."""
    endpoint = _endpoint(options)
    return (
        f"{_CONTINUES} snat {options.ip} to {endpoint} map @{REPLY_FRONTENDS.name}",
        f"{_CONTINUES} {endpoint} @{REPLY_SOURCES.name} drop",
    )


def _postrouting(options: TableOptions, takeover: bool) -> Rules:
    ip, mark = options.ip, f"{options.mark:#x}"
    flow = f"{options.flow_mark:#x}"
    return (
        f"ct mark & {flow} != {flow} return",
        *(_replies(options) if takeover else ()),
        *(("jump counting",) if options.counts else ()),
        f"meta mark & {mark} == {mark} meta mark set meta mark ^ {mark} masquerade{options.random}",
        f"{ip} saddr . {ip} daddr @{HAIRPIN.name} masquerade{options.random}",
    )


def _counting(options: TableOptions) -> Rules:
    """A rule for each protocol: nft knows the type of a tracked port only if the protocol is known."""
    ip = options.ip
    return tuple(
        f"meta l4proto {protocol} update @{FLOWS.name} {{ ct original {ip} daddr . meta l4proto"
        f" . ct original proto-dst . {ip} daddr . {protocol} dport counter }}"
        for protocol in Protocol
        if options.counts
    )


def _ours(options: TableOptions, rest: str) -> str:
    return f"ct mark & {options.flow_mark:#x} == {options.flow_mark:#x} {rest}"


def _refused() -> str:
    return f"meta l4proto {{ {', '.join(REFUSED)} }} reject"
