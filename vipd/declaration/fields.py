"""Reading typed values from a tree's nodes: each function returns the value, or None after reporting why not.

Nodes that are `Unreadable` were reported before and give None in silence. Paths are the dotted places that
problems name, like `services[2].backends[0].port`. Pure.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

from vipd.declaration import nodes
from vipd.declaration.ipv6_quotes import hint_for_key, hint_for_node
from vipd.declaration.nodes import Node, Scalar, Sequence, Unreadable
from vipd.declaration.problems import Note, Problem, ProblemList, internal_problem
from vipd.declaration.syntax import InvalidTextError, quoted
from vipd.model import limits
from vipd.model.text import is_encodable

T = TypeVar("T")


class Located(NamedTuple, Generic[T]):
    """A value with the place it was declared at."""

    value: T
    line: int
    path: str

    def reference_from(self, line: int) -> str:
        """The name of this place in a problem at `line`: `backends[0]`, with its line if that differs."""
        return f"{self.path} on line {self.line}" if self.line != line else self.path


class Report:
    """Collects the problems and notes of one file."""

    def __init__(self, file: str, accepted: bool = False, most: int = limits.PROBLEMS) -> None:
        """`most`: number of problems that are kept."""
        self.file = file
        self.accepted = accepted
        """The input was accepted before: later rules do not reject it."""
        self.problems = ProblemList(most=most)
        self.size = 0
        """Of the services read, in the units of `vipd.model.limits.declared_size`."""
        self._notes: dict[Note, None] = {}
        self._more_notes = 0
        self._whole: Report | None = None
        """That of the file. None: this is it; a report that knew itself would only be freed by a collection.
        """

    def part(self, most: int) -> Report:
        """A report for a part of the file that is judged by itself. Its notes are those of the file."""
        part = Report(self.file, self.accepted, most)
        part._whole = self._whole or self
        return part

    def add(self, line: int, path: str, what: str, hint: str = "") -> None:
        """One more problem."""
        self.problems.add(Problem(self.file, line, path, what, hint))

    def note(self, line: int, text: str) -> None:
        """Add a note, which is no fault."""
        whole = self._whole or self
        if len(whole._notes) < limits.NOTES:
            whole._notes[Note(self.file, line, text)] = None
        else:
            whole._more_notes += 1

    def notes(self) -> tuple[Note, ...]:
        """The notes in line order, each once, and the number of further ones."""
        found = sorted(self._notes, key=lambda note: note.line)
        if self._more_notes:
            found.append(Note(self.file, found[-1].line, f"and {self._more_notes} more notes"))
        return tuple(found)

    def wrong_type(self, node: Node, path: str, wanted: str, hint: str = "") -> None:
        """Report that `node` has the wrong type at `path`."""
        if not isinstance(node, Unreadable):
            self.add(
                node.line, path, f"must be {wanted}, not {describe_node(node)}", hint_for_node(node) or hint
            )

    @contextmanager
    def contain(self, line: int, doing: str) -> Iterator[None]:
        """An unexpected exception in the block becomes a problem at `line`: "internal error while
        {doing}"."""
        try:
            yield
        except Exception as error:
            self.problems.add(internal_problem(error, doing, self.file, line))


def describe_node(node: Node) -> str:
    """The kind of a node, for messages: `a list`, `null`, `the integer 5`, `"tpc"`."""
    if isinstance(node, nodes.Mapping):
        return "a mapping"
    if not isinstance(node, Scalar):
        return "a list"
    meaning = nodes.other_meaning(node)
    if meaning == "null":
        return "null"
    if not meaning:
        return quoted(node.text)
    return f"{_cut(node.text)} ({meaning})"


def _cut(text: str) -> str:
    return quoted(text)[1:-1]


