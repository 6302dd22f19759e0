"""What a value of vipd/v1 may be: each form in the words of manual and docs, and as a JSON Schema. Pure.

The spellings that the readers accept are written down here once. A schema sees one value at a time, so it
accepts some that the readers refuse: an address that is no unicast one, or a second use of a port. It is of
draft 7, which editors know, and its regular expressions mean the same in Python and in ECMAScript.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from vipd.declaration.backend_reader import STATES, TOPOLOGY_NAME, TOPOLOGY_NAME_HINT
from vipd.declaration.check_reader import (
    CHECK_TYPES,
    DNS_RCODES,
    DOMAIN_NAME,
    HOST_NAME,
    HTTP_METHOD,
    MAX_ARGUMENTS,
    REQUIRED_KEYS,
    STATUS_RANGE,
    USER_NAME,
)
from vipd.declaration.dns_names import DNS_NAME_PATTERN
from vipd.declaration.policy_reader import DEFAULTS_KEYS
from vipd.declaration.port_reader import PORT_NAME, PORT_NAME_HINT
from vipd.declaration.service_reader import SERVICE_NAME
from vipd.declaration.syntax import IPV4_PATTERN, MAX_PORT
from vipd.model import limits
from vipd.model.check import MAX_CHECK_SECONDS, MIN_CHECK_SECONDS
from vipd.model.service import (
    MAX_AFFINITY_SECONDS,
    MAX_SLOW_START_SECONDS,
    AnnounceMethod,
    BackendState,
    Masquerade,
    Protocol,
    RejectAction,
)

Schema: TypeAlias = Mapping[str, Any]


class ValueForm(NamedTuple):
    """What a value may be: in words, of which those in backquotes are literal, and as a JSON Schema."""

    words: str
    schema: Schema


def definition_name(title: str) -> str:
    """The name of a mapping's definition in the schema: `external_address` of "An external address"."""
    return title.removeprefix("A ").removeprefix("An ").lower().replace(" ", "_")


def reference(name: str) -> Schema:
    """The schema that has this name among the definitions."""
    return {"$ref": f"#/definitions/{name}"}


def matching(pattern: str, wanted: str, type_: str | list[str] = "string") -> Schema:
    """Text that a whole pattern matches; an editor says that it must be `wanted`."""
    return {"type": type_, "pattern": f"^(?:{pattern})$", "patternErrorMessage": f"must be {wanted}"}


def whole_number(low: int, high: int) -> ValueForm:
    """A number from `low` to `high`."""
    return ValueForm(f"{low} to {high}", {"type": "integer", "minimum": low, "maximum": high})


def choice(*words: str, synonyms: Collection[str] = ()) -> ValueForm:
    """One of a few words. `synonyms` are accepted, too."""
    return ValueForm(_alternatives(words), {"enum": list(dict.fromkeys([*words, *synonyms]))})


def text_like(pattern: str, wanted: str) -> ValueForm:
    """Text that a whole pattern matches."""
    return ValueForm("text", matching(pattern, wanted))


def either(words: str, *schemas: Schema) -> ValueForm:
    """A value that one of the schemas accepts."""
    return ValueForm(words, {"anyOf": list(schemas)})


def duration(words: str, low: int, high: int) -> ValueForm:
    """Seconds as a number, or text with a unit."""
    pattern = "[1-9][0-9]{0,17}[smhd]?" if low else "(?:0|[1-9][0-9]{0,17})[smhd]?"
    text = matching(pattern, "a duration such as 90s, 10m, 3h or 1d", ["integer", "string"])
    return ValueForm(words, {**text, "minimum": low, "maximum": high})


def one_or_more(words: str, item: Schema, least: int = 1, **keywords: Any) -> ValueForm:
    """An item, or a list, with further keywords for it; null where the list may be empty."""
    array = {"items": item, "minItems": least, **keywords}
    # Says of a bad value what an item must be; `anyOf` would say only that no alternative fits.
    listed = ["array"] if least else ["array", "null"]
    return ValueForm(words, {"if": {"type": listed}, "then": array, "else": item})


def period(words: str) -> ValueForm:
    """Seconds as a number, or text with a unit, which may be milliseconds."""
    return ValueForm(words, reference("period"))


def _alternatives(words: Iterable[str]) -> str:
    *others, last = (f"`{word}`" for word in words)
    return f"{', '.join(others)} or {last}" if others else last


