"""Reads Kubernetes objects as declarations: Service, EndpointSlice, Endpoints, and lists of them.

vipd interprets them as kube-proxy 1.36 does (contract 4). A Service and its endpoints may be in different
documents of one file, in any order, but not in different files. Each Service is accepted or refused by
itself, with the problems of its endpoints. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping as Groups
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from vipd.declaration.fields import Report
from vipd.declaration.kubernetes_backends import with_backends
from vipd.declaration.kubernetes_endpoints import (
    EndpointGroup,
    object_name,
    read_endpoints,
    read_slice,
    slice_service,
)
from vipd.declaration.kubernetes_fields import FieldCursor
from vipd.declaration.kubernetes_services import LABEL, KubernetesService, read_kubernetes_service
from vipd.declaration.nodes import Mapping, Node, Scalar
from vipd.declaration.problems import Declaration
from vipd.declaration.service_size import check_total_size
from vipd.declaration.syntax import quoted
from vipd.model import limits
from vipd.model.service import Origin, Service

_GROUPS = {"Service": "", "Endpoints": "", "EndpointSlice": "discovery.k8s.io"}
"""The supported kinds of objects, with the API group of each."""

MAX_KINDS_NAMED = 20
"""Number of kinds that the note on the objects left out of a List names."""

_MISSPELT = 0.8
"""Likeness of a kind that vipd does not know to one that it knows, above which this one is meant: `Servcie`,
but not `ServiceAccount`."""

_LISTS = {f"{kind}List": kind for kind in _GROUPS}
_VERSION = "v1"
KINDS = ("List", *_GROUPS, *_LISTS)
"""The kinds of documents."""
VERSIONS = tuple(dict.fromkeys(f"{group}/{_VERSION}" if group else _VERSION for group in _GROUPS.values()))
"""Their values of `apiVersion`."""


def is_kubernetes(document: Node, native_version: str) -> bool:
    """Whether a document is a Kubernetes object: it has a kind, and its apiVersion is not vipd's own."""
    if not isinstance(document, Mapping) or "kind" not in document.items:
        return False
    version = document.items.get("apiVersion")
    return not (isinstance(version, Scalar) and version.text == native_version)


