"""Writes the iptables rules in the chains of one forwarding. Pure.

SVC and SVL chains choose a backend, EXT and FW chains admit traffic from outside, and a SEP chain translates
the destination to one backend. Contract sections 1.5 and 1.7 define the meaning of each rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vipd.dataplane.iptables.names import Rules
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.syntax import comment, match_address, source
from vipd.dataplane.options import LOOPBACK
from vipd.dataplane.slots import interleaved, slot_counts
from vipd.model.forwarding import Endpoint, Forwarding
from vipd.model.service import Balance, Family, Masquerade, TrafficPolicy

LOCAL_SOURCE = "-m addrtype --src-type LOCAL"


class ServiceChainRules:
    """Writes the rules of the chains of each service. `terse`: without comments on probability, affinity and
    SEP rules."""

    def __init__(self, options: RuleOptions, terse: bool = False) -> None:
        self._options = options
        self._names = options.names
        self._terse = terse
        self._mark = f"-j {self._names.fixed('MARK-MASQ')}"
        self._mask = "255.255.255.255" if options.family is Family.IPV4 else ":".join(["ffff"] * 8)

    def balance(self, forwarding: Forwarding, policy: TrafficPolicy) -> Rules:
        """The SVC or SVL chain: limits, masquerade rules, then affinity, then the probability chain."""
        limited = forwarding.limits and self._options.limits
        rules = [f"-j {self._names.service(forwarding.key, 'LIM')}"] if limited else []
        rules += self._internal_masquerade(forwarding) if policy is forwarding.internal_policy else ()
        endpoints = forwarding.endpoints_under(policy)
        steps = [*self._steps(forwarding, endpoints)]
        if (seconds := self._affinity_rules(forwarding)) is not None:
            leaving = forwarding.affinity_only if policy is TrafficPolicy.CLUSTER else ()
            for note, chain in (*steps, *self._steps(forwarding, leaving)):
                pinned = f"-m recent --rcheck --seconds {seconds} --reap {self._list(chain)}"
                rules.append(f"{note}{pinned} -j {chain}")
        if forwarding.balance is Balance.ROUND_ROBIN:
            return (*rules, *_turns(endpoints, steps))
        return (*rules, *_probability_chain(endpoints, steps))

    def _steps(self, forwarding: Forwarding, endpoints: Sequence[Endpoint]) -> Iterator[tuple[str, str]]:
        """The comment and the target chain of the rules that jump to each endpoint."""
        service_port = forwarding.key.service_port
        names = self._names.endpoints(forwarding.key, endpoints)
        for endpoint, name in zip(endpoints, names, strict=True):
            yield self._note(f"{service_port} -> {endpoint}"), name

    def translations(
        self, forwarding: Forwarding, endpoints: Sequence[Endpoint]
    ) -> Iterator[tuple[str, Rules]]:
        """The SEP chain of each endpoint, with its name: it marks hairpin flows for masquerade, then rewrites
        the destination."""
        key, note = forwarding.key, self._note(forwarding.key.service_port)
        protocol, bits = key.protocol.value, self._options.family.bits
        pins = self._affinity_rules(forwarding) is not None
        for endpoint, name in zip(endpoints, self._names.endpoints(key, endpoints), strict=True):
            remember = f"-m recent --set {self._list(name)} " if pins else ""
            target = f"-m {protocol} -j DNAT --to-destination {endpoint}"
            yield (
                name,
                (
                    f"-s {endpoint.address}/{bits} {note}{self._mark}",
                    f"-p {protocol} {note}{remember}{target}",
                ),
            )

    def external(self, forwarding: Forwarding) -> Rules:
        """The EXT chain: receives traffic for node ports, external and load balancer addresses."""
        local = forwarding.external_policy is TrafficPolicy.LOCAL
        rules = list(self._external_local(forwarding) if local else self._external_masquerade(forwarding))
        if forwarding.endpoints_under(forwarding.external_policy):
            kind = "SVL" if local else "SVC"
            rules.append(f"-j {self._names.service(forwarding.key, kind)}")
        return tuple(rules)

    def firewall(self, forwarding: Forwarding, addresses: Sequence[str], networks: Sequence[str]) -> Rules:
        """The FW chain: allowed sources continue to the EXT chain; a rule in the filter table drops the
        rest."""
        key = forwarding.key
        note, onward = comment(f"{key.service_port} loadbalancer IP"), f"-j {self._names.service(key, 'EXT')}"
        dropper = self._names.fixed("PROXY-FIREWALL")
        rules = [f"{source(network)}{note} {onward}" for network in networks]
        if forwarding.allow_host:
            # A host that has such an address itself uses it as the source of packets to it.
            rules += [f"-s {a}/{self._options.family.bits} {note} {onward}" for a in addresses]
        return (*rules, comment(f"other traffic to {key.service_port} will be dropped by {dropper}"))

    def own_firewall(self, forwarding: Forwarding, note: str, target: str, *, node_port: bool) -> Rules:
        """The FW chain of the service's own addresses, or of its node port. This host uses an address that it
        has itself as the source of packets to it."""
        onward, bits = f"-j {target}", self._options.family.bits
        rules = [f"{source(network)}{note} {onward}" for network in forwarding.allow_from]
        if forwarding.allow_host_inside and node_port:
            rules.append(f"{note} {LOCAL_SOURCE} {onward}")
        elif forwarding.allow_host_inside:
            rules += [f"-s {address}/{bits} {note} {onward}" for address in forwarding.addresses]
        dropper = self._names.fixed("PROXY-FIREWALL")
        service_port = forwarding.key.service_port
        return (*rules, comment(f"other traffic to {service_port} will be dropped by {dropper}"))

    def _internal_masquerade(self, forwarding: Forwarding) -> Iterator[str]:
        """The rules that mark flows to the service's own addresses for masquerade, as its mode requires."""
        key, mode, cidrs = forwarding.key, forwarding.masquerade, self._options.cluster_cidrs
        note = comment(f"{key.service_port} cluster IP")
        # Without cluster networks of this family, all sources are outside the cluster; kube-proxy marks none.
        everything_is_outside = mode is Masquerade.OFF_CLUSTER and not (cidrs or self._options.kube_proxy)
        for address in forwarding.addresses:
            match = match_address(address, key.family, key.protocol, note, forwarding.port)
            if mode is Masquerade.ALWAYS or everything_is_outside:
                yield f"{match} {self._mark}"
            elif mode is Masquerade.FORWARDED:
                yield f"{match} -m addrtype ! --src-type LOCAL {self._mark}"
            elif mode is Masquerade.OFF_CLUSTER and len(cidrs) == 1:
                yield f"! -s {cidrs[0]} {match} {self._mark}"
            elif mode is Masquerade.OFF_CLUSTER and cidrs:
                yield f"{match} -j {self._names.fixed('MARK-OFF-CLUSTER')}"

    def _external_masquerade(self, forwarding: Forwarding) -> Iterator[str]:
        """The rules that mark external traffic under the cluster policy: the backend may be on another host,
        so only masquerade makes its replies return through this host.

        A service that declares `hairpin` guarantees that they do. kube-proxy has no such option.
        """
        note = self._about("masquerade traffic", forwarding)
        if self._options.kube_proxy or forwarding.masquerade is not Masquerade.HAIRPIN:
            yield f"{note} {self._mark}"
        elif self._options.loopback_clients:
            yield f"{source(LOOPBACK)}{note} {self._mark}"

    def _external_local(self, forwarding: Forwarding) -> Iterator[str]:
        """The rules under the local policy for clients in the cluster or on this host. They are not limited
        to this host's endpoints: their traffic is treated as if a load balancer had returned it."""
        cluster = f"-j {self._names.service(forwarding.key)}"
        for cidr in self._options.cluster_cidrs:
            yield f"-s {cidr} {self._about('pod traffic', forwarding)} {cluster}"
        yield f"{self._about('masquerade LOCAL traffic', forwarding)} {LOCAL_SOURCE} {self._mark}"
        yield f"{self._about('route LOCAL traffic', forwarding)} {LOCAL_SOURCE} {cluster}"

    def _affinity_rules(self, forwarding: Forwarding) -> int | None:
        return forwarding.affinity_timeout if self._options.affinity else None

    def _about(self, what: str, forwarding: Forwarding) -> str:
        return comment(f"{what} for {forwarding.key.service_port} external destinations")

    def _note(self, text: str) -> str:
        """A comment match and a space, or nothing."""
        return "" if self._terse else f"{comment(text)} "

    def _list(self, chain: str) -> str:
        return f"--name {chain} --mask {self._mask} --rsource"


