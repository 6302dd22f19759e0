"""Every place where the daemon meets the outside, and how each is made to fail. The one table of them.

A row names a function to take the place of, the modules whose meeting with the outside that stands for, and
the words by which status must name the culprit. `test_seams.py` runs the rows, and compares `modules` with
the code: a module that meets the outside and is in no row fails the test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MODES = ("oserror", "timeout", "garbage", "nothing", "unexpected")
"""It raises OSError; it times out; it returns garbage, or nothing (None); it raises what nobody expects."""

GARBAGE_TEXT = "\x00{{{ no: [such\n\x85"


@dataclass(frozen=True)
class Seam:
    """One place. `target` is `module:function` or `module:Class.method`."""

    name: str
    target: str
    modules: tuple[str, ...]
    culprit: str
    """In status while it fails."""
    garbage: Callable[[], object] = lambda: GARBAGE_TEXT
    quiet: frozenset[str] = frozenset()
    """Modes in which nothing needs to be said: what comes then means something, or is nobody's loss."""


BESIDE = (
    Seam(
        "declaration files",
        "vipd.sources.files:read_regular",
        ("vipd.sources.files",),
        "watched.yaml",
        garbage=GARBAGE_TEXT.encode,
    ),
    Seam(
        "addresses of this host",
        "vipd.hostnet:host_addresses",
        ("vipd.hostnet",),
        "watching addresses",
        garbage=lambda: frozenset({"no address"}),
    ),
    Seam(
        "routes",
        "vipd.vip_routes:VipRoutes.ensure",
        ("vipd.vip_routes",),
        "preparing it",
        quiet=frozenset({"garbage", "nothing"}),
    ),
    Seam(
        "connection tracking",
        "vipd.dataplane.conntrack.cleaner:clean",
        (
            "vipd.dataplane.conntrack.cleaner",
            "vipd.dataplane.conntrack.netlink",
            "vipd.dataplane.conntrack.listener",
        ),
        "cleaning flows",
    ),
    Seam(
        "counters of rules",
        "vipd.dataplane.opening:FlowCounters.take",
        (
            "vipd.dataplane.iptables.counters.counter",
            "vipd.dataplane.iptables.counters.reading",
            "vipd.dataplane.nftables.flow_counter",
            "vipd.observe.counters.door",
        ),
        "counting flows",
        quiet=frozenset({"oserror", "timeout"}),
    ),
    Seam(
        "watch of rules",
        "vipd.dataplane.iptables.watch.stream:Disturbances.__anext__",
        (
            "vipd.dataplane.hearing",
            "vipd.dataplane.iptables.watch.door",
            "vipd.dataplane.iptables.watch.events",
            "vipd.dataplane.iptables.watch.legacy_tables",
            "vipd.dataplane.iptables.watch.poll",
            "vipd.dataplane.nftables.watch",
        ),
        "watching rules",
    ),
    Seam(
        "name service",
        "vipd.health.host_problems:_user_problems",
        ("vipd.health.host_problems", "vipd.health.prerequisites"),
        "asked.yaml",
        garbage=lambda: (1, None),
        quiet=frozenset({"nothing"}),
    ),
)
"""What fails without holding up any other service."""
