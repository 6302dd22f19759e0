"""Parses the keys of etcd: `services/NAME`, `backends/SERVICE/ADDRESS:PORT`, `overrides/...`. Pure.

The value of a service's key is YAML or JSON: either the service itself, as one item of `services:` in a file,
or, if it has `apiVersion`, a whole document that declares exactly this one service. The key names the
service; a name in the value must be the same.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from vipd.declaration.body_pattern import literal_text
from vipd.declaration.problems import Declaration, Problem, internal_problem, printable
from vipd.declaration.reader import Places, parse_value
from vipd.declaration.service import API_VERSION, BACKENDS
from vipd.declaration.syntax import InvalidTextError, parse_backend, quoted
from vipd.declaration.values import Faults
from vipd.declaration.yaml_text import read_values
from vipd.model import limits
from vipd.model.check import HttpProbe, UdpProbe
from vipd.model.service import Backend, Origin, Service
from vipd.model.text import byte_size

if TYPE_CHECKING:
    from vipd.sources.etcd.client import KeyValue
    from vipd.sources.etcd.keys import StoredKey

SOURCE = "etcd"
_NAME = re.compile("[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,126}[A-Za-z0-9])?")


ParsedValue = Declaration | tuple[str, Backend] | None
"""A parsed value: a declaration, a backend registered for a service, or None if it is not parsed here."""


class Layout:
    """The layout of keys below the prefix. Each attribute is how the keys of a kind begin."""

    def __init__(self, prefix: str) -> None:
        self.services = f"{prefix}services/"
        self.backends = f"{prefix}backends/"
        """Of registered backends."""
        self.overrides = f"{prefix}overrides/"
        self.history = f"{prefix}history/"
        """Of notes on changes of services that vipctl made."""
        self.followed = self.services, self.backends, self.overrides
        """`hosts/` is not among them: reports of hosts would wake all hosts; nor is the history, which no
        host needs to follow."""

    def folder(self, key: str) -> str:
        """The folder of a key, whose keys are one author's: the first below `services/` or `backends/`; empty
        for keys elsewhere."""
        for start in (self.services, self.backends):
            if key.startswith(start):
                return _folder(start, key.removeprefix(start))
        return ""


def unit_name(key: str) -> str:
    """The name of a key in problems, and of its unit: one line, whatever the key contains."""
    return f"{SOURCE}:{printable(key)}"


REFUSED = "\0vipd refuses this value: "
"""Start of what is kept instead of a value that is too large; the reason follows."""


class FolderBudget:
    """What is kept of keys and values, so that the excess of one folder leaves room for all others.

    A folder is the first one below `services/` or `backends/`, or `overrides/`. Of a value that is too large,
    or beyond what the folder may have, the reason is kept instead; keys beyond their number are only counted,
    but for the first one.
    """

    def __init__(self, layout: Layout, known: Collection[str] = ()) -> None:
        """`known`: keys that are kept, whatever their number; their values do not count yet."""
        self._layout, self._known = layout, frozenset(known)
        self.size = 0
        """Bytes of all keys and values that are kept."""
        self._sizes = Counter[str]()
        """The same of each folder; of the keys without one, by an empty name."""
        self._numbers = Counter(map(self._folder, known))
        """Keys of each folder that are kept."""
        self._left_out = Counter[str]()
        """Keys of each folder that are not kept."""

    def left_out(self, start: str) -> int:
        """How many keys that begin so are not kept."""
        return sum(number for folder, number in self._left_out.items() if folder.startswith(start))

    def listed(self, removed: Collection[str]) -> None:
        """The store was listed; it has no more of the known keys than all but these."""
        self._numbers.subtract(map(self._folder, self._known.intersection(removed)))
        self._known = frozenset()

    def remove(self, key: str, kept: StoredKey | None, existed: bool) -> None:
        """A key is no more in the store, if it was there; `kept` is what was kept of it, None: it was left
        out."""
        folder = self._folder(key)
        if kept is not None:
            self._numbers[folder] -= 1
            self._add(folder, -byte_size(key) - byte_size(kept.value))
        else:
            self._left_out[folder] -= existed

    def shortened(
        self, kv: KeyValue, kept: StoredKey | None = None, existed: bool = False
    ) -> KeyValue | None:
        """A key and its value as they are kept; adds them to their folder. None: the key is left out.
        `kept`: what was kept of it before, which counts no longer; of one that existed nothing was kept if it
        was left out."""
        key, value, layout = short_key(kv.key), kv.value, self._layout
        is_service = key.startswith(layout.services)
        most = limits.ETCD_SERVICE_BYTES if is_service else limits.ETCD_SMALL_VALUE_BYTES
        if (size := byte_size(value)) > most:
            value = f"{REFUSED}it has {size} bytes, of which {most} are the most"
        folder = self._folder(key)
        if kept is not None:
            self._add(folder, -byte_size(key) - byte_size(kept.value))
        elif key not in self._known:
            beyond = self._numbers[folder] - limits.ETCD_FOLDER_KEYS if folder else -1
            if beyond > 0:
                self._left_out[folder] += not existed
                return None
            if beyond == 0:
                value = f"{REFUSED}its folder has more than {limits.ETCD_FOLDER_KEYS} keys"
            self._numbers[folder] += 1
            self._left_out[folder] -= existed
        most = limits.ETCD_OVERRIDES_BYTES if folder == layout.overrides else limits.ETCD_FOLDER_BYTES
        if folder and self._sizes[folder] + byte_size(key) + byte_size(value) > most:
            value = f"{REFUSED}the keys of its folder have more than {most >> 20} MiB"
        self._add(folder, byte_size(key) + byte_size(value))
        return kv._replace(key=key, value=value)

    def _add(self, folder: str, size: int) -> None:
        self._sizes[folder] += size
        self.size += size

    def _folder(self, key: str) -> str:
        """The folder whose budget a key uses; empty: none."""
        if key.startswith(self._layout.overrides):
            return self._layout.overrides
        folder = self._layout.folder(key)
        return "" if folder == self._layout.services else folder


def short_key(key: str) -> str:
    """A key as it is kept: of a very long one the start and a digest, after a NUL."""
    if byte_size(key) <= limits.ETCD_KEY_BYTES:
        return key
    data = key.encode(errors="surrogateescape")
    start = data[: limits.ETCD_KEY_BYTES // 2].decode(errors="surrogateescape")
    return f"{start}\0{sha256(data).hexdigest()}"


def read_value(layout: Layout, key: str, value: str, *, accepted: bool = False) -> ParsedValue:
    """Parses the value of a key. An unexpected exception is a problem of this key alone. `accepted`: an
    earlier run accepted it, as for `parse_declaration`."""
    if value.startswith(REFUSED) and key.startswith((layout.services, layout.backends)):
        hint = "remove keys, or make their values smaller"
        return Declaration(problems=(Problem(unit_name(key), 0, "", value.removeprefix(REFUSED), hint),))
    try:
        if key.startswith(layout.services):
            return read_service_value(key, key.removeprefix(layout.services), value, accepted=accepted)
        if key.startswith(layout.backends):
            return read_registration(key, key.removeprefix(layout.backends), value)
    except Exception as error:
        return Declaration(problems=(internal_problem(error, "reading this key", unit_name(key)),))
    return None


def read_service_value(key: str, name: str, text: str, *, accepted: bool = False) -> Declaration:
    """Parses the value of a service's key: one service or problems, never both none. Never raises."""
    file = unit_name(key)
    if too_long := _too_long(file, text, limits.ETCD_SERVICE_BYTES):
        return Declaration(problems=(too_long,))
    declared = parse_value(text, file, SOURCE, accepted=accepted)
    problems = [*declared.problems, *_misplaced(file, name, declared)]
    services = tuple(_named(service, name, key) for service in declared.services[:1])
    return Declaration(services, tuple(dict.fromkeys(problems)), declared.notes)


