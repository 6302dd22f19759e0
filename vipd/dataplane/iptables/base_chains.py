"""The rules that exist once, independent of services: entry jumps, marks, masquerade, FORWARD. Pure.

Each chain's rules below follow the services' own lines in it. `compat: kube-proxy` has a separate table
where kube-proxy's form differs; docs/architecture.md gives the reason for vipd's form.
"""

from __future__ import annotations

from dataclasses import dataclass

from vipd.dataplane.iptables.names import ChainId, Names, Rules
from vipd.dataplane.iptables.options import KUBE_PREFIX, RuleOptions
from vipd.dataplane.iptables.syntax import comment
from vipd.model.service import Family

NEW = "-m conntrack --ctstate NEW"


@dataclass(frozen=True, slots=True)
class Words:
    """Comments on the fixed rules. With the prefix KUBE they are kube-proxy's, which users grep for."""

    services: str = "vipd services"
    external: str = "vipd services for clients from outside"
    unused: str = "vipd unused ports"
    firewall: str = "vipd source limits"
    health: str = "vipd health ports"
    postrouting: str = "vipd postrouting rules"
    masquerade: str = "vipd traffic that needs this host as its source"
    node_ports: str = "vipd node ports; this must be the last rule in this chain"
    forward: str = "vipd translated flows"


_KUBE_WORDS = Words(
    services="kubernetes service portals",
    external="kubernetes externally-visible service portals",
    firewall="kubernetes load balancer firewall",
    health="kubernetes health check service ports",
    postrouting="kubernetes postrouting rules",
    masquerade="kubernetes service traffic requiring SNAT",
    node_ports="kubernetes service nodeports; NOTE: this must be the last rule in this chain",
    forward="kubernetes forwarding rules",
)


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
    """The fixed end of each chain entered from a built-in one; services' lines precede it."""
    names, said, mark = options.names, _words(options), f"{options.mark:#x}"
    random = " --random-fully" if options.random_fully else ""
    chains: dict[ChainId, Rules] = {
        ChainId("nat", names.fixed("SERVICES")): _to_node_ports(options),
        ChainId("nat", names.fixed("NODEPORTS")): (),
        ChainId("nat", names.fixed("POSTROUTING")): (
            f"-m mark ! --mark {mark}/{mark} -j RETURN",
            f"-j MARK --set-xmark {mark}/0x0",
            f"{comment(said.masquerade)} -j MASQUERADE{random}",
        ),
        ChainId("filter", names.fixed("SERVICES")): (),
        ChainId("filter", names.fixed("EXTERNAL-SERVICES")): (),
        ChainId("filter", names.fixed("NODEPORTS")): (),
        ChainId("filter", names.fixed("PROXY-FIREWALL")): (),
    }
    return chains | (_kube_proxy_chains(options) if options.kube_proxy else _own_chains(options))


def entry_jumps(options: RuleOptions) -> dict[ChainId, Rules]:
    """The rules in each built-in chain, in order; `jump_order.py` says where."""
    names, said = options.names, _words(options)
    first = "SERVICES" if options.kube_proxy else "PREROUTING"
    filter_jumps = _kube_proxy_filter_jumps if options.kube_proxy else _own_filter_jumps
    return {
        ChainId("nat", "PREROUTING"): (_jump(names, first, said.services),),
        ChainId("nat", "OUTPUT"): (_jump(names, "SERVICES", said.services),),
        ChainId("nat", "POSTROUTING"): (_jump(names, "POSTROUTING", said.postrouting),),
        **filter_jumps(options),
    }


def accept_rules(options: RuleOptions) -> Rules:
    """The rules that accept the flows that vipd translated, in the chain FORWARD of the prefix."""
    flow = f"{options.flow_mark:#x}"
    ours = f"-m conntrack --ctstate DNAT -m connmark --mark {flow}/{flow}"
    return (f"{comment(_words(options).forward)} {ours} -j ACCEPT",)


def accept_jump(options: RuleOptions) -> str:
    """The jump to that chain from the built-in FORWARD."""
    return _jump(options.names, "FORWARD", _words(options).forward)


def kube_proxy_accept_rules(options: RuleOptions) -> Rules:
    """The rules by which kube-proxy accepts in FORWARD."""
    said, mark = _words(options), f"{options.mark:#x}"
    established = "-m conntrack --ctstate RELATED,ESTABLISHED"
    return (
        f"{comment(said.forward)} -m mark --mark {mark}/{mark} -j ACCEPT",
        f"{comment('kubernetes forwarding conntrack rule')} {established} -j ACCEPT",
    )


