"""Every metric of vipd: name, kind, meaning and labels. Pure data; no other module names a metric.

Label values are limited to declared names: services and their backends, sources, and fixed words. A series
exists as long as its object, so that none appears only on a fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

MetricType = Literal["gauge", "counter", "histogram"]


class MetricFamily(NamedTuple):
    """One metric's kind, its meaning as Prometheus shows it, and its labels in order."""

    kind: MetricType
    meaning: str
    labels: tuple[str, ...] = ()


_SERVICE = ("service",)
_BACKEND = ("service", "backend", "protocol")

METRIC_FAMILIES: Mapping[str, MetricFamily] = {
    "vipd_build_info": MetricFamily("gauge", "Always 1; which vipd this is.", ("version", "dataplane")),
    "vipd_in_sync": MetricFamily(
        "gauge", "1 while the kernel holds what is declared, no service being quarantined; else 0."
    ),
    "vipd_healthy": MetricFamily("gauge", "1 while /healthz answers 200; else 0."),
    "vipd_services": MetricFamily("gauge", "Services declared."),
    "vipd_services_by_state": MetricFamily(
        "gauge",
        "Services in each state: ok, unchecked, degraded, no-backends, quarantined.",
        ("state",),
    ),
    "vipd_quarantined_services": MetricFamily("gauge", "Services of which the kernel does not take a part."),
    "vipd_applies_total": MetricFamily("counter", "Times that rules were written to the kernel."),
    "vipd_apply_failures_total": MetricFamily(
        "counter", "Times that the kernel could not be made as declared."
    ),
    "vipd_apply_duration_seconds": MetricFamily(
        "histogram", "Time of each write of rules, from the declarations to the kernel."
    ),
    "vipd_drift_repairs_total": MetricFamily("counter", "Times that rules changed by others were repaired."),
    "vipd_events_total": MetricFamily("counter", "What has happened, by the name of the event.", ("event",)),
    "vipd_notifications_total": MetricFamily(
        "counter",
        "Events for the program of the setting notify: passed to it, failed with it, or dropped.",
        ("result",),
    ),
    "vipd_task_failures_total": MetricFamily("counter", "Failures of each background task.", ("task",)),
    "vipd_task_failing": MetricFamily(
        "gauge", "1 while a background task fails and is tried again; else 0.", ("task",)
    ),
    "vipd_source_problems": MetricFamily(
        "gauge", "Problems of declarations, and of reaching the source itself.", ("source",)
    ),
    "vipd_store_connected": MetricFamily(
        "gauge", "1 while changes in etcd are heard of; else 0.", ("source",)
    ),
    "vipd_config_last_success_timestamp_seconds": MetricFamily(
        "gauge", "When all that is declared was last taken up without a problem; 0: not in this run."
    ),
    "vipd_names": MetricFamily("gauge", "DNS names of backends that are looked up."),
    "vipd_names_failing": MetricFamily("gauge", "Those whose last lookup failed, at least in part."),
    "vipd_names_held": MetricFamily(
        "gauge", "Those of which the last answer lacked so much that what it lacked serves on."
    ),
    "vipd_name_lookups_total": MetricFamily("counter", "Lookups of names, by how they ended.", ("result",)),
    "vipd_host_maintenance": MetricFamily("gauge", "1 while this host is in maintenance; else 0."),
    "vipd_address_announced": MetricFamily(
        "gauge", "1 while this host announces an address of a service; else 0.", ("address", "by")
    ),
    "vipd_address_kept": MetricFamily(
        "gauge",
        "1 while this host announces an address that no backend can serve, as no other host has it; else 0.",
        ("address", "by"),
    ),
    "vipd_conntrack_entries": MetricFamily("gauge", "Flows that the kernel tracks, in all."),
    "vipd_traffic_lost_flows_total": MetricFamily(
        "counter", "Flows whose end the kernel could not tell of: their traffic is not all counted."
    ),
    "vipd_check_duration_seconds": MetricFamily(
        "histogram", "Time that health checks took, a timeout as long as it is.", ("type",)
    ),
    "vipd_conntrack_max": MetricFamily("gauge", "Flows that the kernel can track at most."),
    "vipd_service_backends": MetricFamily("gauge", "Backends declared.", _SERVICE),
    "vipd_service_ready_backends": MetricFamily("gauge", "Backends that take new flows.", _SERVICE),
    "vipd_service_new_flows_total": MetricFamily("counter", "New flows that were given a backend.", _SERVICE),
    "vipd_service_refused_flows_total": MetricFamily(
        "counter", "New flows that were over a limit of a service that has limits.", ("service", "limit")
    ),
    "vipd_service_flows": MetricFamily("gauge", "Flows that are tracked now.", _SERVICE),
    "vipd_service_received_packets_total": MetricFamily("counter", "Packets from clients.", _SERVICE),
    "vipd_service_received_bytes_total": MetricFamily(
        "counter", "Bytes from clients, with IP headers.", _SERVICE
    ),
    "vipd_service_sent_packets_total": MetricFamily("counter", "Packets to clients.", _SERVICE),
    "vipd_service_sent_bytes_total": MetricFamily("counter", "Bytes to clients, with IP headers.", _SERVICE),
    "vipd_backend_up": MetricFamily(
        "gauge",
        "1 while its check finds it healthy, 0 while not, or while it is declared down; else there is none.",
        _BACKEND,
    ),
    "vipd_backend_health": MetricFamily(
        "gauge",
        "Always 1; whether it is healthy, unhealthy, unknown (no verdict yet), down (declared) or unchecked.",
        (*_BACKEND, "health"),
    ),
    "vipd_backend_admin_state": MetricFamily(
        "gauge", "What an operator ordered: 0 nothing, 1 draining, 2 disabled.", _BACKEND
    ),
    "vipd_backend_weight": MetricFamily(
        "gauge", "Weight for new flows beside the others of its service; 0: it takes none.", _BACKEND
    ),
    "vipd_backend_new_flows_total": MetricFamily("counter", "New flows that it was given.", _BACKEND),
    "vipd_backend_flows": MetricFamily("gauge", "Flows that are tracked now.", _BACKEND),
    "vipd_backend_received_bytes_total": MetricFamily(
        "counter", "Bytes from clients, with IP headers.", _BACKEND
    ),
    "vipd_backend_sent_bytes_total": MetricFamily("counter", "Bytes to clients, with IP headers.", _BACKEND),
}
