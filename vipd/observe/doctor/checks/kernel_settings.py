"""Kernel settings that forwarding needs, and those that swallow packets. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address, ip_network

from vipd.model.service import Family
from vipd.observe.doctor.facts import Facts, Link
from vipd.observe.doctor.finding import MAX_FIXES, Check, CheckResult, listed, problem, warning

GROUP = "Kernel settings"
FORWARDING = {Family.IPV4: "net/ipv4/ip_forward", Family.IPV6: "net/ipv6/conf/all/forwarding"}
LIBERAL = "net/netfilter/nf_conntrack_tcp_be_liberal"
BRIDGE = {
    Family.IPV4: "net/bridge/bridge-nf-call-iptables",
    Family.IPV6: "net/bridge/bridge-nf-call-ip6tables",
}
STRICT = 1
NEIGHBOURS = "net/ipv4/neigh/default/gc_thresh3"
"""Maximum number of neighbours. Network namespaces other than the first do not show it; it counts for all."""
NEARLY_FULL = 0.8
"""Part of a table."""
IPV6_DISABLED = "net/ipv6/conf/{}/disable_ipv6"
"""For a device; `all` sets it for every one, each of which may be enabled again."""


def accept_advertisements(device: str) -> str:
    """The path of a device's accept_ra. 1: only while the host does not forward."""
    return f"net/ipv6/conf/{device}/accept_ra"


def reverse_path(device: str) -> str:
    """The path of a device's rp_filter; `all` counts for every one."""
    return f"net/ipv4/conf/{device}/rp_filter"


def check_forwarding(facts: Facts) -> Iterator[CheckResult]:
    """Without it only this host's own programs reach services."""
    for family in facts.families():
        name = FORWARDING[family]
        if facts.kernel.number(name) == 0 and _not_vipds_turn(facts, family):
            cause = f"{_dotted(name)} is 0: clients on other hosts do not reach {family} services"
            if facts.settings.manage_sysctls and facts.daemon.status:
                cause += "; vipd turns it on within seconds, unless somebody keeps turning it off"
            hint = _keep(name)
            repair = [*_keep_advertisements(facts, family), _set(name, 1)]
            yield problem(f"{family} forwarding is off", cause, *repair, hint=hint)


def _keep_advertisements(facts: Facts, family: Family) -> Iterator[str]:
    """A host that forwards IPv6 ignores router advertisements, and may lose its default route so."""
    if family is Family.IPV6:
        names = [accept_advertisements(link.name) for link in facts.network.links if link.name != "lo"]
        yield from (_set(name, 2) for name in names if facts.kernel.number(name) == 1)


def ipv6_is_disabled(facts: Facts) -> bool:
    """Whether no device of this host accepts IPv6 packets, as far as that is known."""
    everywhere, *devices = _disabling_ipv6(facts)
    if facts.network.fault or facts.settings_unread(everywhere, *devices):
        return False
    return facts.kernel.number(everywhere) == 1 and all(facts.kernel.number(name) != 0 for name in devices)


def _disabling_ipv6(facts: Facts) -> list[str]:
    """The settings of all devices and of each one; vipd's own and loopback lead nowhere."""
    own = ("lo", facts.settings.vip_device)
    names = [link.name for link in facts.network.links if link.name not in own]
    return [IPV6_DISABLED.format(name) for name in ("all", *names)]


def check_ipv6(facts: Facts) -> Iterator[CheckResult]:
    """Without IPv6 its addresses and routes are gone too, so no other fault of IPv6 is reported then."""
    if Family.IPV6 in facts.families() and ipv6_is_disabled(facts):
        name = IPV6_DISABLED.format("all")
        cause = f"{_dotted(name)} is 1: no client reaches an IPv6 address of a service"
        hint = "then give this host its IPv6 addresses again; or declare no IPv6"
        yield problem("IPv6 is disabled on this host", cause, _set(name, 0), hint=f"{hint}. {_keep(name)}")