def _own_chains(options: RuleOptions) -> dict[ChainId, Rules]:
    names, flow = options.names, f"{options.flow_mark:#x}"
    services = f"-j {names.fixed('SERVICES')}"
    accept = accept_rules(options) if options.accept_forwarded else ()
    return {
        # DNAT ends the walk, so only flows that vipd did not translate get to lose the mark again.
        ChainId("nat", names.fixed("PREROUTING")): (
            (f"-j CONNMARK --set-xmark {flow}/{flow}", services, f"-j CONNMARK --set-xmark 0x0/{flow}")
            if options.flow_marks
            else (services,)
        ),
        ChainId("filter", names.fixed("FORWARD")): accept,
        ChainId("filter", names.fixed("UNUSED")): (),
    }


def _kube_proxy_chains(options: RuleOptions) -> dict[ChainId, Rules]:
    names = options.names
    chains: dict[ChainId, Rules] = {
        ChainId("filter", names.fixed("FORWARD")): (
            "-m conntrack --ctstate INVALID -j DROP",
            *kube_proxy_accept_rules(options),
        ),
    }
    chains[ChainId("filter", names.fixed("FIREWALL"))] = ()
    if _guards_localhost(options):
        states = "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT"
        note = comment("block incoming localnet connections")
        chains[ChainId("filter", names.fixed("FIREWALL"))] = (
            f"! -s 127.0.0.0/8 -d 127.0.0.0/8 {note} {states} -j DROP",
        )
    return chains


def _own_filter_jumps(options: RuleOptions) -> dict[ChainId, Rules]:
    """Refusals are in all three chains: a VIP may be an address of this host (trap 10)."""
    names, said = options.names, _words(options)
    refusals = (
        _jump(names, "PROXY-FIREWALL", said.firewall, NEW),
        _jump(names, "SERVICES", said.services, NEW),
        _jump(names, "EXTERNAL-SERVICES", said.external, NEW),
        _jump(names, "UNUSED", said.unused, NEW),
    )
    return {
        ChainId("filter", "INPUT"): (*refusals, _jump(names, "NODEPORTS", said.health)),
        ChainId("filter", "FORWARD"): (*refusals, accept_jump(options)),
        ChainId("filter", "OUTPUT"): refusals,
    }


def _kube_proxy_filter_jumps(options: RuleOptions) -> dict[ChainId, Rules]:
    """kube-proxy's jumps, in the order in which they end up on a clean host (contract 1.2)."""
    names, said = options.names, _words(options)
    localhost = f"-j {names.fixed('FIREWALL')}"
    firewall = _jump(names, "PROXY-FIREWALL", said.firewall, NEW)
    services = _jump(names, "SERVICES", said.services, NEW)
    external = _jump(names, "EXTERNAL-SERVICES", said.external, NEW)
    return {
        ChainId("filter", "INPUT"): (localhost, firewall, _jump(names, "NODEPORTS", said.health), external),
        ChainId("filter", "FORWARD"): (firewall, accept_jump(options), services, external),
        ChainId("filter", "OUTPUT"): (localhost, firewall, services),
    }


def _jump(names: Names, kind: str, said: str, condition: str = "") -> str:
    return " ".join(part for part in (condition, comment(said), f"-j {names.fixed(kind)}") if part)


def _to_node_ports(options: RuleOptions) -> Rules:
    """The rules that lead to the node ports: for all of this host's addresses, or for each configured one."""
    note, target = comment(_words(options).node_ports), f"-j {options.names.fixed('NODEPORTS')}"
    return tuple(f"{to}{note} {local}{target}" for to, local in node_port_destinations(options))


def node_port_destinations(options: RuleOptions) -> tuple[tuple[str, str], ...]:
    """The matches for addresses with node ports, a rule for each: what stands before the comment, and after
    it."""
    if options.node_port_addresses is not None:
        bits = options.family.bits
        return tuple((f"-d {address}/{bits} ", "") for address in options.node_port_addresses)
    local = "-m addrtype --dst-type LOCAL "
    if options.family is Family.IPV6:
        return (("! -d ::1/128 ", local),)
    return (("" if options.localhost_node_ports else "! -d 127.0.0.0/8 ", local),)


def _guards_localhost(options: RuleOptions) -> bool:
    """kube-proxy protects 127.0.0.0/8 from other hosts if node ports answer there (contract 1.3)."""
    named = options.node_port_addresses
    loopback = named is None or any(address.startswith("127.") for address in named)
    return options.localhost_node_ports and options.family is Family.IPV4 and loopback


def _words(options: RuleOptions) -> Words:
    return _KUBE_WORDS if options.prefix == KUBE_PREFIX else Words()
