"""Every place where the daemon meets the outside, and how each is made to fail. The one table of them.

A row names a function to take the place of, the modules whose meeting with the outside that stands for, and
the words by which status must name the culprit. `test_seams.py` runs the rows, and compares `modules` with
the code: a module that meets the outside and is in no row fails the test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from vipd.host.process import ProgramResult

MODES = ("oserror", "timeout", "garbage", "nothing", "unexpected")
"""It raises OSError; it times out; it returns garbage, or nothing (None); it raises what nobody expects."""

GARBAGE_TEXT = "\x00{{{ no: [such\n\x85"
RETURNS = frozenset({"garbage", "nothing"})


@dataclass(frozen=True)
class Seam:
    """One place. `target` is `module:function` or `module:Class.method`; of a function that several modules
    know by name only the one is taken whose module is named."""

    name: str
    target: str
    modules: tuple[str, ...]
    culprit: str
    """A regular expression, found in status while it fails."""
    garbage: Callable[[], object] = lambda: GARBAGE_TEXT
    nothing: Callable[[], object] = lambda: None
    quiet: frozenset[str] = frozenset()
    """Modes in which nothing needs to be said: what comes then means something, or is nobody's loss."""


FILES = (
    Seam(
        "declaration files",
        "vipd.sources.files:read_followed",
        ("vipd.sources.files", "vipd.sources.declaration_files", "vipd.host.followed_links"),
        "watched.yaml",
        garbage=GARBAGE_TEXT.encode,
    ),
)
BESIDE = (
    Seam(
        "addresses of this host",
        "vipd.control.host:host_addresses",
        ("vipd.control.host",),
        "watching addresses",
    ),
    Seam(
        "neighbours and sockets of this host",
        "vipd.host.reader:read_neighbours",
        (
            "vipd.host.reader",
            "vipd.host.network",
            "vipd.host.local_sockets",
            "vipd.host.processes",
            "vipd.host.rtnetlink",
            "vipd.host.netlink_socket",
        ),
        "this host cannot be looked at",
    ),
    Seam(
        "routes",
        "vipd.host.vip_routes:VipRoutes.ensure",
        ("vipd.host.vip_routes",),
        "preparing it",
        quiet=RETURNS,
    ),
    Seam(
        "checks of this host",
        "vipd.control.host_checks:HostChecks.refresh",
        ("vipd.control.host_checks",),
        "watching addresses",
        quiet=RETURNS,
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
        "live flows",
        "vipd.dataplane.conntrack.live_counts:_read",
        ("vipd.dataplane.conntrack.live_counts",),
        "balancing connections",
    ),
    Seam(
        "flows without reply",
        "vipd.control.silent_backends:read_unanswered",
        ("vipd.dataplane.conntrack.unanswered", "vipd.control.silent_backends"),
        "watching for replies",
    ),
    Seam(
        "counters of rules",
        "vipd.dataplane.switching:SwitchedCounter.take",
        (
            "vipd.dataplane.iptables.counters.counter",
            "vipd.dataplane.iptables.counters.reading",
            "vipd.dataplane.nftables.flow_counter",
            "vipd.observe.flow_stats.collector",
        ),
        "counting flows",
    ),
    Seam(
        "table of flows",
        "vipd.observe.flow_stats.traffic:FlowTable.table",
        ("vipd.observe.flow_stats.traffic", "vipd.observe.flow_stats.traffic_counting"),
        "counting traffic",
    ),
    Seam(
        "watch of rules",
        "vipd.dataplane.iptables.watch.stream:ExternalChangeStream.__anext__",
        (
            "vipd.dataplane.forward_accept.watch",
            "vipd.dataplane.iptables.watch.watcher",
            "vipd.dataplane.iptables.watch.events",
            "vipd.dataplane.iptables.watch.actors",
            "vipd.dataplane.iptables.watch.legacy_tables",
            "vipd.dataplane.iptables.watch.own_processes",
            "vipd.dataplane.iptables.watch.poll",
            "vipd.dataplane.nftables.watch",
        ),
        "watching rules",
    ),
    Seam(
        "name service",
        "vipd.health.host_problems:_user_problems",
        ("vipd.health.host_problems", "vipd.health.prerequisites", "vipd.host.accounts"),
        "asked.yaml",
        garbage=lambda: (1, None),
        quiet=frozenset({"nothing"}),
    ),
    Seam(
        "ports of vipd's own",
        "vipd.observe.listeners:_bind",
        ("vipd.observe.listeners", "vipd.observe.health_ports"),
        "cannot listen",
    ),
    Seam(
        "answers of the worker process",
        "vipd.host.worker:read_json",
        (
            "vipd.daemon.worker_process",
            "vipd.host.worker",
            "vipd.health.probes.base",
            "vipd.health.probes.dns",
            "vipd.host.unprivileged",
            "vipd.health.probes.http",
            "vipd.health.probes.tcp",
            "vipd.health.probes.tls",
            "vipd.health.probes.udp",
            "vipd.health.scheduler",
            "vipd.declaration.body_pattern",
        ),
        "asking backends and name servers fails",
    ),
    Seam(
        "service manager",
        "vipd.host.systemd.notify:Notifier._transmit",
        ("vipd.host.systemd.notify", "vipd.daemon.status_reporter"),
        "the service manager cannot be notified",
        quiet=RETURNS,
    ),
    Seam(
        "events on disk",
        "vipd.observe.events.event_log:EventLog.append",
        ("vipd.observe.events.event_log", "vipd.observe.events.recorder"),
        "events cannot be kept",
        quiet=RETURNS,
    ),
)
"""What fails without holding up any other service."""

