"""Every metric of vipd: name, kind, meaning and labels. Pure data; no other module names a metric.

Label values are limited to declared names: services and their backends, sources, and fixed words. A series
exists as long as its object, so that none appears only on a fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Kind = Literal["gauge", "counter", "histogram"]


class Family(NamedTuple):
    """One metric's kind, its meaning as Prometheus shows it, and its labels in order."""

    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()


_SERVICE = ("service",)
_BACKEND = ("service", "backend", "protocol")

FAMILIES: Mapping[str, Family] = {
    "vipd_build_info": Family("gauge", "Always 1; which vipd this is.", ("version", "dataplane")),
    "vipd_in_sync": Family(
        "gauge", "1 while the kernel holds what is declared, no service being quarantined; else 0."
    ),
    "vipd_healthy": Family("gauge", "1 while /healthz answers 200; else 0."),
    "vipd_services": Family("gauge", "Services declared."),
    "vipd_quarantined_services": Family("gauge", "Services of which the kernel does not take a part."),
    "vipd_applies_total": Family("counter", "Times that rules were written to the kernel."),
    "vipd_apply_failures_total": Family("counter", "Times that the kernel could not be made as declared."),
    "vipd_apply_duration_seconds": Family(
        "histogram", "Time of each write of rules, from the declarations to the kernel."
    ),
    "vipd_drift_repairs_total": Family("counter", "Times that rules changed by others were repaired."),
    "vipd_events_total": Family("counter", "What has happened, by the name of the event.", ("event",)),
    "vipd_task_failures_total": Family("counter", "Failures of each background task.", ("task",)),
    "vipd_task_failing": Family(
        "gauge", "1 while a background task fails and is tried again; else 0.", ("task",)
    ),
    "vipd_source_problems": Family(
        "gauge", "Problems of declarations, and of reaching the source itself.", ("source",)
    ),
    "vipd_store_connected": Family("gauge", "1 while changes in etcd are heard of; else 0.", ("source",)),
    "vipd_config_last_success_timestamp_seconds": Family(
        "gauge", "When all that is declared was last taken up without a problem; 0: not in this run."
    ),
    "vipd_conntrack_entries": Family("gauge", "Flows that the kernel tracks, in all."),
    "vipd_traffic_lost_flows_total": Family(
        "counter", "Flows whose end the kernel could not tell of: their traffic is not all counted."
    ),
    "vipd_check_duration_seconds": Family(
        "histogram", "Time that health checks took, a timeout as long as it is.", ("type",)
    ),
    "vipd_conntrack_max": Family("gauge", "Flows that the kernel can track at most."),
    "vipd_service_backends": Family("gauge", "Backends declared.", _SERVICE),
    "vipd_service_ready_backends": Family("gauge", "Backends that take new flows.", _SERVICE),
    "vipd_service_new_flows_total": Family("counter", "New flows that were given a backend.", _SERVICE),
    "vipd_service_flows": Family("gauge", "Flows that are tracked now.", _SERVICE),
    "vipd_service_received_packets_total": Family("counter", "Packets from clients.", _SERVICE),
    "vipd_service_received_bytes_total": Family("counter", "Bytes from clients, with IP headers.", _SERVICE),
    "vipd_service_sent_packets_total": Family("counter", "Packets to clients.", _SERVICE),
    "vipd_service_sent_bytes_total": Family("counter", "Bytes to clients, with IP headers.", _SERVICE),
    "vipd_backend_up": Family(
        "gauge", "1 while fit to serve: healthy or not checked, and not declared down; else 0.", _BACKEND
    ),
    "vipd_backend_admin_state": Family(
        "gauge", "What an operator ordered: 0 nothing, 1 draining, 2 disabled.", _BACKEND
    ),
    "vipd_backend_weight": Family(
        "gauge", "Weight for new flows beside the others of its service; 0: it takes none.", _BACKEND
    ),
    "vipd_backend_new_flows_total": Family("counter", "New flows that it was given.", _BACKEND),
    "vipd_backend_flows": Family("gauge", "Flows that are tracked now.", _BACKEND),
    "vipd_backend_received_bytes_total": Family("counter", "Bytes from clients, with IP headers.", _BACKEND),
    "vipd_backend_sent_bytes_total": Family("counter", "Bytes to clients, with IP headers.", _BACKEND),
}