def read_registration(key: str, rest: str, text: str) -> tuple[str, Backend] | Declaration:
    """A registered backend with the name of its service, or a declaration that contains only problems.

    `rest` is the key without its prefix: `SERVICE/ADDRESS:PORT`. The value is empty, or a mapping with a
    backend's keys besides address and port: `{weight: 2}`.
    """
    file, faults = unit_name(key), Faults()
    if too_long := _too_long(file, text, limits.ETCD_SMALL_VALUE_BYTES):
        return Declaration(problems=(too_long,))
    service, _, where = rest.rpartition("/")
    yaml = read_values(text)
    value: Any = yaml.documents[0] if yaml.documents else {}
    try:
        base = parse_backend(where) if "@" not in where else None
    except InvalidTextError as error:
        base = None
        faults.add((), error.what, error.hint)
    backend = None
    if base is None or not service:
        faults.add((), "the key is no backends/SERVICE/ADDRESS:PORT", "like backends/dns/10.244.0.5:53")
    elif type(value) is not dict:
        faults.wrong_type(value, (0,), "a mapping like {weight: 2}, or empty")
    else:
        listed = BACKENDS.read(_with_place(faults, value, base), (0,), faults)
        backend = next((b for b, _ in listed.by_address), None)  # a name excludes the place
        _refuse_checks(faults, backend)
    if backend and not faults.kept and not yaml.faults:
        return service, backend
    return Declaration(problems=Places(file, yaml, [faults]).problems(faults, yaml).by_line())


