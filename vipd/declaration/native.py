"""Declarations, vipd/v1 or Kubernetes objects: text in, services and every problem at once out. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from vipd.declaration.conflicts import claim_problem, conflicts_of
from vipd.declaration.fields import Report, did_you_mean, is_passed_over
from vipd.declaration.formatting import API_VERSION, format_declaration, format_service, service_to_spec
from vipd.declaration.kubernetes import KubernetesObjects, is_kubernetes
from vipd.declaration.nodes import (
    Mapping,
    Node,
    Scalar,
    Sequence,
    Unreadable,
    is_null,
    release_trees,
    tree_from_json,
)
from vipd.declaration.pieces import Utf8
from vipd.declaration.plain_services import read_plain_services
from vipd.declaration.policy_reader import ServiceDefaults, read_policy
from vipd.declaration.problems import Declaration, Problem
from vipd.declaration.service_reader import read_service
from vipd.declaration.service_size import check_total_size
from vipd.declaration.syntax import quoted
from vipd.declaration.yaml_tree import Tree, read_tree
from vipd.model.service import Origin, Service

__all__ = [
    "API_VERSION",
    "format_declaration",
    "format_service",
    "parse_declaration",
    "parse_service",
    "service_to_spec",
]

DOCUMENT_KEYS = ("apiVersion", "defaults", "services")

_VERSION = re.compile(r"[A-Za-z0-9.-]{1,40}(?:/[A-Za-z0-9.-]{1,20})?")
"""Form of a version of some language."""

READING_SERVICE = "reading this service"

FILE = "file"

_READ = Unreadable(0)


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
    A large `text` should be UTF-8: plain services in it are read faster (`plain_services.py`).
    Input beyond `vipd.model.limits` is never read. Problems quote nothing of a file without an
    `apiVersion` for vipd.
    """
    report = Report(path, accepted)
    tree, read = Tree(), Declaration()
    with report.contain(0, "reading this file"):
        place = Origin(source, path, written_by=written_by)
        if not isinstance(text, str):
            plain = read_plain_services(text, place, accepted=accepted)
            if plain:
                return Declaration(tuple(plain))
        tree = read_tree(text, path, quotes=source != FILE)
        report.problems.extend(tree.problems)
        read = _read_documents(report, tree, place)
    release_trees(tree.documents)
    notes, parts = report.notes(), dict(read.parts)
    if parts:
        parts[""] = replace(parts[""], notes=notes)
    return replace(read, problems=report.problems.by_line(), notes=notes, parts=parts)


def parse_service(spec: object, origin: Origin) -> tuple[Service | None, tuple[Problem, ...]]:
    """Read one service from decoded JSON by the same rules. Problems have the origin's line. Never
    raises."""
    report = Report(origin.path or origin.source)
    service = None
    with report.contain(origin.line, READING_SERVICE):
        service = read_service(report, tree_from_json(spec, origin.line), "", ServiceDefaults(), origin)
    return service, report.problems.by_line()


def _read_documents(report: Report, tree: Tree, origin: Origin) -> Declaration:
    """The services of all documents, and the parts of a file; the problems are in `report`."""
    services: list[Service] = []
    objects = KubernetesObjects(report, origin)
    for document in tree.documents:
        with report.contain(document.line, "reading this document"):
            if is_kubernetes(document, API_VERSION):
                objects.read(document)
            else:
                services += _read_document(report, document, origin)
    own, found = tuple(services), objects.finish()
    parts: dict[str, Declaration] = {}
    if origin.source == FILE and (found or objects.parts) and not tree.problems:
        _report_conflicts(report, own)
        parts = {"": Declaration(own, report.problems.by_line()), **objects.declarations(found)}
    for part in objects.parts.values():
        report.problems.extend(part.problems)
    services = sorted((*services, *found), key=lambda service: service.origin.line)
    _report_conflicts(report, services)
    blank = not (services or objects.declared or any(map(_lists_services, tree.documents)))
    return Declaration(tuple(services), parts=parts, blank=blank)


def _report_conflicts(report: Report, services: Iterable[Service]) -> None:
    """Report the claims that earlier ones of these services prevent. Between parts of a file that is for
    those who read the file alone: vipd compares a part with whatever serves."""
    for conflict in conflicts_of(services, addresses=not report.accepted):
        if report.problems.full:
            report.problems.count()
        else:
            report.problems.add(claim_problem(*conflict))


def _lists_services(document: Node) -> bool:
    """Whether a document of vipd/v1 has a list of services, though it may be empty."""
    return isinstance(document, Mapping) and isinstance(document.items.get("services"), Sequence)


def _read_document(report: Report, node: Node, origin: Origin) -> list[Service]:
    if not isinstance(node, Mapping):
        found = "a list" if isinstance(node, Sequence) else "text"
        report.add(node.line, "", f"must be a mapping with the keys {', '.join(DOCUMENT_KEYS)}, not {found}")
        return []
    if not _right_version(report, node, origin):
        return []
    for key, line in node.key_lines.items():
        if key not in DOCUMENT_KEYS and not is_passed_over(key):
            hint = "" if report.problems.full else did_you_mean(key, DOCUMENT_KEYS)
            report.add(line, "", f"unknown key {quoted(key)}", hint)
    defaults = node.items.get("defaults")
    policy = ServiceDefaults() if defaults is None else read_policy(report, defaults, "defaults")
    services = node.items.get("services")
    if services is None or is_null(services):
        return []
    if not isinstance(services, Sequence):
        report.wrong_type(services, "services", "a list", "start each service with a dash")
        return []
    return _read_services(report, services, policy, origin)


def _right_version(report: Report, node: Mapping, origin: Origin) -> bool:
    """Whether to continue: a document of another language would only cause misleading problems, which quote
    it."""
    version = node.items.get("apiVersion")
    if version is None:
        report.add(node.line, "", "apiVersion is missing", f"write apiVersion: {API_VERSION}")
        return origin.source != FILE
    if isinstance(version, Scalar) and version.text == API_VERSION:
        return True
    if isinstance(version, Scalar) and not _VERSION.fullmatch(version.text):
        report.add(version.line, "apiVersion", f"must be {API_VERSION}, not something else")
    else:
        report.wrong_type(version, "apiVersion", API_VERSION)
    return False


def _read_services(
    report: Report, services: Sequence, policy: ServiceDefaults, origin: Origin
) -> list[Service]:
    found, items = [], services.items
    for index, item in enumerate(items):
        place = origin.at(item.line)
        service = None
        with report.contain(item.line, READING_SERVICE):
            service = read_service(report, item, f"services[{index}]", policy, place)
        # The tree takes twice the memory of the services: it is freed as it is read.
        items[index] = _READ
        if service is None:
            release_trees([item])
        elif not check_total_size(report, service, index + 1):
            break
        else:
            found.append(service)
    return found