def check_liberal(facts: Facts) -> Iterator[CheckResult]:
    """Packets outside of the TCP window are not translated otherwise."""
    working = any(facts.has_vipd_rules(family) for family in facts.families())
    if facts.kernel.number(LIBERAL) == 0 and working and facts.settings.compat != "kube-proxy":
        title = "large transfers may be reset"
        cause = f"{_dotted(LIBERAL)} is 0: a packet outside of the TCP window is not translated"
        yield warning(title, cause, _set(LIBERAL, 1), hint=_keep(LIBERAL))


def check_reverse_path(facts: Facts) -> Iterator[CheckResult]:
    """Strict: a packet must arrive by the device through which its source is reached."""
    everywhere = facts.kernel.number(reverse_path("all")) or 0
    for device in facts.devices_to_backends(Family.IPV4):
        own = facts.kernel.number(reverse_path(device)) or 0
        if max(everywhere, own) == STRICT:
            dropped = facts.kernel.reverse_path_drops
            so_far = "" if dropped is None else f" ({dropped} packets so far on all devices)"
            cause = (
                f"rp_filter is 1 for {device}, which leads to backends: what comes in there from a source "
                f"that is reached by another device is dropped{so_far}"
            )
            name = reverse_path(device)
            yield warning(f"{device} filters by reverse path", cause, _set(name, 2), hint=_keep(name))


def check_hairpin(facts: Facts) -> Iterator[CheckResult]:
    """A backend's flow to itself leaves the bridge by the port on which it arrived."""
    for family, bridge in _bridges(facts):
        ports = [p for p in _ports(facts, bridge) if p.hairpin is False and p.kind]
        if facts.kernel.number(BRIDGE[family]) == 1 and ports:
            cause = (
                f"{_dotted(BRIDGE[family])} is 1, and ports of {bridge} do not send back what they brought "
                f"({listed([port.name for port in ports])}): flows of a backend to itself are lost"
            )
            repair = [f"ip link set {port.name} type bridge_slave hairpin on" for port in ports[:MAX_FIXES]]
            yield warning(f"a backend on {bridge} cannot reach its own {family} VIP", cause, *repair)


def check_bridged_replies(facts: Facts) -> Iterator[CheckResult]:
    """An answer from backend to backend by the bridge alone passes no rule."""
    for family, bridge in _bridges(facts):
        if facts.settings_unread(BRIDGE[family]):
            continue
        plain = sorted(
            {p.service for p in facts.services if p.family is family and p.masquerade == "hairpin"}
        )
        if plain and facts.kernel.number(BRIDGE[family]) != 1:
            cause = (
                f"masquerade of {listed(plain)} is hairpin, and packets within {bridge} pass no iptables "
                "rule: the answer of one backend to another is not translated back"
            )
            title = f"backends on {bridge} get no answer from each other by {family} VIPs"
            hint = (
                f"let masquerade be auto. {_dotted(BRIDGE[family])}=1 mends it, too, but then every bridged "
                "packet of this host passes every firewall rule"
            )
            yield warning(title, cause, hint=hint)


def _bridges(facts: Facts) -> Iterator[tuple[Family, str]]:
    """Bridges by which backends are reached."""
    for family in facts.families():
        for device in facts.devices_to_backends(family):
            link = facts.network.link(device)
            if link and link.kind == "bridge":
                yield family, device


def _ports(facts: Facts, bridge: str) -> list[Link]:
    return [link for link in facts.network.links if link.master == bridge]


def _not_vipds_turn(facts: Facts, family: Family) -> bool:
    """vipd has set it already, or will not."""
    return facts.has_vipd_rules(family) or not facts.settings.manage_sysctls or facts.daemon.runs


def _dotted(name: str) -> str:
    return name.replace("/", ".")


def _set(name: str, value: int) -> str:
    # With slashes, because the name of a device may contain a dot.
    return f"sysctl -w {name}={value}"