IPV6_PATTERN = (
    r"(?!::[Ff]{4}:)(?![0-9A-Fa-f:.]*::[0-9A-Fa-f:.]*::)(?:[0-9A-Fa-f]{0,4}:){2,7}"
    rf"(?:{IPV4_PATTERN}|[0-9A-Fa-f]{{0,4}})"
)
PORT_PATTERN = r"(?:6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3})"
"""1 to 65535."""
_PROTOCOLS = "|".join("".join(f"[{c}{c.upper()}]" for c in protocol) for protocol in Protocol)
_FRONTEND = rf"(?:{IPV4_PATTERN}|\[{IPV6_PATTERN}\]):{PORT_PATTERN}/(?:{_PROTOCOLS})"

PERIOD_TEXT = matching(
    r"[0-9]{1,9}(?:\.[0-9]{1,3})?(?:ms|s|m)?",
    "a duration such as 500ms, 2.5s or 1m",
    ["number", "string"],
)
DEFINITIONS: Mapping[str, Schema] = {
    "ip_address": matching(
        f"{IPV4_PATTERN}|{IPV6_PATTERN}", "an IPv4 or IPv6 address, without port, prefix length or name"
    ),
    "network": matching(
        rf"{IPV4_PATTERN}(?:/(?:3[0-2]|[12]?[0-9]))?|{IPV6_PATTERN}(?:/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9]))?",
        "a network such as 203.0.113.0/24 or fd00::/8, or an address",
    ),
    "period": {**PERIOD_TEXT, "minimum": MIN_CHECK_SECONDS, "maximum": MAX_CHECK_SECONDS},
}
"""Schemas of values that many keys have; those of mappings are in `key_docs`."""

PORT_TEXT = {
    **matching(
        rf"{PORT_PATTERN}(?::{PORT_PATTERN})?(?:/(?:{_PROTOCOLS})(?:, ?(?:{_PROTOCOLS}))*)?",
        "a port such as 443, 53/udp, 80:8080/tcp or 53/tcp,udp",
        ["integer", "string", "object"],
    ),
    "minimum": 1,
    "maximum": MAX_PORT,
}
"""The short form of a port, where a mapping is possible, too."""
BACKEND_TEXT = matching(
    rf"(?:{IPV4_PATTERN}(?::{PORT_PATTERN})?|\[{IPV6_PATTERN}\]:{PORT_PATTERN}|{IPV6_PATTERN})"
    rf"(?:@(?:0|{PORT_PATTERN}))?|dns:{DNS_NAME_PATTERN}(?::{PORT_PATTERN})?(?:@(?:0|{PORT_PATTERN}))?"
    rf"|srv:{DNS_NAME_PATTERN}",
    "a backend such as 10.244.0.5, 10.244.0.5:5353@2, [fd00::5]:5353 or dns:web.internal:80",
    ["string", "object"],
)
EXTERNAL_TEXT = {**DEFINITIONS["ip_address"], "type": ["string", "object"]}

TEXT = ValueForm("text", {"type": "string", "maxLength": limits.TEXT})
FLAG = ValueForm("`true` or `false`", {"type": "boolean"})
PORT_NUMBER = whole_number(1, MAX_PORT)
ADDRESS = ValueForm("an IPv4 or IPv6 address", reference("ip_address"))
BACKEND_NAME = ValueForm("a DNS name", matching(DNS_NAME_PATTERN, "a DNS name"))
ADDRESSES = one_or_more("an IPv4 or IPv6 address, or a list", ADDRESS.schema, uniqueItems=True)
NETWORKS = ValueForm(
    "a network, an address, a list, or `any`",
    {
        "if": {"type": "array"},
        "then": {"items": reference("network"), "minItems": 1, "uniqueItems": True},
        "else": {"anyOf": [{"enum": ["any"]}, reference("network")]},
    },
)

