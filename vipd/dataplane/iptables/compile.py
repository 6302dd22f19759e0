"""From one forwarding to its rules, in the exact spelling that iptables-save gives back. Pure.

What each rule means is written in the contract (section 1) and in README.md beside this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vipd.dataplane.iptables.names import ChainId, Names, Rules
from vipd.model import Endpoint, Family, Forwarding, Masquerade, Refusal

if TYPE_CHECKING:  # pydantic is slow to import and not needed to compile
    from vipd.settings import Settings

COMMENT_LIMIT = 255
"""Both iptables variants cut longer comments without a word (contract 1.8)."""

_PLAIN_COMMENT = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")

KUBE_PREFIX = "KUBE"
"""The prefix with which chains are named, and commented, like kube-proxy's."""

SERVICES_NAT = ("nat", "SERVICES")
SERVICES_FILTER = ("filter", "SERVICES")


@dataclass(frozen=True, slots=True)
class RuleOptions:
    """What the settings say about the rules of one family."""

    family: Family
    prefix: str = "VIPD"
    mark: int = 0x4000
    flow_mark: int = 0x2000
    cluster_cidrs: tuple[str, ...] = ()
    random_fully: bool = True
    localhost_node_ports: bool = False
    accept_forwarded: bool = True

    @classmethod
    def of(cls, settings: Settings, family: Family, random_fully: bool) -> RuleOptions:
        """The options that the daemon's settings mean; `random_fully` is what the tool can do."""
        local = settings.localhost_node_ports
        return cls(
            family=family,
            prefix=settings.chain_prefix,
            mark=1 << settings.mark_bit,
            flow_mark=1 << settings.flow_mark_bit,
            cluster_cidrs=settings.cluster_cidrs_of(family),
            random_fully=random_fully if settings.random_fully is None else settings.random_fully,
            localhost_node_ports=settings.chain_prefix == KUBE_PREFIX if local is None else local,
            accept_forwarded=settings.accept_forwarded,
        )

    @property
    def names(self) -> Names:
        """The chain names of this prefix."""
        return Names(self.prefix)


@dataclass(frozen=True, slots=True)
class Fragment:
    """One forwarding's part of the rules: chains of its own, and its lines in chains that all share."""

    chains: Mapping[ChainId, Rules]
    shared: Mapping[ChainId, Rules]


def comment(text: str) -> str:
    """A comment match, quoted as iptables-save quotes it."""
    text = text[:COMMENT_LIMIT]
    return f"-m comment --comment {text if _PLAIN_COMMENT.issuperset(text) else chr(34) + text + chr(34)}"


