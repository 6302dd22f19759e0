"""Connection tracking and affinity lists: free space, and losses for lack of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vipd.observe.doctor.facts import Facts
from vipd.observe.doctor.finding import Check, CheckResult, listed, ok, problem, warning

GROUP = "Connection tracking"
COUNT, MAXIMUM = "net/netfilter/nf_conntrack_count", "net/netfilter/nf_conntrack_max"
NEARLY_FULL, FULL = 0.8, 0.95
"""Parts of the table."""
SNAT_PORTS = 65536 - 1024
"""Source ports that the kernel chooses from for masqueraded flows of unprivileged ports."""
DEFAULT_LIST_LIMIT = 100
"""xt_recent's ip_list_tot unless configured otherwise."""
WANTED_LIST_LIMIT = 10000


def check_room(facts: Facts) -> Iterator[CheckResult]:
    """A full table drops every new flow of the host."""
    count, most = facts.kernel.number(COUNT), facts.kernel.number(MAXIMUM)
    if count is None or not most or count < NEARLY_FULL * most:
        return
    full = count >= FULL * most
    cause = f"{count} of {most} entries are taken; when all are, the kernel drops every new flow"
    more = f"net.netfilter.nf_conntrack_max = {4 * most}"
    judged = problem if full else warning
    yield judged(
        f"the connection tracking table is {'full' if full else 'nearly full'}",
        cause,
        f"sysctl -w net.netfilter.nf_conntrack_max={4 * most}",
        f"echo '{more}' > /etc/sysctl.d/80-vipd-conntrack.conf",
    )


def check_drops(facts: Facts) -> Iterator[CheckResult]:
    """Packets dropped for lack of space or memory, and entries evicted early."""
    lost, before = _grown(facts, "drop", "early_drop")
    if lost:
        cause = f"{lost}: the table is full at times, and flows are lost"
        hint = "raise net.netfilter.nf_conntrack_max; conntrack -S shows the counters"
        yield warning("connection tracking drops packets", cause, hint=hint)
    elif before:
        yield ok("connection tracking drops nothing now", before)


def _grown(facts: Facts, *names: str) -> tuple[str, str]:
    """The growth of some counters while they were watched, and their totals; empty without growth: a total
    alone does not show a current problem."""
    kernel = facts.kernel
    new = [f"{name} +{kernel.conntrack_new[name]}" for name in names if kernel.conntrack_new.get(name)]
    all_time = [f"{name}={kernel.conntrack[name]}" for name in names if kernel.conntrack.get(name)]
    since = f"{', '.join(all_time)} since the start" if all_time else ""
    return f"{', '.join(new)} in {kernel.watched_seconds:.1f} s ({since})" if new else "", since


def check_insertions(facts: Facts) -> Iterator[CheckResult]:
    """Two packets of one socket at the same moment: one is lost, typically of a DNS resolver."""
    failed, before = _grown(facts, "insert_failed")
    if failed:
        cause = (
            f"{failed}: of two packets that open the same flow at once, one is lost; names that take five "
            "seconds are its usual sign"
        )
        hint = "on the clients, options single-request-reopen or use-vc in /etc/resolv.conf"
        yield warning("flows are lost in a race of connection tracking", cause, hint=hint)
    elif before:
        yield ok("no flow is lost in a race now", before)


def check_snat_ports(facts: Facts) -> Iterator[CheckResult]:
    """Masqueraded flows from one address to one port of a backend must differ in their source port."""
    full = {
        place: number
        for place, number in (facts.kernel.snat or {}).items()
        if number >= NEARLY_FULL * SNAT_PORTS
    }
    for (protocol, source, backend), number in full.items():
        judged = problem if number >= FULL * SNAT_PORTS else warning
        cause = (
            f"{number} of {SNAT_PORTS} source ports are taken by masqueraded {protocol} flows from {source} "
            f"to {backend}; when all are, new flows there fail"
        )
        hint = (
            "let replies of backends return through this host, with masquerade: hairpin; or add backends, "
            "or ports of a backend"
        )
        yield judged("source ports for masquerading run out", cause, hint=hint)


def check_netlink(facts: Facts) -> Iterator[CheckResult]:
    """vipd ends flows to removed backends over it."""
    if facts.kernel.conntrack_fault:
        cause = f"{facts.kernel.conntrack_fault}: UDP flows stay with backends that are gone"
        yield problem("flows cannot be ended", cause, "modprobe nf_conntrack_netlink")


def check_affinity(facts: Facts) -> Iterator[CheckResult]:
    """Lists of the usual size forget clients early."""
    pinned = sorted({port.service for port in facts.services if port.affinity})
    if pinned and facts.dataplane == "iptables" and facts.kernel.affinity_limit == DEFAULT_LIST_LIMIT:
        cause = (
            f"affinity of {listed(pinned)}: xt_recent remembers {DEFAULT_LIST_LIMIT} clients for each "
            "backend, and the next one displaces the one that was quiet for longest"
        )
        option = f"options xt_recent ip_list_tot={WANTED_LIST_LIMIT}"
        hint = "it counts when the module is loaded: restart the host"
        repair = f"echo '{option}' > /etc/modprobe.d/vipd.conf"
        yield warning("affinity lists are short", cause, repair, hint=hint)


def _table_unread(facts: Facts) -> str:
    return facts.skipped_as_user() or facts.kernel.fault


def _snat_unread(facts: Facts) -> str:
    unknown = "connection tracking cannot be listed" if facts.kernel.snat is None else ""
    return facts.skipped_as_user() or facts.kernel.fault or unknown


def _lists_unread(facts: Facts) -> str:
    used = facts.dataplane == "iptables" and any(port.affinity for port in facts.services)
    unknown = used and facts.kernel.affinity_limit is None
    why = "ip_list_tot of xt_recent cannot be read: it is not loaded, or only root may look"
    return facts.kernel.fault or facts.services_fault or (why if unknown else "")


CHECKS = (
    Check(
        "conntrack-room",
        GROUP,
        "the connection tracking table has room",
        check_room,
        lambda facts: facts.settings_unread(COUNT, MAXIMUM),
    ),
    Check(
        "conntrack-drops",
        GROUP,
        "connection tracking drops nothing",
        check_drops,
        Facts.counters_unread,
    ),
    Check("conntrack-races", GROUP, "no flow is lost in a race", check_insertions, Facts.counters_unread),
    Check("snat-ports", GROUP, "there are source ports for masquerading", check_snat_ports, _snat_unread),
    Check("conntrack-netlink", GROUP, "flows can be ended over netlink", check_netlink, _table_unread),
    Check("affinity-limit", GROUP, "affinity lists are long enough", check_affinity, _lists_unread),
)
