"""Compiles one forwarding to rules: its chains, and its lines in the chains that all share. Pure.

The decisions are kube-proxy's, contract sections 1.4 to 1.6.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vipd.dataplane.iptables.base_chains import node_port_destinations
from vipd.dataplane.iptables.dispatch import NO_ADDRESS, ByAddress
from vipd.dataplane.iptables.limit_chain import limit_rules
from vipd.dataplane.iptables.names import ChainId, Rules
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.service_chains import ServiceChainRules
from vipd.dataplane.iptables.syntax import (
    OVER_LIMITS,
    REMOVED_COMMENT,
    UNUSED_PORTS_COMMENT,
    any_port,
    comment,
    echo_request,
    match_address,
    match_port,
)
from vipd.model.forwarding import Forwarding
from vipd.model.service import ExternalAddress, Family, Protocol, RejectAction, TrafficPolicy

_RESET = "-j REJECT --reject-with tcp-reset"
_UNTRANSLATED = "-m conntrack ! --ctstate DNAT "
_UNDER_WAY = "! --tcp-flags FIN,SYN,RST,ACK SYN"
"""Matches every TCP segment except the first of a flow."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """One forwarding's part of the rules: its own chains, and its lines in shared chains."""

    chains: Mapping[ChainId, Rules]
    shared: Mapping[ChainId, ByAddress]
    """Its lines by the address that they are about."""


class _Lines:
    """Collects lines for shared chains, in order."""

    def __init__(self) -> None:
        self.found: dict[ChainId, dict[str, Rules]] = {}

    def add(self, chain: ChainId, rule: str, address: str = NO_ADDRESS) -> None:
        rules = self.found.setdefault(chain, {})
        rules[address] = (*rules.get(address, ()), rule)


