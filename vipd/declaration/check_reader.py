"""The grammar of health checks: `check` of a service, a backend and `defaults`. Pure.

A table per type of check names its keys; each key has a function that reads its value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from vipd.declaration.body_pattern import PatternError, body_pattern
from vipd.declaration.fields import (
    Report,
    known_keys,
    one_or_more,
    read_boolean,
    read_choice,
    read_integer,
    read_short_form,
    read_text,
)
from vipd.declaration.nodes import Mapping, Node, Scalar, Sequence, integer
from vipd.declaration.syntax import MAX_PORT, parse_percent, parse_period, period_text, quoted
from vipd.model.check import (
    MAX_CHECK_SECONDS,
    MAX_COUNT,
    MIN_CHECK_SECONDS,
    UNCHECKED,
    Check,
    DnsProbe,
    ExecProbe,
    HttpProbe,
    InitialHealth,
    Probe,
    TcpProbe,
    Timing,
    UdpProbe,
)

DNS_TYPES = ("A", "AAAA", "NS", "SOA", "TXT", "MX", "SRV", "CNAME", "PTR")
DNS_RCODES = ("NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED")

_TYPES: dict[str, Probe | None] = {
    "none": None,
    "tcp": TcpProbe(),
    "http": HttpProbe(),
    "https": HttpProbe(tls=True),
    "udp": UdpProbe(),
    "dns": DnsProbe(),
    "exec": ExecProbe(),
}
CHECK_TYPES = tuple(_TYPES)
"""The words for kinds of checks."""

HTTP_METHOD = re.compile(r"[A-Z]{1,16}")
HOST_NAME = re.compile(r"[A-Za-z0-9._:\[\]-]{1,253}")
USER_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
DOMAIN_NAME = re.compile(r"\.|(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?")
STATUS_RANGE = re.compile(r"([1-5][0-9]{2})(?:-([1-5][0-9]{2}))?")
_HEX = re.compile(r"hex:((?:[0-9a-fA-F]{2})+)")
_MAX_PAYLOAD = 1024
MAX_ARGUMENTS = 64


def read_check(report: Report, node: Node, path: str) -> Check | None:
    """A check: one of the types alone, or a mapping with `type`. None if it is invalid."""
    if not isinstance(node, Mapping):
        kind = read_choice(report, node, path, {name: name for name in _TYPES})
        return None if kind is None else _finished(report, kind, Check(_TYPES[kind]), node, path)
    if "type" not in node.items:
        report.add(node.line, path, "type is missing", "write {type: tcp}")
        return None
    kind = read_choice(report, node.items["type"], f"{path}.type", {name: name for name in _TYPES})
    if kind is None:
        return None
    timing: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for key, value in known_keys(report, node, path, keys_of_check(kind)):
        if key == "type":
            continue
        into = timing if key in TIMING_KEYS else fields
        name, read = TIMING_KEYS[key] if key in TIMING_KEYS else PROBE_KEYS[kind][key]
        found = read(report, value, f"{path}.{key}")
        if found is not None:
            into[name] = found
    probe = _TYPES[kind]
    check = Check(probe and replace(probe, **fields), Timing(**timing))
    return _finished(report, kind, check, node, path)


def keys_of_check(kind: str) -> tuple[str, ...]:
    """The keys of a check of this type."""
    return ("type", *(TIMING_KEYS if kind != "none" else ()), *PROBE_KEYS[kind])


def default_probe(kind: str) -> Probe | None:
    """The probe of a type of check without further keys."""
    return _TYPES[kind]


def _finished(report: Report, kind: str, check: Check, node: Node, path: str) -> Check:
    """Report invalid combinations, and missing parts."""
    if check.probe is None:
        return UNCHECKED
    said = node.items if isinstance(node, Mapping) else {}
    for key, hint in REQUIRED_KEYS.get(kind, {}).items():
        if key not in said:
            report.add(node.line, path, f"{key} is missing", hint)
    timing = check.timing
    if timing.timeout > timing.interval:
        if "timeout" in said:
            asked, answered = period_text(timing.interval), period_text(timing.timeout)
            what = f"timeout {answered} is longer than interval {asked}"
            hint = "an answer must come before the next question"
            report.add(said["timeout"].line, f"{path}.timeout", what, hint)
        # A missing timeout follows the interval: a short interval alone means a short timeout too.
        check = replace(check, timing=replace(timing, timeout=timing.interval))
    return check


def _read_seconds(report: Report, node: Node, path: str) -> float | None:
    seconds = read_short_form(report, node, path, parse_period, "a duration like 5s")
    if seconds is None or MIN_CHECK_SECONDS <= seconds <= MAX_CHECK_SECONDS:
        return seconds
    text = node.text if isinstance(node, Scalar) else ""
    report.add(node.line, path, f"{quoted(text)} is out of range", "from 100ms to 60m")
    return None


def _read_jitter(report: Report, node: Node, path: str) -> float | None:
    part = read_short_form(report, node, path, parse_percent, "a percentage like 10%")
    if part is not None and part > 0.5:
        report.add(node.line, path, f"{part:.0%} is out of range", "from 0% to 50%")
        return None
    return part


def _read_count(report: Report, node: Node, path: str) -> int | None:
    return read_integer(report, node, path, 1, MAX_COUNT)


def _read_start(report: Report, node: Node, path: str) -> InitialHealth | None:
    return read_choice(report, node, path, {start.value: start for start in InitialHealth})


def _read_port(report: Report, node: Node, path: str) -> int | None:
    return read_integer(report, node, path, 1, MAX_PORT)


def _matching(pattern: re.Pattern[str], wanted: str, hint: str) -> Callable[[Report, Node, str], str | None]:
    """A reader of text that has to match a whole pattern."""

    def read(report: Report, node: Node, path: str) -> str | None:
        text = read_text(report, node, path, wanted)
        if text is None or pattern.fullmatch(text):
            return text
        report.add(node.line, path, f"{quoted(text)} is not {wanted}", hint)
        return None

    return read


def _read_path(report: Report, node: Node, path: str) -> str | None:
    text = read_text(report, node, path, "a path like /healthz")
    if text is None or (text.startswith("/") and text.isascii() and text.isprintable() and " " not in text):
        return text
    report.add(node.line, path, f"{quoted(text)} is not a path", "it starts with / and holds no spaces")
    return None


def _read_status(report: Report, node: Node, path: str) -> tuple[tuple[int, int], ...] | None:
    found = []
    for place, item in one_or_more(node, path):
        text = item.text if isinstance(item, Scalar) else ""
        match = STATUS_RANGE.fullmatch(text)
        if match is None:
            report.wrong_type(item, place, "a status like 200 or a range like 200-299")
            continue
        low, high = int(match[1]), int(match[2] or match[1])
        if low > high:
            report.add(item.line, place, f"{text} is no range", f"write {high}-{low}")
            continue
        found.append((low, high))
    return tuple(found) or None


def _read_body(report: Report, node: Node, path: str) -> str | None:
    text = read_text(report, node, path, "text, or a regular expression")
    if text is None:
        return None
    try:
        body_pattern(text)
    except PatternError as error:
        if report.accepted:
            return text  # its backends are in trouble then, and serve on
        report.add(node.line, path, error.what, error.hint)
        return None
    return text


def _read_absolute(report: Report, node: Node, path: str) -> str | None:
    text = read_text(report, node, path, "a file's path")
    if text is None or (text.startswith("/") and "\0" not in text):
        return text
    report.add(node.line, path, f"{quoted(text)} is not an absolute path", "it starts with /")
    return None


def _read_payload(report: Report, node: Node, path: str) -> bytes | None:
    """Text as UTF-8, or `hex:` and pairs of digits."""
    if isinstance(node, Scalar) and integer(node) is not None:
        text: str | None = node.text
    else:
        text = read_text(report, node, path, "text, or hex: and pairs of digits")
    if text is None:
        return None
    match = _HEX.fullmatch(text)
    payload = bytes.fromhex(match[1]) if match else text.encode()
    if text.startswith("hex:") and match is None:
        report.add(node.line, path, f"{quoted(text)} is not hexadecimal", "write pairs of digits: hex:0a1b")
        return None
    if len(payload) > _MAX_PAYLOAD:
        report.add(node.line, path, f"{len(payload)} bytes are too long", f"at most {_MAX_PAYLOAD}")
        return None
    return payload


def _read_rcode(report: Report, node: Node, path: str) -> str | None:
    return read_choice(report, node, path, {name: name for name in DNS_RCODES})


def _read_record(report: Report, node: Node, path: str) -> str | None:
    return read_choice(report, node, path, {name: name for name in DNS_TYPES})


def _read_answer(report: Report, node: Node, path: str) -> str | None:
    return read_text(report, node, path, "the text of a record")


def _read_command(report: Report, node: Node, path: str) -> tuple[str, ...] | None:
    items = one_or_more(node, path)
    words = [_argument(report, item, place) for place, item in items]
    if not words or len(words) > MAX_ARGUMENTS:
        report.add(node.line, path, f"{len(words)} words are no command", f"from 1 to {MAX_ARGUMENTS} words")
        return None
    program = words[0]
    if program is not None and not program.startswith("/"):
        hint = "write the program's absolute path and its arguments as a list; there is no shell"
        report.add(items[0][1].line, items[0][0], f"{quoted(program)} is not an absolute path", hint)
    elif program and not isinstance(node, Sequence) and len(program.split()) > 1 and not report.accepted:
        hint = f"write a list, each word by itself: [{', '.join(program.split())}]; there is no shell"
        report.add(node.line, path, "the program and its arguments are one text", hint)
    return tuple(word for word in words if word is not None)


def _argument(report: Report, node: Node, path: str) -> str | None:
    if isinstance(node, Scalar) and integer(node) is not None:
        return node.text
    text = read_text(report, node, path, "text")
    if text is not None and "\0" in text:
        report.add(node.line, path, "an argument cannot hold a zero byte")
        return None
    return text


REQUIRED_KEYS = {
    "exec": {"command": "write {type: exec, command: [/usr/local/bin/check, --quick]}"},
    "udp": {"send": "write what the server answers to: {type: udp, send: ping}"},
}
"""The required keys of a check, with a hint."""

KeyReader: TypeAlias = Callable[[Report, Node, str], Any]

TIMING_KEYS: dict[str, tuple[str, KeyReader]] = {
    "interval": ("interval", _read_seconds),
    "timeout": ("timeout", _read_seconds),
    "rise": ("rise", _read_count),
    "fall": ("fall", _read_count),
    "start": ("start", _read_start),
    "jitter": ("jitter", _read_jitter),
}
"""The keys of every check: the field of `Timing` that each sets, and its reader."""

_PORT: dict[str, tuple[str, KeyReader]] = {"port": ("port", _read_port)}
_HTTP: dict[str, tuple[str, KeyReader]] = {
    **_PORT,
    "method": ("method", _matching(HTTP_METHOD, "an HTTP method", "write it in capitals: GET or HEAD")),
    "path": ("path", _read_path),
    "host": ("host", _matching(HOST_NAME, "a host name", "write a name, or an address, without a scheme")),
    "status": ("status", _read_status),
    "body": ("body", _read_body),
}
PROBE_KEYS: dict[str, dict[str, tuple[str, KeyReader]]] = {
    "none": {},
    "tcp": _PORT,
    "http": _HTTP,
    "https": {
        **_HTTP,
        "verify": ("verify", read_boolean),
        "ca": ("ca", _read_absolute),
        "server_name": ("server_name", _matching(HOST_NAME, "a host name", "the name in the certificate")),
    },
    "udp": {**_PORT, "send": ("send", _read_payload), "expect": ("expect", _read_payload)},
    "dns": {
        **_PORT,
        "query": ("query", _matching(DOMAIN_NAME, "a domain name", "write a name like example.com, or .")),
        "record": ("type", _read_record),
        "rcode": ("rcode", _read_rcode),
        "answer": ("answer", _read_answer),
    },
    "exec": {
        **_PORT,
        "command": ("command", _read_command),
        "user": (
            "user",
            _matching(USER_NAME, "a user's name", "a user without rights, such as vipd-check"),
        ),
    },
}
"""The keys of each type of check beside those of all: the probe's field that each sets, and its reader."""

CHECK_KEYS = tuple(
    dict.fromkeys(("type", *TIMING_KEYS, *(key for keys in PROBE_KEYS.values() for key in keys)))
)
"""Every key of a check, whatever its type."""
