"""Keys and values that vipd itself writes to etcd, and what it reads of overrides for the whole fleet."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from datetime import datetime

from vipd.declaration.bounded_json import read_json
from vipd.declaration.listed_backends import as_declared
from vipd.declaration.operations import RefusedError, spec_of
from vipd.declaration.problems import PLEASE_REPORT, printable
from vipd.declaration.yaml_text import dump_yaml
from vipd.host.observer import Observer
from vipd.model.limits import ETCD_SMALL_VALUE_BYTES
from vipd.model.override import (
    MalformedOverrideError,
    Override,
    OverrideKey,
    OverridePart,
    Overrides,
    OverrideTarget,
    by_part,
    expired,
    from_json,
    next_expiry,
    to_json,
)
from vipd.model.service import Backend, Service
from vipd.sources.etcd.values import REFUSED, Layout, read_registration, read_service_value

MAX_FAULTS = 10
"""Malformed overrides that are named."""


def service_value(layout: Layout, service: Service) -> str:
    """The service as YAML, without its name, which is in the key. Raises RefusedError."""
    name = service.name
    if ":" in name:
        what = f"{name} has no name: in etcd a service is known by one"
        raise RefusedError("invalid", what, "", "give --name")
    text = dump_yaml({key: value for key, value in spec_of(service).items() if key != "name"})
    # Read again as every host will.
    declared = read_service_value(f"{layout.services}{name}", name, text)
    if not declared.ok:
        raise RefusedError("invalid", f"{name} cannot be stored in etcd", problems=declared.problems)
    if declared.services != (as_declared(service),):
        raise RefusedError("invalid", f"the value for {name} reads back as something else", "", PLEASE_REPORT)
    return text


def registration(layout: Layout, service: str, backend: Backend) -> tuple[str, str]:
    """Key and value by which a backend takes part in a service. Raises RefusedError."""
    name = f"{service}/{backend}"
    key = f"{layout.backends}{name}"
    value = "" if backend.weight == 1 else f"{{weight: {backend.weight}}}"
    parsed = read_registration(key, name, value)
    if not isinstance(parsed, tuple):
        what = f"{service} and {backend} cannot be registered"
        raise RefusedError("invalid", what, problems=parsed.problems)
    return key, value


def override_name(key: OverrideKey) -> str:
    """The key of a part of an override below `overrides/`: a key each, as each has a lease of its own. Those
    of weights sort last, so that they count if another key sets the same weight."""
    name = f"{f'services/{key.target.service}' if key.target.service else 'addresses'}/{key.target.backend}"
    return f"weights/{name}" if key.part is OverridePart.WEIGHT else name


def override_value(override: Override) -> str:
    """An override as JSON. Raises RefusedError."""
    text = json.dumps(to_json(override))
    if (back := read_override(text)) != override:
        why = f"cannot be stored in etcd: {back}" if isinstance(back, str) else "reads back as another"
        raise RefusedError("internal", f"the order for {override.target} {why}", "", PLEASE_REPORT)
    return text


def read_override(value: str) -> Override | str:
    """The override in a value below `overrides/`, or why there is none."""
    if value.startswith(REFUSED):
        return value.removeprefix(REFUSED)
    try:
        return from_json(read_json(value, ETCD_SMALL_VALUE_BYTES))
    except (MalformedOverrideError, ValueError) as error:
        return str(error)


def names_of_targets(values: Mapping[str, str], targets: Collection[OverrideTarget]) -> list[str]:
    """The keys below `overrides/` that hold overrides of these targets, whoever wrote them and wherever."""
    read = {name: read_override(value) for name, value in sorted(values.items())}
    return [name for name, o in read.items() if isinstance(o, Override) and o.target in targets]


class FleetOverrides:
    """The overrides in etcd that have not expired by this host's clock."""

    def __init__(
        self,
        values: Callable[[], Mapping[str, str]],
        clock: Callable[[], datetime],
        observer: Observer | None = None,
    ) -> None:
        """`values` are those below `overrides/`, by the rest of their key. `observer` gets
        `overrides_changed`."""
        self._values, self._clock, self._observer = values, clock, observer or Observer()
        self._texts: dict[str, str] = {}
        self._read: dict[str, Override | str] = {}
        """What each of the texts says."""
        self._stored: dict[OverrideKey, Override] = {}
        self._faults: tuple[str, ...] = ()
        self._overrides: dict[OverrideKey, Override] = {}

    @property
    def overrides(self) -> Overrides:
        """Every active override, in parts."""
        return self._overrides

    def faults(self) -> tuple[str, ...]:
        """Keys that cannot be read as overrides."""
        return self._faults

    def refresh(self) -> None:
        """Read the current keys of etcd. The name of a key does not matter: of two that set the same part of
        a target the last one counts."""
        values = self._values()
        if values == self._texts:
            return
        texts, read = self._texts, self._read
        self._texts = dict(sorted(values.items()))
        # Only what differs is read again.
        self._read = {
            name: read[name] if texts.get(name) == text else read_override(text)
            for name, text in self._texts.items()
        }
        self._stored = by_part(o for o in self._read.values() if isinstance(o, Override))
        faults = [
            f"order {printable(name)} in etcd: {why}; it is left out; hint: delete the key"
            for name, why in self._read.items()
            if isinstance(why, str)
        ]
        if len(faults) > MAX_FAULTS:
            faults[MAX_FAULTS:] = [f"{len(faults) - MAX_FAULTS} more orders in etcd are left out"]
        self._faults = tuple(faults)
        self.expire_due()

    def next_expiry(self) -> datetime | None:
        """When an override next expires, or loses its pins."""
        return next_expiry(self._overrides)

    def expire_due(self) -> None:
        """End overrides that have expired; etcd deletes their keys by itself, sooner or later."""
        after = {**self._stored, **expired(self._stored, self._clock())}
        before, self._overrides = self._overrides, {k: o for k, o in after.items() if o is not None}
        keys = before.keys() | self._overrides.keys()
        different = frozenset(k.target for k in keys if before.get(k) != self._overrides.get(k))
        if different:
            self._observer.overrides_changed(different)
