"""Declarations, vipd/v1 or Kubernetes objects: text in, services and every problem at once out. Pure."""

from __future__ import annotations

from vipd.declaration.conflicts import find_conflicts
from vipd.declaration.fields import Report, did_you_mean
from vipd.declaration.formatting import API_VERSION, format_declaration, format_service, service_to_spec
from vipd.declaration.kubernetes import KubernetesObjects, is_kubernetes
from vipd.declaration.nodes import Mapping, Node, Scalar, Sequence, Unreadable, null, tree_of
from vipd.declaration.notation import shown
from vipd.declaration.policy_reader import Policy, read_policy
from vipd.declaration.problems import Declaration, Problem
from vipd.declaration.service_reader import read_service
from vipd.declaration.yaml_tree import read_tree
from vipd.model import Origin, Service

__all__ = [
    "API_VERSION",
    "format_declaration",
    "format_service",
    "parse_declaration",
    "parse_service",
    "service_to_spec",
]

DOCUMENT_KEYS = ("apiVersion", "defaults", "services")

READING_SERVICE = "reading this service"

_READ = Unreadable(0)


def parse_declaration(text: str, path: str, source: str = "file", *, accepted: bool = False) -> Declaration:
    """Read every document of a file: vipd/v1, or Kubernetes objects. Never raises.

    No text, or only comments, declares no service. `path` names the file in problems and origins, `source`
    the kind of origin. Problems and notes come in line order. A Kubernetes Service and its endpoints belong
    together wherever they stand in the file; what stands in another file is not seen.
    Bytes that are not UTF-8 are reported too when `text` was decoded with "surrogateescape".
    An exception that nobody expected is a problem of the service or document that caused it. `accepted`: the
    text was accepted by an earlier run, perhaps of an older version, and what later rules forbid may stay.
    """
    report = Report(path, accepted)
    services: list[Service] = []
    with report.contained(0, "reading this file"):
        tree = read_tree(text, path)
        report.problems += tree.problems
        services += _read_documents(report, tree.documents, Origin(source, path))
    problems = report.problems
    # What stands in `defaults` or behind an alias is read again for each service that uses it.
    problems = sorted(dict.fromkeys(problems), key=lambda problem: problem.line)
    notes = sorted(dict.fromkeys(report.notes), key=lambda note: note.line)
    return Declaration(tuple(services), tuple(problems), tuple(notes))


def parse_service(spec: object, origin: Origin) -> tuple[Service | None, tuple[Problem, ...]]:
    """Read one service from decoded JSON by the same rules. Problems stand at the origin's line. Never
    raises."""
    report = Report(origin.path or origin.source)
    service = None
    with report.contained(origin.line, READING_SERVICE):
        service = read_service(report, tree_of(spec, origin.line), "", Policy(), origin)
    return service, tuple(report.problems)


def _read_documents(report: Report, documents: tuple[Node, ...], origin: Origin) -> list[Service]:
    services: list[Service] = []
    objects = KubernetesObjects(report, origin)
    for document in documents:
        with report.contained(document.line, "reading this document"):
            if is_kubernetes(document, API_VERSION):
                objects.read(document)
            else:
                services += _read_document(report, document, origin)
    services += objects.finish()
    services.sort(key=lambda service: service.origin.line)
    report.problems += find_conflicts(services, addresses=not report.accepted)
    return services


def _read_document(report: Report, node: Node, origin: Origin) -> list[Service]:
    if not isinstance(node, Mapping):
        report.wrong_type(node, "", f"a mapping with the keys {', '.join(DOCUMENT_KEYS)}")
        return []
    if not _right_version(report, node):
        return []
    for key, line in node.key_lines.items():
        if key not in DOCUMENT_KEYS:
            report.add(line, "", f"unknown key {shown(key)}", did_you_mean(key, DOCUMENT_KEYS))
    defaults = node.items.get("defaults")
    policy = Policy() if defaults is None else read_policy(report, defaults, "defaults")
    services = node.items.get("services")
    if services is None or null(services):
        return []
    if not isinstance(services, Sequence):
        report.wrong_type(services, "services", "a list", "start each service with a dash")
        return []
    return _read_services(report, services, policy, origin)


def _right_version(report: Report, node: Mapping) -> bool:
    """Whether to read on: a document of another language would only give problems that mislead."""
    version = node.items.get("apiVersion")
    if version is None:
        report.add(node.line, "", "apiVersion is missing", f"write apiVersion: {API_VERSION}")
        return True
    if isinstance(version, Scalar) and version.text == API_VERSION:
        return True
    report.wrong_type(version, "apiVersion", API_VERSION)
    return False


def _read_services(report: Report, services: Sequence, policy: Policy, origin: Origin) -> list[Service]:
    found, items = [], services.items
    for index, item in enumerate(items):
        place = Origin(origin.source, origin.path, item.line)
        service = None
        with report.contained(item.line, READING_SERVICE):
            service = read_service(report, item, f"services[{index}]", policy, place)
        # The tree takes twice the memory of the services: as it is read, its place becomes theirs.
        items[index] = _READ
        if service is not None:
            found.append(service)
    return found