_SYNONYMS = {
    "address": (
        *("vip", "vips", "virtual_ip", "cluster_ip", "cluster_ips", "ip", "ips", "addr"),
        *("host", "hostname", "server", "listen", "bind"),
    ),
    "backends": (
        *("servers", "server", "real_servers", "real_server", "upstream", "upstreams", "members", "member"),
        *("nodes", "pool", "hosts", "endpoints", "targets"),
    ),
    "target": ("target_port", "backend_port", "container_port", "to"),
    "port": ("target_port", "backend_port"),
    "state": ("status", "enabled", "disabled", "admin_state"),
    "max_connections": ("maxconn", "max_conns", "max_conn", "connection_limit", "uthreshold"),
    "backup": ("standby", "spare"),
    "affinity": ("sticky", "persistence", "persistence_timeout", "session_affinity", "stickiness"),
    "balance": ("algorithm", "scheduler", "lb_algo", "lb_method", "load_balancing", "method"),
    "check": ("healthcheck", "health_check", "health", "monitor", "probe"),
    "masquerade": ("masq", "snat", "nat"),
    "external_addresses": ("external_ips", "external_ip"),
    "load_balancer_addresses": ("load_balancer_ip", "load_balancer_ips"),
    "allow_from": ("load_balancer_source_ranges", "source_ranges", "allow", "allowed", "whitelist"),
    "traffic_policy": ("external_traffic_policy", "internal_traffic_policy"),
    "on_remove": ("on_delete",),
    "path": ("uri", "url"),
    "interval": ("every", "period", "inter", "period_seconds"),
    "fall": ("retries", "failure_threshold", "unhealthy_threshold"),
    "rise": ("success_threshold", "healthy_threshold"),
    "status": ("code", "codes", "expected_status", "expect_status", "status_code"),
    "command": ("cmd", "exec", "script", "program"),
    "server_name": ("sni",),
    "services": ("vips", "virtual_services", "virtual_servers", "frontends", "listeners"),
}
"""Words of other load balancers for a key. Of several keys the first that a mapping may have is meant."""

_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_PASSED_OVER = "x-"
"""Keys that begin with it hold values for YAML anchors, and declare nothing."""

_BOOLEANS = ("true", "false")
_TRUE_WORDS, _FALSE_WORDS = ("yes", "on", "true", "y", "1"), ("no", "off", "false", "n", "0")


def is_passed_over(key: str) -> bool:
    """Whether a key declares nothing: it begins with `x-`."""
    return key.startswith(_PASSED_OVER)


def did_you_mean(key: str, known: Collection[str]) -> str:
    """A hint that names the known key that an unknown one means or is nearest to, else all of them."""
    close = _key_meant(key, known)
    return f'did you mean "{close}"?' if close else f"known: {', '.join(known)}"


def misspelt(report: Report, node: nodes.Mapping, known: Collection[str]) -> Collection[str]:
    """The known keys that a mapping's unknown ones mean: they are present, but misspelt. Where problems are
    only counted, every key: nothing more is said to be missing."""
    if report.problems.full:
        return known  # comparing words takes a tenth of a millisecond for each key
    unknown = [key for key in node.items if key not in known and not is_passed_over(key)]
    # In a mapping full of unknown keys most are no misspelt known ones.
    return {_key_meant(key, known) for key in unknown[: 2 * len(known)]} if unknown else set()


def _key_meant(key: str, known: Collection[str]) -> str:
    """The known key that an unknown one means, in the spelling of Kubernetes, too; empty if none is."""
    word = _CAPITAL.sub("_", key[:64]).lower().replace("-", "_")
    meant = (name for name, words in _SYNONYMS.items() if word in words and name in known)
    return next(meant, "") or _nearest(key, known)


def _nearest(text: str, known: Collection[str]) -> str:
    return next(iter(difflib.get_close_matches(text.lower()[:64], known, 1)), "")


def known_keys(report: Report, node: Node, path: str, known: Collection[str]) -> Iterator[tuple[str, Node]]:
    """The known keys of a mapping in written order with their values; every other key is reported, but
    those that are passed over."""
    if not isinstance(node, nodes.Mapping):
        report.wrong_type(node, path, f"a mapping with the keys {', '.join(known)}")
        return
    for key, value in node.items.items():
        if key in known:
            yield key, value
            continue
        if is_passed_over(key):
            continue
        if report.problems.full:
            report.problems.count()
            continue
        hint = hint_for_key(key) or did_you_mean(key, known)
        report.add(node.key_lines[key], path, f"unknown key {quoted(key)}", hint)


