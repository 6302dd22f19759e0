"""The API's views, as JSON values. Pure but for reading the reconciler's state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import islice

from vipd.control.reconciler import Reconciler
from vipd.control.service_status import (
    SERVING_STATES,
    in_panic,
    ready_backends,
    refused_units,
    service_status,
    unchecked_backends,
)
from vipd.dataplane.base import Dataplane
from vipd.declaration.bounded_json import Json
from vipd.declaration.operations import spec_of
from vipd.declaration.problems import Problem, problem_texts
from vipd.declaration.unit import Unit
from vipd.model.backend_status import BackendStatuses
from vipd.model.formatting import counted, time_text
from vipd.model.forwarding import Forwarding
from vipd.model.limits import ALL_PROBLEMS
from vipd.model.service import Service
from vipd.observe.endpoint_views import (
    backend_status_by_address,
    forwarding_view,
    limits_by_address,
    waiting_by_address,
)
from vipd.observe.name_views import name_views
from vipd.sources.base import Source

IGNORED_SHOWN = 20
"""Problems of registrations that a service is shown with."""

PANICS_SHOWN = 20
"""Services that the status names because none of their backends is healthy."""

ADDRESSES_SHOWN = 20
"""Addresses of unhealthy backends that the status names."""

NAMES_SHOWN = 10
"""Services that it names of each of them."""

NOTES_SHOWN = 20
"""Notes that a source is shown with: those of one file alone may be a thousand."""


def service_view(
    service: Service,
    reconciler: Reconciler,
    dataplane: Dataplane,
    announced: Sequence[Json] = (),
    held: str = "",
) -> Json:
    """A ServiceView of docs/api.md. `announced`: its AnnouncedAddresses. `held`: why it serves although its
    source no longer has it."""
    forwardings = reconciler.forwardings.get(service.name, ())
    backend_statuses = reconciler.backend_statuses(service)
    return {
        "name": service.name,
        "owner": service.origin.owner,
        "origin": {
            "source": service.origin.source,
            "path": service.origin.path,
            "line": service.origin.line,
        },
        "spec": spec_of(service),
        "status": _service_status(service, forwardings, reconciler, backend_statuses, held),
        "forwardings": [
            forwarding_view(
                f,
                dataplane,
                backend_status_by_address(service, f, backend_statuses),
                waiting_by_address(service, f),
                limits_by_address(service, f),
            )
            for f in forwardings
        ],
        **({"announced": list(announced)} if service.announcement else {}),
        **({"names": name_views(service, reconciler.resolver)} if service.names else {}),
    }


def _service_status(
    service: Service,
    forwardings: Sequence[Forwarding],
    reconciler: Reconciler,
    backend_statuses: BackendStatuses,
    held: str,
) -> Json:
    progress = reconciler.progress
    families = {forwarding.key.family for forwarding in forwardings}
    pending = progress.fault if progress.is_pending(service.name, families) else None
    state, message = service_status(
        service,
        forwardings,
        backend_statuses,
        progress.quarantined.get(service.name),
        pending,
        reconciler.twofold_addresses(service),
    )
    return {
        "state": state,
        "message": "; ".join(filter(None, (held and f"held: {held}", message))),
        "ready": ready_backends(service, forwardings),
        "backends": len(service.backends),
        "unchecked": unchecked_backends(service, backend_statuses),
        "ignored": list(map(str, reconciler.ignored(service.name)[:IGNORED_SHOWN])),
    }


def _panic_warnings(reconciler: Reconciler) -> list[str]:
    names = (
        service.name
        for service in reconciler.services.values()
        if service.keeps_unhealthy and in_panic(service, reconciler.backend_statuses(service))
    )
    shown = list(islice(names, PANICS_SHOWN))
    if not shown:
        return []
    more = sum(1 for _ in names)
    which = f"service {shown[0]}" if len(shown) == 1 else f"services {', '.join(shown)}"
    which += f" and {more} more" if more else ""
    what = "no backend is healthy, so that all of them serve, as fallback: keep says"
    return [f"{which}: {what}; hint: vipctl describe {shown[0]} tells what the checks say"]


def status_view(
    reconciler: Reconciler, dataplane: Dataplane, sources: Sequence[Source], about: Mapping[str, object]
) -> Json:
    """The Status of docs/api.md. `about`: version, pid, started, settings and warnings of the daemon."""
    progress, services = reconciler.progress, reconciler.services.values()
    return {
        **about,
        "state": progress.state,
        "message": progress.fault,
        "serving": serving_view(reconciler),
        "dataplane": {"name": dataplane.name, **dataplane.versions()},
        "services": len(services),
        "backends": reconciler.readiness.declared,
        "ready": reconciler.readiness.ready,
        "unchecked": reconciler.readiness.unchecked,
        "last_apply": time_text(progress.last_apply),
        "last_apply_seconds": round(progress.last_seconds, 3),
        "applies": progress.applies,
        "apply_failures": progress.failures,
        "quarantined": dict(progress.quarantined),
        "sources": _source_views(sources, reconciler),
        "warnings": [*progress.warnings, *_panic_warnings(reconciler), *_listed(about.get("warnings"))],
    }


def serving_view(reconciler: Reconciler) -> Json:
    """A Serving of docs/api.md: whether the services can serve, whatever the state of the kernel."""
    readiness = reconciler.readiness
    return {
        **serving_summary(reconciler),
        "unhealthy": [
            {
                "address": address,
                "services": len(services),
                "names": list(islice(services, NAMES_SHOWN)),
                "reason": next(iter(services.values())),
            }
            for address, services in nlargest(
                ADDRESSES_SHOWN, readiness.unhealthy.items(), key=lambda item: len(item[1])
            )
        ],
        "unhealthy_addresses": len(readiness.unhealthy),
        "others": list(_other_faults(reconciler)),
    }


def serving_summary(reconciler: Reconciler) -> Json:
    """The `state`, the `message` and the number of `services` by state of a Serving."""
    numbers = services_by_state(reconciler)
    failing = ("degraded", "no-backends", "quarantined")
    state = "degraded" if any(numbers[each] for each in failing) else "unchecked"
    state = state if state == "degraded" or numbers["unchecked"] else "ok"
    words = {"no-backends": "without backends"}
    counts = [f"{numbers[each]} {words.get(each, each)}" for each in (*failing, "unchecked") if numbers[each]]
    total = counted(sum(numbers.values()), "service")
    message = f"{', '.join(counts)} of {total}" if counts else ""
    return {"state": state, "message": message, "services": numbers}


def services_by_state(reconciler: Reconciler) -> Mapping[str, int]:
    """Number of services in each of `SERVING_STATES`."""
    readiness, quarantined = reconciler.readiness, reconciler.progress.quarantined
    return {state: len(readiness.in_state(state, quarantined)) for state in SERVING_STATES}


def _other_faults(reconciler: Reconciler) -> Iterator[Json]:
    """By state, the services that no check of a backend explains."""
    readiness, quarantined = reconciler.readiness, reconciler.progress.quarantined
    explained = {name for services in readiness.unhealthy.values() for name in services}
    for state in ("degraded", "no-backends"):
        others = [name for name in readiness.in_state(state, quarantined) if name not in explained]
        if others:
            yield {"state": state, "services": len(others), "names": others[:NAMES_SHOWN]}


def _source_views(sources: Sequence[Source], reconciler: Reconciler) -> list[Json]:
    views = []
    for source in sources:
        units = source.units()
        own = {n: p for n, p in reconciler.problems.items() if n in units or n.startswith(f"{source.name}:")}
        views.append(_source_view(source, units, own, reconciler.serving))
    return views


def _source_view(
    source: Source,
    units: Mapping[str, Unit],
    problems: Mapping[str, Sequence[Problem]],
    serving: Mapping[str, int],
) -> Json:
    refused: list[Json] = [
        {"unit": each.name, "serves": each.serves, "problems": list(map(str, problems[each.name]))}
        for each in islice(refused_units(units, problems, serving), ALL_PROBLEMS)
    ]
    return {
        "name": source.name,
        "location": source.location,
        "services": sum(serving.get(name, 0) for name in {**units, **problems}),
        "problems": [*source.faults(), *problem_texts(p for found in problems.values() for p in found)],
        "refused": refused,
        "notes": _note_texts(units.values()),
    }


def _note_texts(units: Iterable[Unit]) -> list[str]:
    """What the units' declarations leave out, such as Kubernetes objects; the first ones, and the number of
    further ones."""
    notes = (str(note) for unit in units for note in unit.candidate.notes)
    shown = list(islice(notes, NOTES_SHOWN))
    more = sum(1 for _ in notes)
    return (
        [*shown, f"and {counted(more, 'more note')}; hint: vipctl check FILE prints all"] if more else shown
    )


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, (list, tuple)) else []
