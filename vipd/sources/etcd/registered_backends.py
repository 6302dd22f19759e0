"""The backends that registered themselves in etcd, by service. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from vipd.model import limits
from vipd.model.service import Backend, RegisteredBackend
from vipd.sources.etcd.snapshot_file import StoredKey
from vipd.sources.etcd.values import ParsedValue, unit_name


class RegisteredBackends:
    """The backends that registered themselves, by their keys; and by service, as `gather` makes it."""

    def __init__(self) -> None:
        self._meanings: dict[str, tuple[str, Backend]] = {}
        self._keys: dict[str, set[str]] = {}
        """By service."""
        self._changed: set[str] = set()
        """Services whose backends changed since their list was made."""
        self._lists: dict[str, tuple[RegisteredBackend, ...]] = {}

    @property
    def by_service(self) -> Mapping[str, tuple[RegisteredBackend, ...]]:
        """Registered backends by service, in order of their keys; above a service's limit, those that
        were written first. Unchanged lists are the same object."""
        return MappingProxyType(self._lists)

    def set(self, key: str, meaning: ParsedValue) -> None:
        """Set the backend of a key; a meaning that is no backend changes nothing."""
        if isinstance(meaning, tuple):
            service, new = meaning[0], key not in self._meanings
            self._meanings[key] = meaning
            self._keys.setdefault(service, set()).add(key)
            # A key that comes when others fill the list already was written after them.
            if not (new and len(self._lists.get(service, ())) >= limits.BACKENDS):
                self._changed.add(service)

    def remove(self, key: str) -> None:
        """The key is no more, if it was one of a backend."""
        if meaning := self._meanings.pop(key, None):
            self._keys[meaning[0]].discard(key)
            self._changed.add(meaning[0])

    def rebuild(self, kept: Mapping[str, StoredKey]) -> Collection[str]:
        """Rebuild the changed lists, each once for all keys; returns their services."""
        for service in self._changed:
            keys: Iterable[str] = self._keys[service]
            if not self._keys[service]:
                del self._keys[service]
                self._lists.pop(service, None)
                continue
            if len(self._keys[service]) > limits.BACKENDS:
                keys = sorted(sorted(keys), key=lambda key: kept[key].mod_revision)[: limits.BACKENDS]
            self._lists[service] = tuple(
                RegisteredBackend(unit_name(key), self._meanings[key][1]) for key in sorted(keys)
            )
        rebuilt = self._changed.copy()
        self._changed.clear()
        return rebuilt