def one_or_more(node: Node, path: str) -> list[tuple[str, Node]]:
    """The items of a list with their paths, or the node itself when it is a single value."""
    if isinstance(node, Sequence):
        return [(f"{path}[{index}]", item) for index, item in enumerate(node.items)]
    return [(path, node)]


def read_text(report: Report, node: Node, path: str, wanted: str = "text") -> str | None:
    """A scalar that every YAML reader parses as text."""
    if not isinstance(node, Scalar):
        report.wrong_type(node, path, wanted)
        return None
    if len(node.text) > limits.TEXT:
        _report_length(report, node, path)
        return None
    meaning = nodes.other_meaning(node)
    if not meaning and is_encodable(node.text):
        return node.text
    if not meaning:
        report.add(node.line, path, f"{quoted(node.text)} is no text", "it holds half of a surrogate pair")
    elif meaning == "null":
        report.add(node.line, path, "has no value", f"write {wanted}, or remove the key")
    else:
        report.wrong_type(node, path, wanted, f"if text is meant, put it in quotes: {quoted(node.text)}")
    return None


def read_integer(report: Report, node: Node, path: str, low: int, high: int) -> int | None:
    """A plain decimal integer from `low` to `high`."""
    value = nodes.integer(node) if isinstance(node, Scalar) else None
    if value is None:
        report.wrong_type(node, path, f"an integer from {low} to {high}", _integer_hint(node))
        return None
    if not low <= value <= high:
        report.add(node.line, path, f"{value} is out of range", f"write an integer from {low} to {high}")
        return None
    return value


def _integer_hint(node: Node) -> str:
    if not isinstance(node, Scalar) or nodes.is_null(node):
        return ""
    if not node.plain and nodes.integer(Scalar(0, node.text, plain=True)) is not None:
        return f"write {node.text} without quotes"
    return "write it in plain decimal"


def read_choice(report: Report, node: Node, path: str, choices: Mapping[str, T]) -> T | None:
    """One of a few words; `true` and `false` without quotes."""
    wanted = f"one of {', '.join(choices)}"
    text = _scalar_text(report, node, path, wanted)
    if text is None:
        return None
    if text not in choices:
        hint = "" if report.problems.full else _choice_hint(text, choices)
        report.add(node.line, path, f"must be {wanted}, not {describe_node(node)}", hint)
        return None
    if text in _BOOLEANS and isinstance(node, Scalar) and not node.plain:
        report.wrong_type(node, path, wanted, f"write {text} without quotes")
        return None
    return choices[text]


def read_boolean(report: Report, node: Node, path: str) -> bool | None:
    """`true` or `false`, without quotes."""
    return read_choice(report, node, path, {"true": True, "false": False})


def _choice_hint(text: str, choices: Collection[str]) -> str:
    if "true" in choices and text.lower() in (*_TRUE_WORDS, *_FALSE_WORDS):
        return f"write {'true' if text.lower() in _TRUE_WORDS else 'false'}"
    close = _nearest(text, choices)
    return f'did you mean "{close}"?' if close else ""


def _scalar_text(report: Report, node: Node, path: str, wanted: str) -> str | None:
    """The text of a scalar that is not null, whatever its other meaning in YAML."""
    if not isinstance(node, Scalar):
        report.wrong_type(node, path, wanted)
        return None
    if nodes.is_null(node):
        report.add(node.line, path, "has no value", f"write {wanted}, or remove the key")
        return None
    if len(node.text) > limits.TEXT:
        _report_length(report, node, path)
        return None
    return node.text


def _report_length(report: Report, node: Scalar, path: str) -> None:
    what = f"has {len(node.text)} characters, of which {limits.TEXT} are the most"
    report.add(node.line, path, what, "no text of a declaration is as long")


def read_short_form(
    report: Report, node: Node, path: str, parse: Callable[[str], T], wanted: str
) -> T | None:
    """A scalar in one of the short forms of `short_form`; `parse` raises `InvalidTextError`."""
    text = _scalar_text(report, node, path, wanted)
    if text is None:
        return None
    try:
        return parse(text)
    except InvalidTextError as error:
        meaning = nodes.other_meaning(node)  # type: ignore[arg-type]
        if meaning and meaning != "an integer":
            report.wrong_type(node, path, wanted, error.hint)
        else:
            report.add(node.line, path, error.what, error.hint)
        return None
