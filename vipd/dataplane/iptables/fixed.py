"""The rules that exist once, whatever the services: entry jumps, marks, masquerade, FORWARD. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from vipd.dataplane.iptables.compile import KUBE_PREFIX, RuleOptions, comment
from vipd.dataplane.iptables.names import ChainId, Rules
from vipd.model import Family


@dataclass(frozen=True, slots=True)
class Words:
    """Comments on the fixed rules. With the prefix KUBE they are kube-proxy's, which users grep for."""

    services: str
    postrouting: str
    masquerade: str
    node_ports: str
    forward: str


_WORDS = Words(
    services="vipd services",
    postrouting="vipd postrouting rules",
    masquerade="vipd traffic that needs this host as its source",
    node_ports="vipd node ports; this must be the last rule in this chain",
    forward="vipd translated flows",
)
_KUBE_WORDS = Words(
    services="kubernetes service portals",
    postrouting="kubernetes postrouting rules",
    masquerade="kubernetes service traffic requiring SNAT",
    node_ports="kubernetes service nodeports; NOTE: this must be the last rule in this chain",
    forward="kubernetes forwarding rules",
)


def words(options: RuleOptions) -> Words:
    """The comments that fit the chain prefix."""
    return _KUBE_WORDS if options.prefix == KUBE_PREFIX else _WORDS


def marking_chains(options: RuleOptions) -> dict[ChainId, Rules]:
    """Chains that leaf chains jump to, so that they must exist first."""
    names, mark = options.names, f"{options.mark:#x}"
    mark_masquerade = names.fixed("MARK-MASQ")
    chains: dict[ChainId, Rules] = {
        ChainId("nat", mark_masquerade): (f"-j MARK --set-xmark {mark}/{mark}",),
    }
    if len(options.cluster_cidrs) > 1:
        inside = tuple(f"-s {cidr} -j RETURN" for cidr in options.cluster_cidrs)
        chains[ChainId("nat", names.fixed("MARK-OFF-CLUSTER"))] = (*inside, f"-j {mark_masquerade}")
    return chains


def entry_chains(options: RuleOptions) -> dict[ChainId, Rules]:
    """The fixed end of each chain entered from a built-in one; services' lines come before it."""
    names, said = options.names, words(options)
    mark, flow = f"{options.mark:#x}", f"{options.flow_mark:#x}"
    random = " --random-fully" if options.random_fully else ""
    accept = f"{comment(said.forward)} -m conntrack --ctstate DNAT -m connmark --mark {flow}/{flow} -j ACCEPT"
    return {
        ChainId("nat", names.fixed("PREROUTING")): (
            # DNAT ends the walk, so only flows that vipd did not translate get to lose the mark again.
            f"-j CONNMARK --set-xmark {flow}/{flow}",
            f"-j {names.fixed('SERVICES')}",
            f"-j CONNMARK --set-xmark 0x0/{flow}",
        ),
        ChainId("nat", names.fixed("SERVICES")): (_to_node_ports(options),),
        ChainId("nat", names.fixed("NODEPORTS")): (),
        ChainId("nat", names.fixed("POSTROUTING")): (
            f"-m mark ! --mark {mark}/{mark} -j RETURN",
            f"-j MARK --set-xmark {mark}/0x0",
            f"{comment(said.masquerade)} -j MASQUERADE{random}",
        ),
        ChainId("filter", names.fixed("SERVICES")): (),
        ChainId("filter", names.fixed("FORWARD")): (accept,) if options.accept_forwarded else (),
    }


def entry_jumps(options: RuleOptions) -> dict[ChainId, Rules]:
    """What stands at the head of each built-in chain, in order."""
    names, said = options.names, words(options)
    new = "-m conntrack --ctstate NEW"
    refusals = f"{new} {comment(said.services)} -j {names.fixed('SERVICES')}"
    return {
        ChainId("nat", "PREROUTING"): (f"{comment(said.services)} -j {names.fixed('PREROUTING')}",),
        ChainId("nat", "OUTPUT"): (f"{comment(said.services)} -j {names.fixed('SERVICES')}",),
        ChainId("nat", "POSTROUTING"): (f"{comment(said.postrouting)} -j {names.fixed('POSTROUTING')}",),
        ChainId("filter", "INPUT"): (refusals,),
        ChainId("filter", "FORWARD"): (
            refusals,
            f"{comment(said.forward)} -j {names.fixed('FORWARD')}",
        ),
        ChainId("filter", "OUTPUT"): (refusals,),
    }


def _to_node_ports(options: RuleOptions) -> str:
    note = comment(words(options).node_ports)
    local = f"{note} -m addrtype --dst-type LOCAL -j {options.names.fixed('NODEPORTS')}"
    if options.family is Family.IPV6:
        return f"! -d ::1/128 {local}"
    return local if options.localhost_node_ports else f"! -d 127.0.0.0/8 {local}"