DEFAULTS = ValueForm(f"a mapping of {', '.join(f'`{key}`' for key in DEFAULTS_KEYS)}", reference("defaults"))
SERVICES = ValueForm("a list", {"type": ["array", "null"], "items": reference("service")})
NAME = text_like(
    f"{SERVICE_NAME.pattern}|{_FRONTEND}",
    "1 to 128 of A-Z a-z 0-9 . _ / - with a letter or digit at both ends",
)
PORTS = one_or_more(
    "a port or a list, at least one", reference("port"), uniqueItems=True, maxItems=limits.PORTS
)
BACKENDS = one_or_more(
    "a backend or a list, may be empty",
    reference("backend"),
    least=0,
    uniqueItems=True,
    maxItems=limits.BACKENDS,
)
FALLBACK_BACKENDS = one_or_more(
    "as for a service, at least one", reference("backend"), uniqueItems=True, maxItems=limits.BACKENDS
)
EXTERNAL_ADDRESSES = one_or_more(
    "an external address or a list", reference("external_address"), uniqueItems=True
)
MASQUERADE = ValueForm("a mode", {"enum": ["auto", *Masquerade]})
AFFINITY_TIMEOUT = duration("a duration, 1s to 1d", 1, MAX_AFFINITY_SECONDS)
AFFINITY = either(
    "`none`, `client-ip`, `true`, a duration, or a mapping",
    {"enum": ["none", "client-ip", True, False]},
    AFFINITY_TIMEOUT.schema,
    reference("affinity"),
)
FALLBACK = either(
    "`reject`, `drop`, `keep`, a backend, a list of them, or a mapping",
    {"enum": [*RejectAction, "keep"]},
    FALLBACK_BACKENDS.schema,
    reference("fallback"),
)
ANNOUNCE = either(
    "`routes`, `l2`, `none`, or a mapping", {"enum": [*AnnounceMethod, "none"]}, reference("announce")
)
LIMITS = either("`none`, or a mapping", {"enum": ["none"]}, reference("flow_limits"))
TRAFFIC_POLICIES = ValueForm("a mapping", reference("traffic_policies"))
SLOW_START = duration("a duration, up to 1h", 0, MAX_SLOW_START_SECONDS)

PROTOCOL = choice(*Protocol, synonyms=[protocol.upper() for protocol in Protocol])
PORT_LABEL = text_like(PORT_NAME.pattern, PORT_NAME_HINT)
NAMED_PORTS = ValueForm(
    "a mapping of port names to numbers",
    {
        "type": "object",
        "propertyNames": matching(PORT_NAME.pattern, f"the name of a port: {PORT_NAME_HINT}"),
        "additionalProperties": PORT_NUMBER.schema,
        "minProperties": 1,
    },
)
STATE = choice(*BackendState, synonyms=STATES)
NODE = text_like(TOPOLOGY_NAME.pattern, TOPOLOGY_NAME_HINT)
ZONES = one_or_more("text or a list", NODE.schema)

CHECK = either(
    "a type of check, or a mapping",
    {"enum": [kind for kind in CHECK_TYPES if kind not in REQUIRED_KEYS]},
    reference("check"),
)
CHECK_TYPE = choice(*CHECK_TYPES)
JITTER = ValueForm("`0%` to `50%`", matching("0{0,2}[0-9]%|0?[1-4][0-9]%|0?50%", "from 0% to 50%"))
METHOD = ValueForm("an HTTP method", matching(HTTP_METHOD.pattern, "an HTTP method in capitals: GET or HEAD"))
URL_PATH = ValueForm("a path", matching("/[!-~]*", "a path such as /healthz, without spaces"))
HOST = ValueForm("a host name", matching(HOST_NAME.pattern, "a name, or an address, without a scheme"))
_STATUS = {
    **matching(
        STATUS_RANGE.pattern, "a status such as 200 or a range such as 200-299", ["integer", "string"]
    ),
    "minimum": 100,
    "maximum": 599,
}
STATUS = ValueForm(
    "a status, a range, or a list", {"if": {"type": "array"}, "then": {"items": _STATUS}, "else": _STATUS}
)
BODY = ValueForm("text, or a regular expression", TEXT.schema)
FILE = ValueForm("a file's path", matching("/[^\\u0000]*", "an absolute path"))
PAYLOAD = ValueForm(
    "text, or `hex:` and digits",
    {
        "type": ["integer", "string"],
        "pattern": "^(?!hex:)|^hex:(?:[0-9a-fA-F]{2})+$",
        "patternErrorMessage": "must be pairs of digits behind hex:, such as hex:0a1b",
    },
)
DNS_NAME = ValueForm("a domain name", matching(DOMAIN_NAME.pattern, "a name such as example.com, or ."))
RCODE = ValueForm("a response code", {"enum": list(DNS_RCODES)})
RECORD_TEXT = ValueForm("the text of a record", TEXT.schema)
COMMAND = ValueForm(
    "a list of text",
    {
        "if": {"type": "array"},
        "then": {
            "items": [FILE.schema],
            "additionalItems": {"type": ["integer", "string"]},
            "minItems": 1,
            "maxItems": MAX_ARGUMENTS,
        },
        "else": matching("/\\S*", "a program's absolute path, or a list with its arguments"),
    },
)
USER = ValueForm("a user's name", matching(USER_NAME.pattern, "the name of a user, such as vipd-check"))