def _turns(endpoints: Sequence[Endpoint], steps: Sequence[tuple[str, str]]) -> Iterator[str]:
    """The round robin rules, one for each slot: the first of n takes every n-th flow, the next every (n-1)-th
    of the rest, and so on.

    A backend with a higher weight has more slots, spread over the round.
    """
    order = interleaved(slot_counts(tuple(endpoint.weight for endpoint in endpoints)))
    for left, index in zip(range(len(order), 0, -1), order, strict=True):
        note, chain = steps[index]
        turn = f"-m statistic --mode nth --every {left} --packet 0 " if left > 1 else ""
        yield f"{note}{turn}-j {chain}"


def _probability_chain(endpoints: Sequence[Endpoint], steps: Sequence[tuple[str, str]]) -> Iterator[str]:
    """The random choice, one rule for each endpoint. A rule matches with the endpoint's probability, given
    that no rule before it matched: w_i / (w_i + ... + w_n) (contract 1.8)."""
    left = sum(e.weight for e in endpoints)
    for endpoint, (note, chain) in zip(endpoints[:-1], steps[:-1], strict=True):
        yield f"{note}-m statistic --mode random --probability {endpoint.weight / left:.10f} -j {chain}"
        left -= endpoint.weight
    note, chain = steps[-1]
    yield f"{note}-j {chain}"