DISK = (
    Seam(
        "writing to disk",
        "vipd.host.durable:write_durably",
        (
            "vipd.host.durable",
            "vipd.sources.store",
            "vipd.sources.maintenance_store",
            "vipd.sources.override_store",
            "vipd.dataplane.chosen",
            "vipd.dataplane.conntrack.checkpoint",
            "vipd.health.record_file",
            "vipd.observe.flow_stats.totals_file",
        ),
        "cannot keep a copy",
        quiet=RETURNS,
    ),
)
"""Nothing that `vipctl` adds can be stored then; files are served as ever."""

PROGRAMS = (
    Seam(
        "programs that write rules",
        "vipd.host.process:run",
        (
            "vipd.host.process",
            "vipd.daemon.rule_programs",
            "vipd.dataplane.programs",
            "vipd.dataplane.iptables.tools",
            "vipd.dataplane.nftables.tools",
            "vipd.dataplane.nftables.reader",
            "vipd.dataplane.forward_accept.driver",
            "vipd.dataplane.forward_accept.reading",
        ),
        "injected by the test|hangs|failed|cannot be run",
        garbage=lambda: ProgramResult(1, GARBAGE_TEXT, GARBAGE_TEXT),
        nothing=lambda: ProgramResult(-9, "", ""),
    ),
    Seam(
        "changes of elements",
        "vipd.dataplane.nftables.writer:_transact",
        ("vipd.dataplane.nftables.writer",),
        "injected by the test|hangs|failed|cannot be run",
        garbage=lambda: False,
        nothing=lambda: False,
    ),
)
"""No rule can be written then. (The iptables dataplane does not pass the second.)"""

ETCD = (
    Seam(
        "answers of etcd",
        "vipd.sources.etcd.lines:read_body",
        ("vipd.sources.etcd.transport", "vipd.sources.etcd.lines", "vipd.sources.etcd.transport_faults"),
        "last known services go on serving",
        nothing=lambda: "",
    ),
    Seam(
        "watch of etcd",
        "vipd.sources.etcd.lines:Lines._read",
        ("vipd.sources.etcd.watch",),
        "last known services go on serving",
        garbage=lambda: GARBAGE_TEXT.encode() + b"\n",
        nothing=lambda: b"{}\n",
    ),
    Seam(
        "report to etcd",
        "vipd.sources.etcd.heartbeat:HostHeartbeat._publish",
        (),
        "report cannot be published",
        quiet=RETURNS,
    ),
    Seam(
        "etcd's keys on disk",
        "vipd.sources.etcd.snapshot_file:SnapshotFile._write_out",
        ("vipd.sources.etcd.snapshot_file",),
        "snapshot: cannot be written|keeping etcd's keys",
        quiet=RETURNS,
    ),
)
"""A daemon of a fleet alone has them. What is known of etcd goes on serving."""

REQUESTS = (
    Seam(
        "bodies of requests",
        "vipd.api.request_bodies:read_raw",
        (
            "vipd.api.request_bodies",
            "vipd.api.dataplane_routes",
            "vipd.api.event_routes",
            "vipd.api.explain_routes",
            "vipd.api.fleet_routes",
            "vipd.api.host_routes",
            "vipd.api.messages",
            "vipd.api.override_routes",
            "vipd.api.server",
            "vipd.api.history_routes",
            "vipd.api.service_routes",
            "vipd.api.socket_server",
            "vipd.api.stats_routes",
        ),
        "answering POST",
        garbage=GARBAGE_TEXT.encode,
        nothing=lambda: b"",
        quiet=RETURNS,
    ),
    Seam(
        "metrics",
        "vipd.observe.metrics.snapshot:take_snapshot",
        ("vipd.observe.metrics.scrape", "vipd.observe.metrics.snapshot"),
        "answering GET .*metrics",
    ),
)
"""Met only while somebody asks; each answers that it failed, and the end of the fault is seen by the next."""

SEAMS = (*FILES, *BESIDE, *DISK, *PROGRAMS, *ETCD, *REQUESTS)