@dataclass(slots=True)
class KubernetesObjects:
    """Collects the Kubernetes objects of one file, and combines them when all are read."""

    report: Report
    origin: Origin
    services: list[KubernetesService] = field(default_factory=list)
    slices: list[EndpointGroup] = field(default_factory=list)
    endpoints: list[EndpointGroup] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    """The line of each object, by kind and name."""
    referenced: dict[str, tuple[str, int]] = field(default_factory=dict)
    """For each service that endpoints name: the first object that names it, and its line."""
    declared: set[str] = field(default_factory=set)
    """Names of all Services in the file, also of those that vipd leaves out."""
    parts: dict[str, Report] = field(default_factory=dict)
    """The problems of each Service, by its name, and of each object of a kind that vipd does not know."""

    def read(self, document: Node) -> None:
        """Read one document, for which `is_kubernetes` is true."""
        self._read(FieldCursor(self.report, document, document.line, ""))

    def finish(self) -> list[Service]:
        """Every service with its endpoints. Endpoints objects count only for services without an
        EndpointSlice."""
        groups: dict[str, list[EndpointGroup]] = {}
        for group in self.slices:
            groups.setdefault(group.service, []).append(group)
        sliced = set(groups)
        for group in self.endpoints:
            if group.service not in sliced:
                groups.setdefault(group.service, []).append(group)
        for name, (what, line) in self.referenced.items():
            if name not in self.declared:
                self.report.note(line, f"{what} left out: there is no Service {name} in this file")
        return self._with_backends(groups)

    def _with_backends(self, groups: Groups[str, Sequence[EndpointGroup]]) -> list[Service]:
        found: list[Service] = []
        for number, declared in enumerate(self.services, 1):
            name, service = declared.service.name, None
            part = self._part(name)
            with part.contain(declared.service.origin.line, "reading this service"):
                service = with_backends(part, declared, groups.get(name, ()))
            if service is None:
                continue
            if not check_total_size(self.report, service, number):
                break
            found.append(service)
        return found

    def declarations(self, services: Sequence[Service]) -> dict[str, Declaration]:
        """What is judged by itself: by name each of these services, and what else has problems."""
        by_name = {service.name: (service,) for service in services}
        faulty = {name: part.problems.by_line() for name, part in self.parts.items() if part.problems}
        return {
            name: Declaration(by_name.get(name, ()), faulty.get(name, ()))
            for name in dict.fromkeys((*by_name, *faulty))
        }

    def _part(self, name: str) -> Report:
        """The report of one part of the file."""
        if name not in self.parts:
            # One problem is enough to refuse a part, and all of them together would be without limit.
            most = limits.PROBLEMS if len(self.parts) < limits.PROBLEMS else 1
            self.parts[name] = self.report.part(most)
        return self.parts[name]

    def _of_its_part(self, place: FieldCursor, kind: str) -> FieldCursor:
        """The same object, whose problems are those of the Service that it concerns. One of an unknown or
        missing kind concerns the Service that its label or else its name says, and the whole file if neither
        does."""
        silent = place._replace(report=Report(""))
        name = object_name(silent)
        if kind == "EndpointSlice" or (kind not in _GROUPS and slice_service(silent)):
            name = slice_service(silent)
        known = all(map(LABEL.fullmatch, name.split("/")))
        return place._replace(report=self._part(name) if known else self.report)

    def _read(self, place: FieldCursor) -> None:
        kind = place.at("kind").text()
        version = place.at("apiVersion").text()
        if not kind:
            return
        if kind == "List" and self._right_version(place, version, kind, ""):
            self._read_list(place)
        elif kind in _LISTS and self._right_version(place, version, kind, _GROUPS[_LISTS[kind]]):
            for item in place.at("items").items():
                self._add_object(item, _LISTS[kind])
        elif kind in _GROUPS:
            if self._right_version(self._of_its_part(place, kind), version, kind, _GROUPS[kind]):
                self._add_object(place, kind)
        elif kind not in KINDS:
            self._add_unknown(place, kind)

    def _add_unknown(self, place: FieldCursor, kind: str) -> None:
        """An object that vipd does not serve. One whose kind is misspelt concerns a Service."""
        hint = "it serves Service, EndpointSlice, Endpoints, and lists of them"
        if meant := get_close_matches(kind, KINDS, 1, _MISSPELT):
            place, hint = self._of_its_part(place, meant[0]), f'did you mean "{meant[0]}"?'
        else:
            name = object_name(place._replace(report=Report("")))
            shown = quoted(kind)[1:-1]
            place = place._replace(report=self._part(f"{shown} {name}"))
        place.at("kind").problem(f"kind {quoted(kind)[1:-1]} is not something that vipd serves", hint)

    def _read_list(self, place: FieldCursor) -> None:
        """Read a List of mixed kinds, such as `kubectl get all` prints. Leaves other kinds out, and notes
        their number."""
        others: Counter[str] = Counter()
        for item in place.at("items").items():
            kind, version = item.at("kind").text(), item.at("apiVersion").text()
            group = version.rpartition("/")[0]
            if kind in _GROUPS and (not version or group == _GROUPS[kind]):
                if self._right_version(self._of_its_part(item, kind), version, kind, _GROUPS[kind]):
                    self._add_object(item, kind)
            elif kind and get_close_matches(kind, KINDS, 1, _MISSPELT) and kind not in KINDS:
                self._add_unknown(item, kind)
            elif kind:
                others[kind] += 1
            else:
                hint = "every object of a List has a kind and an apiVersion"
                self._of_its_part(item, kind).problem("kind is missing", hint)
        if others:
            named = others.most_common(MAX_KINDS_NAMED)
            counts = ", ".join(f"{count} {quoted(kind)[1:-1]}" for kind, count in named)
            place.note(f"left out of the List: {counts}{', ...' if len(others) > MAX_KINDS_NAMED else ''}")

    def _right_version(self, place: FieldCursor, version: str, kind: str, group: str) -> bool:
        wanted = f"{group}/{_VERSION}" if group else _VERSION
        if version == wanted:
            return True
        at = place.at("apiVersion")
        if at.node is None:
            place.problem("apiVersion is missing", f"write apiVersion: {wanted}")
        elif version:
            at.problem(
                f"{quoted(version)} is not the version of {kind} that vipd reads", f"it reads {wanted}"
            )
        return False

    def _add_object(self, place: FieldCursor, kind: str) -> None:
        if place.node is None or not isinstance(place.node, Mapping):
            place.problem(f"must be a {kind}", "remove it")
            return
        place = self._of_its_part(place, kind)
        with place.report.contain(place.line, f"reading this {kind}"):
            self._read_object(place, kind)

    def _read_object(self, place: FieldCursor, kind: str) -> None:
        if not self._is_first(place, kind):
            return
        if kind == "Service":
            name = object_name(place)
            self.declared.add(name)
            part = name if self.origin.source == "file" else ""
            service = read_kubernetes_service(place, replace(self.origin, line=place.line, part=part))
            if service is not None:
                self.services.append(service)
            return
        groups = read_endpoints(place) if kind == "Endpoints" else [read_slice(place)]
        kept = [group for group in groups if group is not None]
        for group in kept:
            self.referenced.setdefault(group.service, (f"{kind} {object_name(place)}", place.line))
        (self.endpoints if kind == "Endpoints" else self.slices).extend(kept)

    def _is_first(self, place: FieldCursor, kind: str) -> bool:
        """Whether no earlier object has this kind and name. Reports a second one, because nothing says which
        of the two is valid."""
        name = object_name(place)
        if name.endswith("/"):
            return True
        line = self.lines.get(f"{kind} {name}")
        if line is not None:
            place.problem(f"{kind} {name} stands already on line {line}", "keep one of them")
            return False
        self.lines[f"{kind} {name}"] = place.line
        return True
