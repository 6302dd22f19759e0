"""Connection tracking and affinity lists: room left, and what was lost for want of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vipd.observe.doctor.facts import Facts
from vipd.observe.doctor.finding import Check, Judgement, listed, problem, warning

GROUP = "Connection tracking"
COUNT, MAXIMUM = "net/netfilter/nf_conntrack_count", "net/netfilter/nf_conntrack_max"
NEARLY_FULL, FULL = 0.8, 0.95
"""Parts of the table."""
DEFAULT_LIST_LIMIT = 100
"""xt_recent's ip_list_tot unless told otherwise."""
WANTED_LIST_LIMIT = 10000


def judge_room(facts: Facts) -> Iterator[Judgement]:
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
        f"echo '{more}' > /etc/sysctl.d/80-conntrack.conf",
    )


def judge_drops(facts: Facts) -> Iterator[Judgement]:
    """Packets dropped for want of room or memory, and entries thrown out early."""
    counters = facts.kernel.conntrack
    lost = {name: counters.get(name, 0) for name in ("drop", "early_drop") if counters.get(name, 0)}
    if lost:
        told = ", ".join(f"{name}={number}" for name, number in lost.items())
        cause = f"{told} since the start: the table was full at times, and flows were lost"
        hint = "raise net.netfilter.nf_conntrack_max; conntrack -S shows the counters"
        yield warning("connection tracking has dropped packets", cause, hint=hint)


def judge_insertions(facts: Facts) -> Iterator[Judgement]:
    """Two packets of one socket at the same moment: one is lost, typically of a DNS resolver."""
    failed = facts.kernel.conntrack.get("insert_failed", 0)
    if failed:
        cause = (
            f"insert_failed={failed} since the start: of two packets that open the same flow at once, one "
            "is lost; names that take five seconds are its usual sign"
        )
        hint = "on the clients, options single-request-reopen or use-vc in /etc/resolv.conf"
        yield warning("flows were lost in a race of connection tracking", cause, hint=hint)


def judge_netlink(facts: Facts) -> Iterator[Judgement]:
    """Flows to backends that are gone are ended over it."""
    if facts.kernel.conntrack_fault:
        cause = f"{facts.kernel.conntrack_fault}: UDP flows stay with backends that are gone"
        yield problem("flows cannot be ended", cause, "modprobe nf_conntrack_netlink")


def judge_affinity(facts: Facts) -> Iterator[Judgement]:
    """Lists of the usual size forget clients early."""
    pinned = sorted({port.service for port in facts.services if port.affinity})
    if pinned and facts.dataplane == "iptables" and facts.kernel.affinity_limit == DEFAULT_LIST_LIMIT:
        cause = (
            f"affinity of {listed(pinned)}: xt_recent remembers {DEFAULT_LIST_LIMIT} clients for each "
            "backend, and the next one displaces the one that was quiet for longest"
        )
        option = f"options xt_recent ip_list_tot={WANTED_LIST_LIMIT}"
        hint = "it counts when the module is loaded: restart the host"
        mend = f"echo '{option}' > /etc/modprobe.d/vipd.conf"
        yield warning("affinity lists are short", cause, mend, hint=hint)


CHECKS = (
    Check("conntrack-room", GROUP, "the connection tracking table has room", judge_room),
    Check("conntrack-drops", GROUP, "connection tracking has dropped nothing", judge_drops),
    Check("conntrack-races", GROUP, "no flow was lost in a race", judge_insertions),
    Check("conntrack-netlink", GROUP, "flows can be ended over netlink", judge_netlink, Facts.blind_as_user),
    Check("affinity-limit", GROUP, "affinity lists are long enough", judge_affinity),
)
