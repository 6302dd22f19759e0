"""The text of single matches and targets, exactly as iptables-save prints it. Pure."""

from __future__ import annotations

from functools import lru_cache

from vipd.model.service import Family, Protocol

COMMENT_LIMIT = 255
"""Both iptables variants silently truncate longer comments (contract 1.8)."""

UNUSED_PORTS_COMMENT = "vipd unused ports"
"""Comment of the rules that refuse packets for a VIP at a port that no service has."""

REMOVED_COMMENT = "vipd flows of removed services"
"""Comment of the rules that reset flows whose frontend was removed."""

OVER_LIMITS = "is over its limits"
"""Comment, after the service port, of the rules that refuse flows over a limit."""

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


@lru_cache(maxsize=1024)  # the rules of a forwarding have the same few comments
def comment(text: str) -> str:
    """A comment match, quoted if iptables-save quotes such a comment."""
    text = text[:COMMENT_LIMIT]
    return f"-m comment --comment {text}" if _PLAIN.issuperset(text) else f'-m comment --comment "{text}"'


def source(network: str) -> str:
    """A source match and a space; empty for the network of all addresses, for which iptables-save prints
    nothing."""
    return "" if network.endswith("/0") else f"-s {network} "


def match_address(address: str, family: Family, protocol: Protocol, note: str, port: int) -> str:
    """Matches packets for one address and port."""
    return f"-d {address}/{family.bits} {match_port(protocol, note, port)}"


def match_port(protocol: Protocol, note: str, port: int) -> str:
    """Matches packets for one port of any address."""
    return f"-p {protocol} {note} -m {protocol} --dport {port}"


def any_port(address: str, family: Family, protocol: Protocol, note: str) -> str:
    """Matches every port of one address."""
    return f"-d {address}/{family.bits} -p {protocol} {note}"


def echo_request(address: str, family: Family, note: str) -> str:
    """Matches a ping to one address."""
    if family is Family.IPV4:
        return f"-d {address}/32 -p icmp {note} -m icmp --icmp-type 8"
    return f"-d {address}/128 -p ipv6-icmp {note} -m icmp6 --icmpv6-type 128"
