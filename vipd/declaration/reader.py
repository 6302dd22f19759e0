"""Declarations: text in, services and every problem at once out. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vipd.declaration import rules
from vipd.declaration.conflicts import claim_problem, conflicts_of
from vipd.declaration.ipv6_quotes import hint_for_line
from vipd.declaration.kubernetes import KubernetesObjects, is_kubernetes
from vipd.declaration.pieces import Utf8
from vipd.declaration.problems import Declaration, Note, Problem, ProblemList
from vipd.declaration.rules import Draft
from vipd.declaration.service import (
    API_VERSION,
    DOCUMENT,
    FIELDS,
    SERVICE,
    SERVICE_NAME,
    SERVICE_NAME_HINT,
    BackendList,
    Fallback,
)
from vipd.declaration.syntax import quoted
from vipd.declaration.values import (
    Fault,
    Faults,
    Located,
    Path,
    did_you_mean,
    misspelt,
)
from vipd.declaration.yaml_text import (
    UNREADABLE,
    YamlText,
    json_values,
    lines_of,
    numbered_lines,
    read_values,
)
from vipd.model.service import (
    Announcement,
    Frontend,
    Origin,
    Service,
    family_of,
)

FILE = "file"
READING_SERVICE = "reading this service"
_VERSION = re.compile(r"[A-Za-z0-9.-]{1,40}(?:/[A-Za-z0-9.-]{1,20})?")
"""Form of a version of some language."""
_ADDRESS_KEYS = {"address", "external_addresses", "load_balancer_addresses"}
_OF_EVERY_SERVICE = {"name", "address", "ports", "backends"}
"""Keys that no rule of `_check` but that for backends concerns: most services have no others."""


@dataclass(slots=True)
class Defaults:
    """The right values of `defaults`, and their path."""

    right: dict[str, Any] = field(default_factory=dict)
    path: Path = ()


NO_DEFAULTS, NO_BACKENDS = Defaults(), BackendList()


def parse_declaration(
    text: str | Utf8, path: str, source: str = FILE, *, accepted: bool = False, written_by: str = ""
) -> Declaration:
    """Read every document of a file: vipd/v1, or Kubernetes objects. Never raises.

    No text, or only comments, declares no service. `path` names the file in problems and origins, `source`
    the kind of origin. Problems and notes are in line order. A Kubernetes Service and its endpoints belong
    together anywhere in one file; other files are not considered.
    Bytes that are not UTF-8 are reported too when `text` was decoded with "surrogateescape".
    An unexpected exception is a problem of the service or document that caused it. `accepted`: an earlier
    run, perhaps of an older version, accepted the text, and what later rules forbid may stay. `written_by` is
    that of `Origin`.
    Input beyond `vipd.model.limits` is never read. Problems quote nothing of a file without an
    `apiVersion` for vipd.
    """
    yaml, faults = read_values(text, quotes=source != FILE), Faults(accepted)
    origin, own = Origin(source, path, written_by=written_by), list[Service]()
    objects, lists = KubernetesObjects(faults, origin), False
    for at, line, document in zip(yaml.numbers, yaml.lines, yaml.documents, strict=True):
        with faults.contain((at,), "reading this document"):
            lists = lists or (type(document) is dict and type(document.get("services")) is list)
            if is_kubernetes(document):
                objects.read(document, (at,), line, yaml.starts)
            else:
                own += _read_document(document, (at,), yaml.starts, faults, origin)
    described = objects.finish()
    places = Places(path, yaml, [faults, *objects.parts.values()])
    problems = places.problems(faults, yaml)
    parts: dict[str, Declaration] = {}
    if source == FILE and (described or objects.parts) and not yaml.faults:
        # A conflict between parts is for those who read the file: vipd compares a part with whatever serves.
        _report_conflicts(problems, own, accepted)
        parts[""] = Declaration(tuple(own), problems.by_line(), places.notes(faults))
        by_name = {service.name: (service,) for service in described}
        faulty = {name: places.problems(part).by_line() for name, part in objects.parts.items() if part.kept}
        for name in dict.fromkeys((*by_name, *faulty)):
            parts[name] = Declaration(by_name.get(name, ()), faulty.get(name, ()))
    for part in objects.parts.values():
        problems.extend(places.problems(part).by_line())
    services = sorted((*own, *described), key=lambda service: service.origin.line)
    _report_conflicts(problems, services, accepted)
    blank = not (services or objects.declared or lists)
    return Declaration(tuple(services), problems.by_line(), places.notes(faults), parts, blank)


def parse_service(
    spec: object, origin: Origin, *, accepted: bool = False
) -> tuple[Service | None, tuple[Problem, ...]]:
    """Read one service from decoded JSON by the same rules. Problems have the origin's line. Never
    raises."""
    faults, service = Faults(accepted), None
    with faults.contain((0,), READING_SERVICE):
        service = read_service(json_values(spec), (0,), faults, NO_DEFAULTS, origin)
    places = Places(origin.path or origin.source, YamlText(), [], origin.line)
    return service, places.problems(faults).by_line()


def parse_value(text: str, path: str, source: str, *, accepted: bool = False) -> Declaration:
    """As `parse_declaration`, but a text without `apiVersion` is one service alone."""
    yaml, faults = read_values(text), Faults(accepted)
    value = yaml.documents[0] if len(yaml.documents) == 1 else None
    if yaml.faults or type(value) is not dict or "apiVersion" in value:
        return parse_declaration(text, path, source, accepted=accepted)
    service, at = None, (yaml.numbers[0],)
    with faults.contain(at, READING_SERVICE):
        service = read_service(value, at, faults, NO_DEFAULTS, Origin(source, path, yaml.lines[0]))
    places = Places(path, yaml, [faults])
    return Declaration((service,) if service else (), places.problems(faults).by_line())


def _report_conflicts(problems: ProblemList, services: Iterable[Service], accepted: bool) -> None:
    """Report the claims that earlier ones of these services prevent."""
    for conflict in conflicts_of(services, addresses=not accepted):
        if problems.full:
            problems.count()
        else:
            problems.add(claim_problem(*conflict))


def _read_document(
    document: Any, at: Path, starts: Mapping[int, list[int]], faults: Faults, origin: Origin
) -> list[Service]:
    if type(document) is not dict:
        kind = "a list" if type(document) is list else "text"
        faults.add(at, f"must be a mapping with the keys {', '.join(DOCUMENT.keys)}, not {kind}")
        return []
    if not _right_version(document, at, faults, origin):
        return []
    for key in document:
        if key not in DOCUMENT.keys and not key.startswith("x-"):
            hint = "" if faults.full else did_you_mean(key, DOCUMENT.keys)
            faults.add(at, f"unknown key {quoted(key)}", hint, key=key)
    defaults = NO_DEFAULTS
    if document.get("defaults") is not None:
        path = (*at, "defaults")
        right = DOCUMENT.keys["defaults"].kind.read(document["defaults"], path, faults)
        defaults = Defaults(right if type(right) is dict else {}, path)
    items, path = document.get("services"), (*at, "services")
    if items is None:
        return []
    if type(items) is not list:
        faults.wrong_type(items, path, "a list", "start each service with a dash")
        return []
    return _read_services(items, path, starts.get(id(items), ()), faults, (defaults, origin))


def _read_services(
    items: list[Any], path: Path, lines: Sequence[int], faults: Faults, common: tuple[Defaults, Origin]
) -> list[Service]:
    services, (defaults, origin) = list[Service](), common
    for index, item in enumerate(items):
        here, service = (*path, index), None
        place = Origin(origin.source, origin.path, lines[index], "", origin.written_by)
        try:
            service = read_service(item, here, faults, defaults, place)
        except Exception as error:
            faults.unexpected(error, here, READING_SERVICE)
        items[index] = (
            None  # the values take twice the memory of the services: they are freed as they are read
        )
        if service is not None:
            if not rules.within_total(faults, here, service, index + 1):
                break
            services.append(service)
    return services


def _right_version(document: dict[str, Any], at: Path, faults: Faults, origin: Origin) -> bool:
    """Whether to continue: a document of another language would only cause misleading faults, which quote
    it."""
    version = document.get("apiVersion")
    if "apiVersion" not in document:
        faults.add(at, "apiVersion is missing", f"write apiVersion: {API_VERSION}")
        return origin.source != FILE
    if version == API_VERSION or version is UNREADABLE:
        return version is not UNREADABLE
    path = (*at, "apiVersion")
    if version is not None and not isinstance(version, dict | list) and not _VERSION.fullmatch(str(version)):
        faults.add(path, f"must be {API_VERSION}, not something else")
    else:
        faults.wrong_type(version, path, API_VERSION)
    return False


def read_service(
    value: Any, path: Path, faults: Faults, defaults: Defaults, origin: Origin
) -> Service | None:
    """One service, or None when it lacks a readable address or port. Every fault of it is reported."""
    if type(value) is not dict:
        faults.wrong_type(value, path, "a service: a mapping with address, ports and backends")
        return None
    right = SERVICE.read(value, path, faults)
    if "ports" not in right or ("address" not in right and _ADDRESS_KEYS.isdisjoint(right)):
        written = {*value, *misspelt(value, SERVICE.keys, faults)}
        if not _ADDRESS_KEYS & written:
            faults.add(path, "address is missing", "every service needs address")
        if "ports" not in written:
            faults.add(path, "ports is missing", "every service needs ports")
    values = {**defaults.right, **right} if defaults.right else right
    draft = _draft(values, path, faults)
    if not draft.claimed() or not draft.ports or not rules.small_enough(draft):
        return None
    _check(draft, value, right, values, defaults.path)
    service = _service(draft, values, "announce" in right, origin)
    if service.flow_takeover:
        rules.check_flow_takeover(draft, service)
    rules.check_backend_ports(draft, service)
    return service


def _draft(values: dict[str, Any], path: Path, faults: Faults) -> Draft:
    addresses = values.get("address", [])
    if len(addresses) > 1:
        addresses = rules.unique(addresses, faults)
    draft = Draft(path, faults, addresses, rules.unique_ports(values.get("ports", ()), faults))
    draft.backends, draft.named, draft.detailed = values.get("backends", NO_BACKENDS)
    draft.external = [*values.get("external_addresses", ())]
    for external, at in values.get("load_balancer_addresses", ()):
        draft.external.append(Located(replace(external, load_balancer=True), at))
    fallback: Fallback | None = values.get("fallback")
    if fallback:
        draft.fallback, draft.named_fallback, detailed = fallback.backends
        draft.detailed = draft.detailed or detailed
    draft.allow_from, draft.check = values.get("allow_from", ()), values.get("check")
    return draft


def _check(
    draft: Draft, value: dict[str, Any], right: dict[str, Any], values: dict[str, Any], defaults: Path
) -> None:
    """Report invalid combinations, and leave out what they make useless. `value`: the service as written,
    `right`: its right values, `values`: with those of `defaults`, which are at the path of this name."""
    rules.check_backends(draft, draft.backends)
    if values.keys() <= _OF_EVERY_SERVICE and rules.is_plain(draft):
        return
    if draft.external:
        paths = {address.path for address in rules.unique(draft.claimed(), draft.faults)}
        draft.external = [external for external in draft.external if external.path in paths]
    if draft.allow_from or draft.external:
        rules.check_allowed(draft)
    if "node_port" in right:
        rules.assign_node_port(draft, right["node_port"])
    health_port = Located(right["health_port"], draft.at("health_port")) if "health_port" in right else None
    rules.check_host_ports(draft, health_port)
    if draft.fallback and "fallback" not in value:
        families = {family_of(address.value) for address in draft.claimed()}
        draft.fallback = [b for b in draft.fallback if family_of(b.value.address) in families]
    rules.check_backends(draft, draft.fallback)
    for named in filter(None, (draft.named, draft.named_fallback)):
        rules.check_names(draft, named)
    check, weight_from = ((*(draft.path if k in right else defaults), k) for k in ("check", "weight_from"))
    rules.check_checks(draft, "check" in right, check, weight_from if values.get("weight_from") else None)
    announce = values.get("announce") if "announce" in right or "announce" not in value else None
    if announce:
        rules.check_announce(draft, announce, "announce" in value, draft.at("announce"))


def _service(draft: Draft, values: dict[str, Any], announces: bool, origin: Origin) -> Service:
    """The service of a draft; it `announces` by a word of its own, or as `defaults` says."""
    fields: dict[str, Any] = {}
    if not values.keys() <= _OF_EVERY_SERVICE:
        fields = {FIELDS[key]: value for key, value in values.items() if key in FIELDS}
        policies = values.get("traffic_policy", {})
        fields |= {f"{where}_policy": policy for where, policy in policies.items()}
        if "fallback" in values:
            fallback: Fallback = values["fallback"]
            fields |= {"refusal": fallback.refusal, "keeps_unhealthy": fallback.keeps_unhealthy}
            fields["fallback"] = tuple([backend for backend, _ in draft.fallback])
            fields["named_fallback"] = tuple([named for named, _ in draft.named_fallback])
    if draft.named:
        fields["named_backends"] = tuple([named for named, _ in draft.named])
    if draft.external:
        fields["external_addresses"] = tuple([external for external, _ in draft.external])
    if draft.check:
        fields["check"] = draft.check
    if values.get("announce"):
        fields["announcement"] = _announcement(draft, values["announce"], announces)
    return Service(
        name=_name(values.get("name"), draft),
        addresses=tuple([address for address, _ in draft.addresses]),
        ports=tuple([port for port, _ in draft.ports]),
        backends=tuple([backend for backend, _ in draft.backends]),
        origin=origin,
        **fields,
    )


def _announcement(draft: Draft, announce: Any, own: bool) -> Announcement | None:
    """What is announced. `address` is if it is the only one, but only when the service says so itself: a
    default would announce every internal service of the document."""
    inside = announce.inside
    if inside is None:
        inside = own and not draft.external
    return Announcement(announce.by, inside) if inside or draft.external else None


def _name(name: str | None, draft: Draft) -> str:
    """The name of a service: its own, or its first frontend."""
    if name is not None and SERVICE_NAME.fullmatch(name):
        return name
    first = draft.ports[0].value
    default = str(Frontend(draft.claimed()[0].value, first.port, first.protocol))
    if name is not None and name != default:
        hint = f"only the default name {default} may contain a colon" if ":" in name else SERVICE_NAME_HINT
        draft.faults.add(draft.at("name"), f"{quoted(name)} is not a service name", hint)
    return default


class Places:
    """Where the faults and notes of one text are."""

    def __init__(self, file: str, yaml: YamlText, faults: Sequence[Faults], line: int = 0) -> None:
        """`line`: that of whatever has no place in the text."""
        self._file, self._default = file, line
        paths = {fault.path for of in faults for fault in of.kept}
        paths |= {path for of in faults for path, _ in of.notes}
        paths |= {fault.other for of in faults for fault in of.kept if fault.other}
        paths |= {fault.first for fault in yaml.faults if fault.first}
        wanted = {path[:end] for path in paths for end in range(1, len(path) + 1)}
        wanted |= {(*fault.path, fault.key) for of in faults for fault in of.kept if fault.key is not None}
        self._lines = lines_of(yaml.data, wanted) if wanted else {}
        self._texts = numbered_lines(yaml.data, {fault.line for fault in yaml.faults if yaml.may_quote})

    def problems(self, faults: Faults, yaml: YamlText | None = None) -> ProblemList:
        """The faults of the text as YAML, and these."""
        problems = ProblemList()
        for line, what, hint, first in yaml.faults if yaml else ():
            what += f" {self._lines[first].key}" if first else ""
            problems.add(
                Problem(self._file, line, "", what, hint_for_line(self._texts.get(line, "")) or hint)
            )
        for fault in faults.kept:
            problems.add(self._problem(fault))
        problems.count(faults.more)
        return problems

    def notes(self, faults: Faults) -> tuple[Note, ...]:
        """The notes in line order, each once, and the number of further ones."""
        notes = [Note(self._file, self._line(path), text) for path, text in faults.notes]
        notes = sorted(dict.fromkeys(notes), key=lambda note: note.line)
        if faults.more_notes:
            notes.append(Note(self._file, notes[-1].line, f"and {faults.more_notes} more notes"))
        return tuple(notes)

    def _problem(self, fault: Fault) -> Problem:
        line, what, other = self._line(fault.path), fault.what, 0
        if fault.key is not None and (*fault.path, fault.key) in self._lines:
            line = self._lines[*fault.path, fault.key].key
        if fault.other:
            other = self._line(fault.other)
            what += "" if fault.by_line else f" {path_text(fault.other)}"
            what += f" on line {other}" if fault.by_line or other != line else ""
        path = "" if fault.whole else path_text(fault.path)
        return Problem(self._file, line, path, what, fault.hint, fault.trace)

    def _line(self, path: Path) -> int:
        """That of the nearest place that is written."""
        ends = range(len(path), 0, -1)
        return next(
            (self._lines[path[:end]].value for end in ends if path[:end] in self._lines), self._default
        )


def path_text(path: Path) -> str:
    """`services[2].backends[0].port`, without the number of the document."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path[1:]).removeprefix(
        "."
    )