class Compiler:
    """Compiles forwardings of one family under one set of options."""

    def __init__(self, options: RuleOptions) -> None:
        self._options = options
        self._names = options.names
        self._mark_masquerade = f"-j {self._names.fixed('MARK-MASQ')}"
        self._recent_mask = "255.255.255.255" if options.family is Family.IPV4 else ":".join(["ffff"] * 8)
        unreachable = "icmp-port-unreachable" if options.family is Family.IPV4 else "icmp6-port-unreachable"
        self._refusals = {
            Refusal.REJECT: f"-j REJECT --reject-with {unreachable}",
            Refusal.DROP: "-j DROP",
        }

    def compile(self, forwarding: Forwarding) -> Fragment:
        """The rules of one forwarding. Equal input gives equal rules."""
        if not forwarding.endpoints:
            return self._refused(forwarding)
        service = self._names.service(forwarding.key)
        cluster_ip = comment(f"{forwarding.key.service_port} cluster IP")
        chains = {ChainId("nat", service): tuple(self._balance(forwarding, cluster_ip))}
        for endpoint in forwarding.endpoints:
            name = self._names.endpoint(forwarding.key, endpoint)
            chains[ChainId("nat", name)] = self._translate(forwarding, endpoint, name)
        dispatch = tuple(f"{match} -j {service}" for match in self._matches(forwarding, cluster_ip))
        return Fragment(chains, {self._shared(SERVICES_NAT): dispatch})

    def _refused(self, forwarding: Forwarding) -> Fragment:
        target = self._refusals[forwarding.refusal]
        reason = comment(f"{forwarding.key.service_port} has no endpoints")
        rules = tuple(f"{match} {target}" for match in self._matches(forwarding, reason))
        return Fragment({}, {self._shared(SERVICES_FILTER): rules})

    def _balance(self, forwarding: Forwarding, cluster_ip: str) -> Iterator[str]:
        """The SVC chain: who is masqueraded, pinned clients, then the ladder."""
        for match in self._matches(forwarding, cluster_ip):
            yield from self._masquerade(forwarding.masquerade, match)
        steps = [
            (
                comment(f"{forwarding.key.service_port} -> {endpoint}"),
                self._names.endpoint(forwarding.key, endpoint),
            )
            for endpoint in forwarding.endpoints
        ]
        if forwarding.affinity_timeout is not None:
            for note, chain in steps:
                recent = (
                    f"-m recent --rcheck --seconds {forwarding.affinity_timeout} --reap {self._list(chain)}"
                )
                yield f"{note} {recent} -j {chain}"
        yield from _ladder(forwarding.endpoints, steps)

    def _masquerade(self, mode: Masquerade, match: str) -> Iterator[str]:
        """The mark for flows that need this host's address, besides hairpin ones."""
        cidrs = self._options.cluster_cidrs
        if mode is Masquerade.ALWAYS:
            yield f"{match} {self._mark_masquerade}"
        elif mode is Masquerade.FORWARDED:
            yield f"{match} -m addrtype ! --src-type LOCAL {self._mark_masquerade}"
        elif mode is Masquerade.OFF_CLUSTER and len(cidrs) == 1:
            yield f"! -s {cidrs[0]} {match} {self._mark_masquerade}"
        elif mode is Masquerade.OFF_CLUSTER and cidrs:
            yield f"{match} -j {self._names.fixed('MARK-OFF-CLUSTER')}"

    def _translate(self, forwarding: Forwarding, endpoint: Endpoint, chain: str) -> Rules:
        """The SEP chain: hairpin flows are masqueraded, then the destination is rewritten."""
        note = comment(forwarding.key.service_port)
        protocol = forwarding.key.protocol
        remember = f" -m recent --set {self._list(chain)}" if forwarding.affinity_timeout is not None else ""
        return (
            f"-s {endpoint.address}/{self._options.family.bits} {note} {self._mark_masquerade}",
            f"-p {protocol} {note}{remember} -m {protocol} -j DNAT --to-destination {endpoint}",
        )

    def _matches(self, forwarding: Forwarding, note: str) -> Iterator[str]:
        protocol, bits = forwarding.key.protocol, self._options.family.bits
        for address in forwarding.addresses:
            yield f"-d {address}/{bits} -p {protocol} {note} -m {protocol} --dport {forwarding.port}"

    def _list(self, chain: str) -> str:
        return f"--name {chain} --mask {self._recent_mask} --rsource"

    def _shared(self, where: tuple[str, str]) -> ChainId:
        return ChainId(where[0], self._names.fixed(where[1]))


def _ladder(endpoints: tuple[Endpoint, ...], steps: list[tuple[str, str]]) -> Iterator[str]:
    """Each endpoint's chance given that none before it was taken: w_i / (w_i + ... + w_n) (contract 1.8)."""
    left = sum(e.weight for e in endpoints)
    for endpoint, (note, chain) in zip(endpoints[:-1], steps[:-1], strict=True):
        yield f"{note} -m statistic --mode random --probability {endpoint.weight / left:.10f} -j {chain}"
        left -= endpoint.weight
    note, chain = steps[-1]
    yield f"{note} -j {chain}"