MEANINGLESS = {
    ("routes", "garbage"): "no result",
    ("routes", "nothing"): "no result",
    ("checks of this host", "garbage"): "no result",
    ("checks of this host", "nothing"): "no result",
    ("name service", "nothing"): "good",
    ("service manager", "garbage"): "no result",
    ("service manager", "nothing"): "no result",
    ("events on disk", "garbage"): "no result",
    ("events on disk", "nothing"): "no result",
    ("writing to disk", "garbage"): "no result",
    ("writing to disk", "nothing"): "no result",
    ("report to etcd", "garbage"): "no result",
    ("report to etcd", "nothing"): "no result",
    ("bodies of requests", "garbage"): "refused",
    ("bodies of requests", "nothing"): "refused",
    ("etcd's keys on disk", "garbage"): "no result",
    ("etcd's keys on disk", "nothing"): "no result",
}
"""The modes that mean no fault of a seam, and why: what it returns is not used, or means that all is well, or
is what it is asked for, or is the mistake of whoever asks, who is refused."""

ELSEWHERE = {
    "tests/observe/explain/test_on_host.py": ("vipd.observe.explain.host_reading",),
    "tests/resolver/test_lookup.py": ("vipd.resolver.lookup",),
    "tests/resolver/test_resolver.py": ("vipd.resolver.resolver",),
    "tests/announce/test_lan.py": (
        "vipd.control.lan_announcer",
        "vipd.host.lan.answers",
        "vipd.host.lan.interfaces",
        "vipd.sources.etcd.announcement_view",
        "vipd.sources.etcd.host_lease",
    ),
    "tests/host/lan/test_answer_gate.py": ("vipd.host.lan.answer_gate", "vipd.host.lan.neighbours"),
    "tests/control/test_announcer.py": ("vipd.control.announcer",),
    "tests/dataplane/test_fast_path.py": ("vipd.dataplane.fast_path.driver",),
    "tests/host/network/test_announced_routes.py": ("vipd.host.announced_routes",),
    "tests/host/test_file_calls.py": ("vipd.sources.etcd.tls_files", "vipd.host.file_calls"),
    "tests/sources/test_history.py": ("vipd.sources.confirmation",),
    "tests/sources/test_state_files.py": ("vipd.host.host_changes",),
    "tests/api/test_peers.py": ("vipd.api.peers",),
    "tests/api/test_user_quota.py": ("vipd.api.user_quota",),
    "tests/host/connections/test_limits.py": (
        "vipd.host.connections.connection",
        "vipd.host.connections.connections",
        "vipd.host.connections.http",
        "vipd.host.connections.limits",
    ),
    "tests/host/test_preflight.py": ("vipd.host.preflight",),
    "tests/host/test_settings.py": (
        "vipd.host.settings.settings",
        "vipd.host.settings.settings_file",
        "vipd.host.settings.etcd",
    ),
    "tests/observe/test_who_may_ask.py": ("vipd.observe.browsers",),
    "tests/api/test_healthz.py": ("vipd.api.healthz",),
    "tests/observe/page/test_page.py": ("vipd.observe.page.page_state", "vipd.observe.page.server"),
    "tests/host/systemd/test_journal.py": ("vipd.host.systemd.journal",),
}
"""Modules whose meeting with the outside is made to fail by other tests, by the file of those: what asks the
daemon, rather than is asked by it; and what it does once, before it runs."""

NO_SEAM = {
    "vipd.observe.api_client": "part of vipctl",
    "vipd.control.connection_balancer": "reads one number of the kernel, none if it fails",
    "vipd.host.gc_control": "guards a counter against threads",
    "vipd.daemon.daemon": "starts what is listed here",
    "vipd.daemon.wiring": "wires what is listed here; its clock is `CLOCKS`",
    "vipd.host.batches": "measures how long its own work has taken",
    "vipd.host.bounded_threads": "runs the calls of what is listed here",
    "vipd.declaration.yaml_tree": "its `open` is of a YAML collection",
    "vipd.dataplane.switching": "its `open` makes a dataplane",
    "vipd.host.descriptors": "asks for this process's own limit, once at the start",
    "vipd.host.program_runner": "its failures are those of the check's program",
    "vipd.health.checker": "its clock is the loop's",
    "vipd.observe.flow_stats.totals": "its `open` is of a flow",
    "vipd.observe.monitoring": "asks for this host's name, once at the start",
    "vipd.control.shared_run": "shares a future",
    "vipd.host.netlink": "computes the bytes of addresses by `inet_pton`",
    "vipd.control.background_tasks": "its clock is the monotonic one",
}
"""Modules that only look as if they met the outside, and why they do not."""

CLOCKS = (datetime(1970, 1, 1, tzinfo=UTC), datetime(9998, 12, 31, tzinfo=UTC))
"""What a clock may say that is set wrong."""