def _too_long(file: str, text: str, most: int) -> Problem | None:
    size = byte_size(text)
    if size <= most:
        return None
    hint = "give the service fewer backends, or declare it in a file"
    if most == limits.ETCD_SMALL_VALUE_BYTES:
        hint = "a backend needs some hundred bytes"
    return Problem(file, 0, "", f"the value has {size} bytes, of which {most} are the most", hint)


def _refuse_checks(faults: Faults, backend: Backend | None) -> None:
    """A registration must not make every host match its patterns, send its datagrams, open a
    file, or probe so often that it becomes a load for the target."""
    probe = backend.check.probe if backend and backend.check else None
    if not (backend and backend.check and probe):
        return
    interval = backend.check.timing.interval
    if interval < limits.MIN_REGISTERED_CHECK_SECONDS:
        what = f"a registered backend's check asks every {interval:g} s, from every host"
        hint = f"{limits.MIN_REGISTERED_CHECK_SECONDS:g}s or more, or write it into the service's own check"
        faults.add((0, "check", "interval"), what, hint)
    if isinstance(probe, HttpProbe) and literal_text(probe.body) is None:
        what = f"a registered backend's check wants plain text, not the pattern {quoted(probe.body)}"
        hint = "put a backslash before . ^ $ * + ? [ | ( ), or the pattern into the service's own check"
        faults.add((0, "check", "body"), what, hint)
    if isinstance(probe, HttpProbe) and probe.ca:
        what = "ca names a file of this host, which a registered backend may not"
        faults.add((0, "check", "ca"), what, "leave it out, for the certificates that the host trusts")
    if isinstance(probe, UdpProbe):
        hint = "write it into the service's own check, or use another type of check"
        what = "a registered backend's check sends no datagrams of its own"
        faults.add((0, "check", "send"), what, hint)


def _misplaced(file: str, name: str, declared: Declaration) -> list[Problem]:
    """The problems of a value that is valid by itself."""
    if name.count("/") > 1 or not _NAME.fullmatch(name):
        hint = "1 to 128 of A-Z a-z 0-9 . _ / -, at most one slash, a letter or digit at both ends"
        return [Problem(file, 0, "", "the key names no service", hint)]
    if not declared.ok:
        return []
    if len(declared.services) != 1:
        what = f"the value declares {len(declared.services)} services, and not one"
        return [Problem(file, 0, "", what, f"a service, or a document with apiVersion: {API_VERSION}")]
    service = declared.services[0]
    if _has_name(service) and service.name != name:
        what = f"the name {service.name} is not the key's, {name}"
        return [Problem(file, service.origin.line, "name", what, "leave it out, or write another key")]
    return []


def _has_name(service: Service) -> bool:
    """Whether the value contained a name: the default one is the first frontend, with a slash before its
    protocol and a colon, which no declared name can contain."""
    return ":" not in service.name


def _named(service: Service, name: str, key: str) -> Service:
    namespace = sys.intern(f"{SOURCE}:{_folder(key.removesuffix(name), name)}")
    origin = Origin(SOURCE, key, service.origin.line, written_by=namespace)
    return replace(service, name=name, origin=origin)


def _folder(start: str, name: str) -> str:
    """The first folder below `start`, or `start` itself for a name without one."""
    first, slash, _ = name.partition("/")
    return f"{start}{first}/" if slash else start


def _with_place(faults: Faults, value: dict[str, Any], base: Backend) -> dict[str, Any]:
    """The mapping of a value as one of a list of backends."""
    for key in ("address", "port"):
        if key in value:
            faults.add((0, key), "stands in the key", "leave it out")
    port = {"port": base.port} if base.port is not None and "ports" not in value else {}
    rest = {k: item for k, item in value.items() if k not in ("address", "port") and item is not None}
    return {"address": base.address, **port, **rest}
