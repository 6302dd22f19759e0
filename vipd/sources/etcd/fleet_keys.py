"""Keys and values that vipd itself writes to etcd. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from vipd.declaration.bounded_json import read_json
from vipd.declaration.listed_backends import as_declared
from vipd.declaration.operations import spec_of
from vipd.declaration.problems import PLEASE_REPORT, Problem, printable
from vipd.declaration.yaml_text import dump_yaml
from vipd.model.backend_status import AdminState
from vipd.model.limits import ETCD_SMALL_VALUE_BYTES
from vipd.model.override import (
    MalformedOverrideError,
    Override,
    OverrideKey,
    Overrides,
    OverrideTarget,
    by_part,
    from_json,
    merge_parts,
    to_json,
)
from vipd.model.service import Backend, Service
from vipd.sources.etcd.values import REFUSED, Layout, read_registration, read_service_value

MAX_FAULTS = 10
"""Malformed overrides that are named."""


class UnwritableError(ValueError):
    """Something has no form as a key and its value: what, hint, and the problems of a value."""

    def __init__(self, what: str, hint: str = "", problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(what)
        self.what, self.hint, self.problems = what, hint, problems


def service_key(layout: Layout, name: str) -> str:
    """The key of a service."""
    return f"{layout.services}{name}"


def service_value(layout: Layout, service: Service) -> str:
    """The service as YAML, without its name, which is in the key. Raises UnwritableError."""
    if ":" in service.name:
        raise UnwritableError(f"{service.name} has no name: in etcd a service is known by one", "give --name")
    spec = {key: value for key, value in spec_of(service).items() if key != "name"}
    text = dump_yaml(spec)
    # Read again as every host will.
    found = read_service_value(service_key(layout, service.name), service.name, text)
    if not found.ok:
        raise UnwritableError(f"{service.name} cannot be stored in etcd", "", tuple(found.problems))
    if found.services != (as_declared(service),):
        raise UnwritableError(f"the value for {service.name} reads back as something else", PLEASE_REPORT)
    return text


def override_key(layout: Layout, subject: OverrideTarget) -> str:
    """The key of an override for the fleet."""
    return f"{layout.overrides}{_place(subject)}"


def weight_override_key(layout: Layout, subject: OverrideTarget) -> str:
    """The key of a weight with a separate expiry, and so a separate lease. It sorts before all others:
    versions without parts use the last key of a target, which is that of the state."""
    return f"{layout.overrides}_weights/{_place(subject)}"


def _place(subject: OverrideTarget) -> str:
    place = f"services/{subject.service}" if subject.service else "addresses"
    return f"{place}/{subject.backend}"


def override_keys(layout: Layout, parts: Overrides) -> dict[str, Override]:
    """The overrides for the two keys of one target, from these parts of it."""
    found = {}
    for order in merge_parts(parts):
        alone = order.admin is AdminState.ACTIVE
        found[(weight_override_key if alone else override_key)(layout, order.target)] = order
    return found


def override_value(order: Override) -> str:
    """An override as JSON. Raises UnwritableError."""
    text = json.dumps(to_json(order))
    try:
        same = from_json(json.loads(text)) == order
    except MalformedOverrideError as error:
        raise UnwritableError(f"the order for {order.target} cannot be stored in etcd: {error}") from None
    if not same:
        raise UnwritableError(f"the order for {order.target} reads back as another", PLEASE_REPORT)
    return text


def read_override(value: str) -> Override | str:
    """The override in a value below `overrides/`, or why there is none."""
    if value.startswith(REFUSED):
        return value.removeprefix(REFUSED)
    try:
        return from_json(read_json(value, ETCD_SMALL_VALUE_BYTES))
    except (MalformedOverrideError, ValueError) as error:
        return str(error)


def read_overrides(values: Mapping[str, str]) -> tuple[dict[OverrideKey, Override], tuple[str, ...]]:
    """As `merged_overrides`, of values that are still to be read."""
    return merged_overrides({key: read_override(value) for key, value in values.items()})


def merged_overrides(
    read: Mapping[str, Override | str],
) -> tuple[dict[OverrideKey, Override], tuple[str, ...]]:
    """The overrides of these keys below `overrides/`, and the problems of others. The name of a key does not
    matter: of two that set the same part of a target the last one counts."""
    orders, faults = [], []
    for key, order in sorted(read.items(), key=lambda item: item[0]):
        if isinstance(order, str):
            faults.append(f"order {printable(key)} in etcd: {order}; it is left out; hint: delete the key")
        else:
            orders.append(order)
    if len(faults) > MAX_FAULTS:
        faults[MAX_FAULTS:] = [f"{len(faults) - MAX_FAULTS} more orders in etcd are left out"]
    return by_part(orders), tuple(faults)


def registration(layout: Layout, service: str, backend: Backend) -> tuple[str, str]:
    """Key and value by which a backend takes part in a service. Raises UnwritableError."""
    rest = f"{service}/{backend}"
    key = f"{layout.backends}{rest}"
    value = "" if backend.weight == 1 else f"{{weight: {backend.weight}}}"
    found = read_registration(key, rest, value)
    if not isinstance(found, tuple):
        raise UnwritableError(f"{service} and {backend} cannot be registered", "", tuple(found.problems))
    return key, value


def keys_of_targets(
    layout: Layout, values: Mapping[str, str], targets: Collection[OverrideTarget]
) -> list[str]:
    """The keys of the overrides of these targets, whoever wrote them and wherever below `overrides/`."""
    found = []
    for key, value in sorted(values.items()):
        orders, _ = read_overrides({key: value})
        found += [f"{layout.overrides}{key}"] if any(known.target in targets for known in orders) else []
    return found