def _keep(name: str) -> str:
    return (
        f"look for it in /etc/sysctl.conf and /etc/sysctl.d: grep -r {name.rpartition('/')[2]} /etc/sysctl*"
    )


def _forward_unread(facts: Facts) -> str:
    names = [FORWARDING[family] for family in facts.families()]
    unknown = [_dotted(name) for name in names if facts.kernel.number(name) is None]
    why = facts.services_fault or facts.settings_unread(*names)
    why = why or (f"there is no {', '.join(unknown)}" if unknown else "")
    off = any(facts.kernel.number(name) == 0 for name in names)
    # Whether vipd's rules exist decides who must turn it on.
    return why or (facts.vipd_rules_unread() if off else "")


def _ipv6_unread(facts: Facts) -> str:
    if facts.services_fault or Family.IPV6 not in facts.families():
        return facts.services_fault
    return facts.network_unread() or facts.settings_unread(*_disabling_ipv6(facts))


def _liberal_unread(facts: Facts) -> str:
    return facts.vipd_rules_unread() or facts.settings_unread(LIBERAL)


def _reverse_path_unread(facts: Facts) -> str:
    names = [reverse_path(device) for device in ("all", *facts.devices_to_backends(Family.IPV4))]
    return facts.network_unread() or facts.settings_unread(*names)


def check_neighbours(facts: Facts) -> Iterator[CheckResult]:
    """Each backend of a connected network needs an entry; without one, packets for it are dropped."""
    most, entries = facts.kernel.number(NEIGHBOURS), facts.kernel.neighbours or 0
    if most is None:
        return
    near = sum(1 for backend in facts.backends() if "." in backend and _is_connected(backend, facts))
    refused = facts.kernel.neighbours_refused
    if not refused and max(entries, near) < NEARLY_FULL * most:
        return
    wanted = max(4 * most, 2 * near)
    cause = f"{entries} of {most} entries are taken, and {near} backends are neighbours"
    title = "the table of neighbours is full" if refused else "the table of neighbours is nearly full"
    steps = [("gc_thresh3", wanted), ("gc_thresh2", wanted // 2), ("gc_thresh1", wanted // 4)]
    judged = problem if refused else warning
    repair = [_set(f"net/ipv4/neigh/default/{name}", value) for name, value in steps]
    yield judged(
        title, f"{cause}; packets for a host without an entry are dropped", *repair, hint=_keep(NEIGHBOURS)
    )


def _is_connected(address: str, facts: Facts) -> bool:
    return any(
        ip_address(address) in ip_network(f"{own.address}/{own.length}", strict=False)
        for own in facts.network.addresses
    )


def _neighbours_unread(facts: Facts) -> str:
    unread = facts.settings_unread(NEIGHBOURS) or facts.network_unread()
    if not unread and facts.kernel.number(NEIGHBOURS) is None and facts.kernel.neighbours is not None:
        return "its limit cannot be seen in a network namespace"
    return unread


def _bridges_unread(facts: Facts) -> str:
    return facts.network_unread() or facts.settings_unread(*BRIDGE.values())


CHECKS = (
    Check("ip-forward", GROUP, "forwarding is on where services need it", check_forwarding, _forward_unread),
    Check("ipv6-disabled", GROUP, "IPv6 is enabled where services need it", check_ipv6, _ipv6_unread),
    Check("tcp-be-liberal", GROUP, "connection tracking bears late packets", check_liberal, _liberal_unread),
    Check(
        "rp-filter",
        GROUP,
        "no strict reverse path filter towards backends",
        check_reverse_path,
        _reverse_path_unread,
    ),
    Check("neighbour-table", GROUP, "the table of neighbours has room", check_neighbours, _neighbours_unread),
    Check(
        "bridge-hairpin",
        GROUP,
        "backends on bridges reach their own VIPs",
        check_hairpin,
        _bridges_unread,
    ),
    Check(
        "bridge-replies",
        GROUP,
        "answers within bridges are translated",
        check_bridged_replies,
        _bridges_unread,
    ),
)
