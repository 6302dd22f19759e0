"""The text that Prometheus reads, made of a snapshot. The only module that imports prometheus_client.

It is imported at the first scrape, in the thread that makes the text. Nothing is registered in the library's
global registry.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TypeVar

from prometheus_client import ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from vipd import __version__
from vipd.control.announcements import AnnouncedAddress, LanAddress, Reason
from vipd.control.announcer import Announcer
from vipd.model.durations import DurationHistogram
from vipd.model.service import AnnounceMethod
from vipd.observe.flow_stats.traffic import ConntrackTable
from vipd.observe.metrics.catalogue import METRIC_FAMILIES
from vipd.observe.metrics.event_counts import MetricCounters
from vipd.observe.metrics.snapshot import MetricsSnapshot

_OF_TRAFFIC = (
    "vipd_service_received_packets_total",
    "vipd_service_received_bytes_total",
    "vipd_service_sent_packets_total",
    "vipd_service_sent_bytes_total",
)
"""In the order of `Traffic`."""

_UP = {"healthy": 1, "unhealthy": 0, "down": 0}
"""Of any other backend it is not known."""

T = TypeVar("T")
Labels = dict[str, str]
Values = Iterable[tuple[Labels, float]]


class StateCollector(Collector):
    """Gives the metrics of the daemon itself; those of services and backends are written here as text."""

    def __init__(self, snapshot: MetricsSnapshot, counters: MetricCounters, dataplane: str) -> None:
        self._snapshot, self._tally, self._dataplane = snapshot, counters, dataplane

    def collect(self) -> Iterator[Metric]:
        """Each with its samples."""
        snapshot, tally = self._snapshot, self._tally
        yield _metric("vipd_build_info", [({"version": __version__, "dataplane": self._dataplane}, 1)])
        last = tally.last_success
        numbers = {
            "vipd_in_sync": snapshot.in_sync,
            "vipd_healthy": snapshot.healthy,
            "vipd_services": len(snapshot.services.names),
            "vipd_quarantined_services": snapshot.quarantined,
            "vipd_applies_total": snapshot.applies,
            "vipd_apply_failures_total": snapshot.failures,
            "vipd_config_last_success_timestamp_seconds": last.timestamp() if last else 0,
            **_conntrack(snapshot.table),
            **snapshot.names,
        }
        for name, value in numbers.items():
            yield _metric(name, [({}, value)])
        yield _metric("vipd_services_by_state", _labelled("state", snapshot.states))
        yield _metric("vipd_name_lookups_total", _labelled("result", snapshot.lookups))
        if snapshot.traffic:
            yield _metric("vipd_traffic_lost_flows_total", [({}, snapshot.lost_flows)])
        yield _durations("vipd_apply_duration_seconds", [({}, tally.durations)])
        yield _durations("vipd_check_duration_seconds", _labelled("type", tally.checks))
        events = tally.events.counts()
        yield _metric("vipd_drift_repairs_total", [({}, events["rules-repaired"])])
        yield _metric("vipd_events_total", _labelled("event", events))
        if tally.notifications:
            yield _metric("vipd_notifications_total", _labelled("result", tally.notifications()))
        tasks = {name: task.failures for name, task in tally.tasks.items()}
        yield _metric("vipd_task_failures_total", _labelled("task", tasks))
        failing = {name: int(bool(task.fault)) for name, task in tally.tasks.items()}
        yield _metric("vipd_task_failing", _labelled("task", failing))
        yield _metric("vipd_source_problems", _labelled("source", snapshot.problems))
        refused = [
            ({"service": service, "limit": limit.value}, flows)
            for service, limits in snapshot.refused.items()
            for limit, flows in limits.items()
        ]
        yield _metric("vipd_service_refused_flows_total", refused)
        if tally.announcer:
            yield from _of_announcements(tally.announcer)
        if snapshot.connected:
            yield _metric("vipd_store_connected", _labelled("source", snapshot.connected))


def _is_shared(found: AnnouncedAddress, lans: Mapping[str, LanAddress]) -> bool:
    """Whether one host at a time announces it."""
    return found.key.by is AnnounceMethod.L2 and found.key.address in lans


def _of_announcements(announcer: Announcer) -> Iterator[Metric]:
    yield _metric("vipd_host_maintenance", [({}, announcer.maintenance is not None)])
    found = announcer.state.addresses.values()
    labelled = [({"address": each.key.address, "by": each.key.by.value}, each) for each in found]
    lans = announcer.lans
    here = [
        (labels, lans[labels["address"]].here if _is_shared(each, lans) else each.announced)
        for labels, each in labelled
    ]
    yield _metric("vipd_address_announced", here)
    kept = [(labels, each.reason is Reason.LAST_HOST) for labels, each in labelled]
    yield _metric("vipd_address_kept", kept)


def render(snapshot: MetricsSnapshot, counters: MetricCounters, dataplane: str, *, compressed: bool) -> bytes:
    """The whole text; as gzip if `compressed`. Takes a second with very many backends."""
    packer = zlib.compressobj(level=1, wbits=31) if compressed else None
    parts = []
    for text in _texts(snapshot, counters, dataplane):
        parts.append(packer.compress(text) if packer else text)
    return b"".join((*parts, packer.flush() if packer else b""))


def _texts(snapshot: MetricsSnapshot, counters: MetricCounters, dataplane: str) -> Iterator[bytes]:
    """One large metric after the other, so that never all of them are in memory as text."""
    yield generate_latest(StateCollector(snapshot, counters, dataplane))
    yield generate_latest(ProcessCollector(registry=None))
    for metric in chain(_of_services(snapshot), _of_backends(snapshot)):
        yield metric.encode()


def _conntrack(table: ConntrackTable | None) -> Mapping[str, int]:
    if table is None or table.entries is None or table.limit is None:
        return {}
    return {"vipd_conntrack_entries": table.entries, "vipd_conntrack_max": table.limit}


def _of_services(snapshot: MetricsSnapshot) -> Iterator[str]:
    services = snapshot.services
    labels = [f'{{service="{_escaped(name)}"}}' for name in services.names]
    yield _lines("vipd_service_backends", labels, services.backends)
    yield _lines("vipd_service_ready_backends", labels, services.ready)
    if snapshot.counted:
        yield _lines("vipd_service_new_flows_total", labels, services.new_flows)
    if snapshot.tracked:
        yield _lines("vipd_service_flows", labels, services.flows)
    if snapshot.traffic:
        for name, column in zip(_OF_TRAFFIC, zip(*services.traffic, strict=True), strict=False):
            yield _lines(name, labels, column)


def _of_backends(snapshot: MetricsSnapshot) -> Iterator[str]:
    backends = snapshot.backends
    rows = zip(backends.services, backends.endpoints, backends.protocols, strict=True)
    labels = [
        f'{{service="{_escaped(service)}",backend="{endpoint}",protocol="{protocol}"}}'
        for service, endpoint, protocol in rows
    ]
    judged = [(at, _UP[health]) for at, health in enumerate(backends.health) if health in _UP]
    yield _lines("vipd_backend_up", [labels[at] for at, _ in judged], [up for _, up in judged])
    health = [
        f'{label[:-1]},health="{state}"}}' for label, state in zip(labels, backends.health, strict=True)
    ]
    yield _lines("vipd_backend_health", health, [1] * len(health))
    yield _lines("vipd_backend_admin_state", labels, backends.admin)
    yield _lines("vipd_backend_weight", labels, backends.weight)
    if snapshot.counted:
        yield _lines("vipd_backend_new_flows_total", labels, backends.new_flows)
    if snapshot.tracked:
        yield _lines("vipd_backend_flows", labels, backends.flows)
    if snapshot.traffic:
        yield _lines("vipd_backend_received_bytes_total", labels, backends.bytes_in)
        yield _lines("vipd_backend_sent_bytes_total", labels, backends.bytes_out)


def _lines(name: str, labels: Iterable[str], values: Iterable[int]) -> str:
    """A metric as text. The library's way costs ten times as much, and there may be fifty thousand lines."""
    family = METRIC_FAMILIES[name]
    head = f"# HELP {name} {family.meaning}\n# TYPE {name} {family.kind}\n"
    return head + "".join([f"{name}{each} {value}\n" for each, value in zip(labels, values, strict=True)])


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _labelled(label: str, values: Mapping[str, T]) -> Iterable[tuple[Labels, T]]:
    return [({label: name}, value) for name, value in values.items()]


def _metric(name: str, values: Values) -> Metric:
    family = METRIC_FAMILIES[name]
    metric = Metric(name.removesuffix("_total"), family.meaning, family.kind)
    metric.samples = [Sample(name, labels, value) for labels, value in values]
    return metric


def _durations(name: str, values: Iterable[tuple[Labels, DurationHistogram]]) -> Metric:
    metric = Metric(name, METRIC_FAMILIES[name].meaning, "histogram")
    for labels, durations in values:
        buckets = durations.cumulative()
        metric.samples += [Sample(f"{name}_bucket", {**labels, "le": end}, number) for end, number in buckets]
        metric.samples += [
            Sample(f"{name}_count", labels, buckets[-1][1]),
            Sample(f"{name}_sum", labels, durations.total),
        ]
    return metric