class Compiler:
    """Compiles forwardings of one family under one set of options. `terse` as in `ServiceChainRules`."""

    def __init__(self, options: RuleOptions, terse: bool = False) -> None:
        self._options = options
        self._names = options.names
        self._leaves = ServiceChainRules(options, terse)
        version = "icmp" if options.family is Family.IPV4 else "icmp6"
        self._reject = f"-j REJECT --reject-with {version}-port-unreachable"
        self._chain_ids: dict[tuple[str, str], ChainId] = {}
        """The shared chains, by table and kind."""
        self._unused = ((Protocol.TCP, _RESET), (Protocol.UDP, self._reject), (Protocol.SCTP, self._reject))

    def compile(self, forwarding: Forwarding) -> Fragment:
        """The rules of one forwarding. Equal input gives equal rules."""
        lines = _Lines()
        if forwarding.frontend_removed:
            self._reset(forwarding, lines)
            return Fragment({}, lines.found)
        self._dispatch_internal(forwarding, lines)
        self._dispatch_external(forwarding, lines)
        if self._options.beyond_kube_proxy:
            self._answer_for_address(forwarding, lines)
        if forwarding.health_port:
            note = comment(f"{forwarding.key.service_port} health check node port")
            lines.add(
                self._shared("filter", "NODEPORTS"),
                f"{match_port(Protocol.TCP, note, forwarding.health_port)} -j ACCEPT",
            )
        return Fragment(self.chains(forwarding), lines.found)

    def chains(self, forwarding: Forwarding) -> Mapping[ChainId, Rules]:
        """The chains of one forwarding alone, as in its fragment."""
        if forwarding.frontend_removed:
            return {}
        return {ChainId("nat", name): rules for name, rules in self._chains(forwarding)}

    def _chains(self, forwarding: Forwarding) -> Iterator[tuple[str, Rules]]:
        key, leaves = forwarding.key, self._leaves
        if forwarding.limits and self._options.limits and forwarding.reachable():
            name = self._names.service(key, "LIM")
            yield name, limit_rules(key, forwarding.limits, name)
        if forwarding.endpoints:
            yield self._names.service(key), leaves.balance(forwarding, TrafficPolicy.CLUSTER)
        if forwarding.local_endpoints:
            yield self._names.service(key, "SVL"), leaves.balance(forwarding, TrafficPolicy.LOCAL)
        if forwarding.has_endpoints and forwarding.externally_exposed:
            yield self._names.service(key, "EXT"), leaves.external(forwarding)
            for networks, (name, addresses) in self._firewalls(forwarding).items():
                yield name, leaves.firewall(forwarding, addresses, networks)
        if forwarding.allow_from:
            yield from self._own_firewalls(forwarding)
        pinned = forwarding.affinity_only if forwarding.endpoints and self._options.affinity else ()
        yield from leaves.translations(forwarding, (*forwarding.reachable(), *pinned))

    def _firewalls(self, forwarding: Forwarding) -> dict[tuple[str, ...], tuple[str, list[str]]]:
        """Each limit on the source of external traffic: its chain and the addresses that it is for."""
        found: dict[tuple[str, ...], tuple[str, list[str]]] = {}
        for external in forwarding.external_addresses:
            if networks := external.allow_from:
                name = self._names.firewall(forwarding.key, ",".join(networks) if found else "")
                found.setdefault(networks, (name, []))[1].append(external.address)
        return found

    def _own_firewall(self, forwarding: Forwarding, frontends: str) -> str:
        """The chain that checks sources at the service's own addresses or its node port; empty if all may
        come."""
        return self._names.firewall(forwarding.key, frontends) if forwarding.allow_from else ""

    def _own_firewalls(self, forwarding: Forwarding) -> Iterator[tuple[str, Rules]]:
        key, leaves = forwarding.key, self._leaves
        if forwarding.addresses and forwarding.endpoints_under(forwarding.internal_policy):
            note, target = comment(f"{key.service_port} cluster IP"), self._internal(forwarding)
            name = self._own_firewall(forwarding, "inside")
            yield name, leaves.own_firewall(forwarding, note, target, node_port=False)
        if forwarding.node_port and forwarding.has_endpoints:
            note, target = comment(key.service_port), self._names.service(key, "EXT")
            name = self._own_firewall(forwarding, "node port")
            yield name, leaves.own_firewall(forwarding, note, target, node_port=True)

    def _internal(self, forwarding: Forwarding) -> str:
        kind = "SVL" if forwarding.internal_policy is TrafficPolicy.LOCAL else "SVC"
        return self._names.service(forwarding.key, kind)

    def _dispatch_internal(self, forwarding: Forwarding, lines: _Lines) -> None:
        key = forwarding.key
        endpoints = forwarding.endpoints_under(forwarding.internal_policy)
        firewall = self._own_firewall(forwarding, "inside")
        for address in forwarding.addresses:
            if endpoints:
                note = comment(f"{key.service_port} cluster IP")
                match = match_address(address, key.family, key.protocol, note, forwarding.port)
                chain = firewall or self._internal(forwarding)
                lines.add(self._shared("nat", "SERVICES"), f"{match} -j {chain}", address)
                if firewall:
                    self._drop_others(forwarding, address, firewall, lines)
            for note, target in self._refusals(forwarding, over_limit=bool(endpoints)):
                match = match_address(address, key.family, key.protocol, note, forwarding.port)
                lines.add(self._shared("filter", "SERVICES"), f"{match} {target}", address)

    def _answer_for_address(self, forwarding: Forwarding, lines: _Lines) -> None:
        """Ping, and the ports of a VIP that no service has. Every port of the VIP adds these; one copy is
        written."""
        pings = self._options.ping and forwarding.answers_ping and forwarding.reachable()
        for address in forwarding.addresses:
            if pings:
                match = echo_request(address, self._options.family, comment("vipd ping"))
                lines.add(self._shared("nat", "SERVICES"), f"{match} -j REDIRECT", address)
            if self._options.reject_unused_ports:
                for protocol, target in self._unused:
                    match = any_port(address, self._options.family, protocol, comment(UNUSED_PORTS_COMMENT))
                    lines.add(self._shared("filter", "UNUSED"), f"{match} {target}", address)

    def _dispatch_external(self, forwarding: Forwarding, lines: _Lines) -> None:
        key = forwarding.key
        refused = not forwarding.endpoints_under(forwarding.external_policy)
        firewalls = self._firewalls(forwarding)
        for external in forwarding.external_addresses:
            if forwarding.has_endpoints:
                firewall = firewalls[external.allow_from][0] if external.allow_from else ""
                self._dispatch_address(forwarding, external, firewall, lines)
            refusals = self._shared("filter", "EXTERNAL-SERVICES")
            for note, target in self._refusals(forwarding, over_limit=not refused):
                match = match_address(external.address, key.family, key.protocol, note, forwarding.port)
                lines.add(refusals, f"{match} {target}", external.address)
        if forwarding.node_port:
            self._dispatch_node_port(forwarding, forwarding.node_port, refused, lines)

    def _dispatch_address(
        self, forwarding: Forwarding, external: ExternalAddress, firewall: str, lines: _Lines
    ) -> None:
        key = forwarding.key
        kind = "loadbalancer IP" if external.load_balancer else "external IP"
        note = comment(f"{key.service_port} {kind}")
        match = match_address(external.address, key.family, key.protocol, note, forwarding.port)
        chain = firewall or self._names.service(key, "EXT")
        lines.add(self._shared("nat", "SERVICES"), f"{match} -j {chain}", external.address)
        if firewall:
            self._drop_others(forwarding, external.address, firewall, lines)

    def _drop_others(self, forwarding: Forwarding, address: str, firewall: str, lines: _Lines) -> None:
        """Drop what an FW chain has not led on: it is not translated."""
        key = forwarding.key
        said = comment(f"{key.service_port} traffic not accepted by {firewall}")
        match = match_address(address, key.family, key.protocol, said, forwarding.port)
        lines.add(self._shared("filter", "PROXY-FIREWALL"), f"{match} -j DROP", address)

    def _dispatch_node_port(self, forwarding: Forwarding, port: int, refused: bool, lines: _Lines) -> None:
        """Node ports are not subject to the ranges of load balancer addresses, as for kube-proxy (contract
        1.4)."""
        key = forwarding.key
        firewall = self._own_firewall(forwarding, "node port")
        if forwarding.has_endpoints:
            match = match_port(key.protocol, comment(key.service_port), port)
            chain = firewall or self._names.service(key, "EXT")
            lines.add(self._shared("nat", "NODEPORTS"), f"{match} -j {chain}")
            if firewall:
                said = comment(f"{key.service_port} traffic not accepted by {firewall}")
                for to, local in node_port_destinations(self._options):
                    to_host = f"{to}-p {key.protocol} {said} {local}{_UNTRANSLATED}"
                    match = f"{to_host}-m {key.protocol} --dport {port}"
                    lines.add(self._shared("filter", "PROXY-FIREWALL"), f"{match} -j DROP")
        # Without endpoints at every own address, as kube-proxy refuses. Over a limit only where the port is
        # served, and only what is not translated: a backend may be this host itself, at the same port.
        untranslated = "" if refused else _UNTRANSLATED
        everywhere = (("", "-m addrtype --dst-type LOCAL "),)
        destinations = everywhere if refused else node_port_destinations(self._options)
        for note, target in self._refusals(forwarding, over_limit=not refused):
            for to, local in destinations:
                to_host = f"{to}-p {key.protocol} {note} {local}{untranslated}"
                match = f"{to_host}-m {key.protocol} --dport {port}"
                lines.add(self._shared("filter", "EXTERNAL-SERVICES"), f"{match} {target}")

    def _reset(self, forwarding: Forwarding, lines: _Lines) -> None:
        """Connection tracking has forgotten an old flow, so its next packet counts as new but is no SYN. A
        SYN is handled as if vipd were not there."""
        key, note = forwarding.key, comment(REMOVED_COMMENT)
        for address in forwarding.addresses:
            match = match_address(address, key.family, key.protocol, note, forwarding.port)
            lines.add(self._shared("filter", "SERVICES"), f"{match} {_UNDER_WAY} {_RESET}", address)
        if forwarding.node_port:
            to_host = f"-p {key.protocol} {note} -m addrtype --dst-type LOCAL -m {key.protocol}"
            rule = f"{to_host} --dport {forwarding.node_port} {_UNDER_WAY} {_RESET}"
            lines.add(self._shared("filter", "EXTERNAL-SERVICES"), rule)

    def _refusals(self, forwarding: Forwarding, *, over_limit: bool) -> Iterator[tuple[str, str]]:
        """The comments and targets, in order: where new flows are dropped, old ones may still get a reset.

        `over_limit`: of flows that are over a limit of a service that can serve; nothing without limits.
        """
        if over_limit:
            if forwarding.limits and self._options.limits:
                note = comment(f"{forwarding.key.service_port} {OVER_LIMITS}")
                yield note, self._refuse(forwarding)
            return
        note, target = self._refusal(forwarding)
        if target == "-j DROP" and forwarding.resets_flows and self._options.beyond_kube_proxy:
            yield note, f"{_UNDER_WAY} {_RESET}"
        yield note, target

    def _refusal(self, forwarding: Forwarding) -> tuple[str, str]:
        """The comment and target for traffic that no endpoint may take.

        If all endpoints are on other hosts, it drops: a client behind a load balancer then tries another.
        """
        if forwarding.has_endpoints:
            return comment(f"{forwarding.key.service_port} has no local endpoints"), "-j DROP"
        return comment(f"{forwarding.key.service_port} has no endpoints"), self._refuse(forwarding)

    def _refuse(self, forwarding: Forwarding) -> str:
        """The target that refuses a new flow as the service declares."""
        if forwarding.refusal is RejectAction.DROP:
            return "-j DROP"
        # A reset is always effective at once; an ICMPv6 error for a busy socket is lost, and the
        # client retries a second later (measured on 6.18, client on the same machine).
        reset = forwarding.key.protocol is Protocol.TCP and self._options.beyond_kube_proxy
        return _RESET if reset else self._reject

    def _shared(self, table: str, kind: str) -> ChainId:
        known = self._chain_ids.get((table, kind))
        if known is None:
            known = self._chain_ids[table, kind] = ChainId(table, self._names.fixed(kind))
        return known
