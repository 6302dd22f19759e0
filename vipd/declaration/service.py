"""The definition of vipd/v1: every mapping, each key with its values, its default and its meaning. Pure.

The reader, the writer, JSON Schema and the tables of docs and manual come from it. Options of vipctl have
texts of their own, since to import this would slow each start. To add a key: one line here, one field in the
model, and the code that uses it. In meanings backquotes mark what is literal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

from vipd.declaration.body_pattern import PatternError, body_pattern
from vipd.declaration.dns_names import (
    DNS_NAME_PATTERN,
    parse_any_backend,
    parse_backend_address,
    parse_dns_name,
)
from vipd.declaration.syntax import (
    FORBIDDEN_BACKEND_KINDS,
    FORBIDDEN_VIP_KINDS,
    IPV4_PATTERN,
    MAX_PORT,
    InvalidTextError,
    address_kind,
    duration_text,
    parse_address,
    parse_backend,
    parse_duration,
    parse_network,
    parse_percent,
    parse_period,
    parse_ports,
    parse_protocol,
    period_text,
    quoted,
    with_article,
)
from vipd.declaration.values import (
    FLAG,
    INVALID,
    Faults,
    Key,
    Kind,
    Located,
    Path,
    Schema,
    Table,
    any_text,
    choice,
    items_of,
    list_or,
    matching,
    misspelt,
    number,
    one_or_list,
    one_or_more,
    read_text,
    reader_of_items,
    reader_of_short_form,
    reader_of_words,
    shown,
    table,
    text_like,
    unknown_key,
)
from vipd.declaration.yaml_text import meaning_of
from vipd.model import limits
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
from vipd.model.flow_limits import (
    MAX_BURST,
    MAX_CONNECTIONS,
    MAX_NEW_PER_SECOND,
    MIN_CLIENT_IPV6_PREFIX,
    FlowLimits,
    Limit,
)
from vipd.model.service import (
    MAX_AFFINITY_SECONDS,
    MAX_SLOW_START_SECONDS,
    MAX_WEIGHT,
    Affinity,
    AnnounceMethod,
    Backend,
    BackendState,
    Balance,
    ExternalAddress,
    Masquerade,
    NamedBackend,
    NameKind,
    Protocol,
    RejectAction,
    ServicePort,
    TrafficDistribution,
    TrafficPolicy,
)

API_VERSION = "vipd/v1"
_located: Any = partial(tuple.__new__, Located)
"""In half of the time of the class, which calls a function of Python."""

# Patterns, and what hints say of them.

SERVICE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,126}[A-Za-z0-9])?")
SERVICE_NAME_HINT = "1 to 128 of A-Z a-z 0-9 . _ / - with a letter or digit at both ends"
PORT_NAME = re.compile(r"(?=-*[a-z0-9])[a-z0-9-]{1,63}")
"""Digits alone are legal in Kubernetes, which names a port `80-8080` itself."""
PORT_NAME_HINT = "1 to 63 of a-z 0-9 - with at least one letter or digit"
TOPOLOGY_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
TOPOLOGY_NAME_HINT = "1 to 253 of A-Z a-z 0-9 . _ - with a letter or digit at both ends"
HOST_NAME = r"[A-Za-z0-9._:\[\]-]{1,253}"
DOMAIN_NAME = r"\.|(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?"
STATUS_RANGE = re.compile(r"([1-5][0-9]{2})(?:-([1-5][0-9]{2}))?")
DNS_TYPES = ("A", "AAAA", "NS", "SOA", "TXT", "MX", "SRV", "CNAME", "PTR")
DNS_RCODES = ("NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED")
MAX_ARGUMENTS = 64
_MAX_PAYLOAD = 1024
_HEX = re.compile(r"hex:((?:[0-9a-fA-F]{2})+)")
IPV6_PATTERN = (
    r"(?!::[Ff]{4}:)(?![0-9A-Fa-f:.]*::[0-9A-Fa-f:.]*::)(?:[0-9A-Fa-f]{0,4}:){2,7}"
    rf"(?:{IPV4_PATTERN}|[0-9A-Fa-f]{{0,4}})"
)
PORT_PATTERN = r"(?:6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3})"
"""1 to 65535."""
_PROTOCOLS = "|".join("".join(f"[{c}{c.upper()}]" for c in protocol) for protocol in Protocol)
_FRONTEND = rf"(?:{IPV4_PATTERN}|\[{IPV6_PATTERN}\]):{PORT_PATTERN}/(?:{_PROTOCOLS})"


def definition_name(title: str) -> str:
    """The name of a mapping's schema: `external_address` of "An external address"."""
    return title.removeprefix("A ").removeprefix("An ").lower().replace(" ", "_")


def reference(title: str) -> Schema:
    """The schema of the mapping with this title, or of a value with this name."""
    return {"$ref": f"#/definitions/{definition_name(title)}"}


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


_IP_ADDRESS = matching(
    f"{IPV4_PATTERN}|{IPV6_PATTERN}", "an IPv4 or IPv6 address, without port, prefix length or name"
)

# Plain values.


def usable(address: str, path: Path, faults: Faults, kinds: Mapping[str, str]) -> bool:
    """Whether an address is of none of these kinds, which each have a hint."""
    kind = address_kind(address)
    if kind not in kinds or (
        kind == "link-local" and kinds is FORBIDDEN_BACKEND_KINDS and ":" not in address
    ):
        return True
    faults.add(path, f"{address} is {with_article(kind)} address", kinds[kind])
    return False


PORT_NUMBER = number(1, MAX_PORT)
ADDRESS = Kind(
    "an IPv4 or IPv6 address", reference("ip_address"), reader_of_short_form(parse_address, "an IP address")
)
_DURATION = "a duration such as 90s, 10m, 3h or 1d"


def _read_vip(value: Any, path: Path, faults: Faults) -> Any:
    address = ADDRESS.read(value, path, faults)
    return address if address is INVALID or usable(address, path, faults, FORBIDDEN_VIP_KINDS) else INVALID


VIP = replace(ADDRESS, read=_read_vip)


def _duration(words: str, example: str, low: int, high: int, range_words: str) -> Kind:
    pattern = "[1-9][0-9]{0,17}[smhd]?" if low else "(?:0|[1-9][0-9]{0,17})[smhd]?"
    schema = {**matching(pattern, _DURATION, ["integer", "string"]), "minimum": low, "maximum": high}
    read = reader_of_short_form(parse_duration, f"a duration like {example}", low, high, range_words)
    return Kind(words, schema, read, duration_text)


def _period(words: str) -> Kind:
    span = (MIN_CHECK_SECONDS, MAX_CHECK_SECONDS, "from 100ms to 60m")
    read = reader_of_short_form(parse_period, "a duration like 5s", *span)
    return Kind(words, reference("period"), read, period_text)


NODE = text_like("text", TOPOLOGY_NAME.pattern, TOPOLOGY_NAME_HINT, wanted="the name of a node")
ZONE = text_like("text", TOPOLOGY_NAME.pattern, TOPOLOGY_NAME_HINT, wanted="the name of a zone")


def _host(hint: str) -> Kind:
    schema_hint = "a name, or an address, without a scheme"
    return text_like("a host name", HOST_NAME, hint, schema_hint=schema_hint)


def _allowed(text: str) -> str:
    if text == "any":
        raise InvalidTextError("any stands among networks", "write allow_from: any alone, or leave any out")
    return parse_network(text)


_read_networks = reader_of_items(
    reader_of_short_form(_allowed, "a network like 203.0.113.0/24"),
    "the list is empty",
    "name a network, or write any",
)


def _read_allowed(value: Any, path: Path, faults: Faults) -> Any:
    """The networks, each once; `any` is no network at all."""
    if value == "any":
        return ()
    first: dict[str, Path] = {}
    for network, at in _read_networks(value, path, faults):
        if network in first:
            faults.add(at, f"{network} is already", "remove one of them", other=first[network])
        first.setdefault(network, at)
    return tuple(first)


NETWORKS = Kind(
    "a network, an address, a list, or `any`",
    list_or(
        {"anyOf": [{"enum": ["any"]}, reference("network")]},
        reference("network"),
        minItems=1,
        uniqueItems=True,
    ),
    _read_allowed,
    lambda networks: one_or_list(networks) if networks else "any",
)

# Checks.


def _read_status(value: Any, path: Path, faults: Faults) -> Any:
    """Ranges of statuses, both ends included."""
    ranges = []
    for item, at in items_of(value, path):
        text = str(item) if isinstance(item, str | int) and not isinstance(item, bool) else ""
        match = STATUS_RANGE.fullmatch(text)
        if match is None:
            faults.wrong_type(item, at, "a status like 200 or a range like 200-299")
            continue
        low, high = int(match[1]), int(match[2] or match[1])
        if low > high:
            faults.add(at, f"{text} is no range", f"write {high}-{low}")
            continue
        ranges.append((low, high))
    return tuple(ranges) or INVALID


def _read_body(value: Any, path: Path, faults: Faults) -> Any:
    """A pattern. One that was accepted may stay: its backends are in trouble then, and serve on."""
    text = read_text(value, path, faults, "text, or a regular expression")
    try:
        if text is not INVALID and not faults.accepted:
            body_pattern(text)
    except PatternError as error:
        return faults.refuse(path, error.what, error.hint)
    return text


def _read_payload(value: Any, path: Path, faults: Faults) -> Any:
    """The bytes of text, or those behind `hex:`."""
    text = read_text(value, path, faults, "text, or hex: and pairs of digits", numbers=True)
    if text is INVALID:
        return INVALID
    match = _HEX.fullmatch(text)
    payload = bytes.fromhex(match[1]) if match else text.encode()
    if text.startswith("hex:") and match is None:
        return faults.refuse(path, f"{quoted(text)} is not hexadecimal", "write pairs of digits: hex:0a1b")
    if len(payload) > _MAX_PAYLOAD:
        return faults.refuse(path, f"{len(payload)} bytes are too long", f"at most {_MAX_PAYLOAD}")
    return payload


def _payload_text(payload: bytes | None) -> object:
    """The text that the payload is, or `hex:` and digits where text would not be read back the same."""
    try:
        text = (payload or b"").decode()
    except UnicodeDecodeError:
        text = ""
    plain = text and text.isprintable() and not text.startswith("hex:")
    return text if plain or not payload else f"hex:{payload.hex()}"


def _read_command(value: Any, path: Path, faults: Faults) -> Any:
    """The words: a program's absolute path and its arguments."""
    items = list(items_of(value, path))
    words = [_argument(item, at, faults) for item, at in items]
    if not words or len(words) > MAX_ARGUMENTS:
        what = f"{len(words)} words are no command"
        return faults.refuse(path, what, f"from 1 to {MAX_ARGUMENTS} words")
    program = words[0]
    if program is not INVALID and not program.startswith("/"):
        hint = "write the program's absolute path and its arguments as a list; there is no shell"
        faults.add(items[0].path, f"{quoted(program)} is not an absolute path", hint)
    elif program is not INVALID and type(value) is not list and " " in program and not faults.accepted:
        hint = f"write a list, each word by itself: [{', '.join(program.split())}]; there is no shell"
        faults.add(path, "the program and its arguments are one text", hint)
    return tuple(word for word in words if word is not INVALID)


def _argument(value: Any, path: Path, faults: Faults) -> Any:
    text = read_text(value, path, faults, numbers=True)
    if text is not INVALID and "\0" in text:
        return faults.refuse(path, "an argument cannot hold a zero byte")
    return text


FILE = text_like(
    "a file's path",
    "/[^\\u0000]*",
    "it starts with /",
    wanted="an absolute path",
    schema_hint="an absolute path",
)


def _status_spec(ranges: Sequence[tuple[int, int]]) -> object:
    return one_or_list([low if low == high else f"{low}-{high}" for low, high in ranges])


_STATUS = {
    **matching(
        STATUS_RANGE.pattern, "a status such as 200 or a range such as 200-299", ["integer", "string"]
    ),
    "minimum": 100,
    "maximum": 599,
}
_PAYLOAD = Kind(
    "text, or `hex:` and digits",
    {
        "type": ["integer", "string"],
        "pattern": "^(?!hex:)|^hex:(?:[0-9a-fA-F]{2})+$",
        "patternErrorMessage": "must be pairs of digits behind hex:, such as hex:0a1b",
    },
    _read_payload,
    _payload_text,
)
_TEXT = {"type": "string", "maxLength": limits.TEXT}


def _jitter(text: str) -> float:
    part = parse_percent(text)
    if part > 0.5:
        raise InvalidTextError(f"{part:.0%} is out of range", "from 0% to 50%")
    return part


TIMING = {
    "interval": Key(
        _period("a duration, 100ms to 60m"),
        "From one question to the next. At least 1s for a backend that registers itself. Default: `5s`.",
    ),
    "timeout": Key(_period("a duration, 100ms to `interval`"), "Longest time for an answer. Default: `2s`."),
    "rise": Key(
        number(1, MAX_COUNT), "Good answers in a row that make an unhealthy backend healthy. Default: 2."
    ),
    "fall": Key(
        number(1, MAX_COUNT), "Bad answers in a row that make a healthy backend unhealthy. Default: 3."
    ),
    "start": Key(choice(InitialHealth), "What it counts as until the first verdict. Default: `healthy`."),
    "jitter": Key(
        Kind(
            "`0%` to `50%`",
            matching("0{0,2}[0-9]%|0?[1-4][0-9]%|0?50%", "from 0% to 50%"),
            reader_of_short_form(_jitter, "a percentage like 10%"),
            lambda part: f"{round(part * 100)}%",
        ),
        "By how much pauses are shortened at random. Default: `10%`.",
    ),
}
"""The keys of every check: fields of `Timing`."""


class CheckType(NamedTuple):
    """A type of check: its probe without further keys, and the keys that it has beside those of all."""

    probe: Probe | None
    keys: Mapping[str, Key]
    required: Mapping[str, str] = {}
    """The keys that it must have, each with a hint."""


_PORT_ASKED = {"port": Key(PORT_NUMBER, "The port that is asked. Default: the backend's own.")}
_HTTP = {
    **_PORT_ASKED,
    "method": Key(
        text_like(
            "an HTTP method",
            "[A-Z]{1,16}",
            "write it in capitals: GET or HEAD",
            schema_hint="an HTTP method in capitals: GET or HEAD",
        ),
        "http, https: of the request. Default: `GET`.",
    ),
    "path": Key(
        text_like(
            "a path",
            "/[!-~]*",
            "it starts with / and holds no spaces",
            wanted="a path like /healthz",
            noun="a path",
            schema_hint="a path such as /healthz, without spaces",
        ),
        "http, https: of the request. Default: `/`.",
    ),
    "host": Key(
        _host("write a name, or an address, without a scheme"),
        "http, https: the Host header. Default: the address and port.",
    ),
    "status": Key(
        Kind("a status, a range, or a list", list_or(_STATUS), _read_status, _status_spec),
        "http, https: good ones. Redirections are not followed. Default: `200-399`.",
    ),
    "body": Key(
        Kind("text, or a regular expression", _TEXT, _read_body),
        "http, https: found in the answer's first 64 KiB. Default: any body.",
    ),
}
CHECK_TYPES = {
    "none": CheckType(None, {}),
    "tcp": CheckType(TcpProbe(), _PORT_ASKED),
    "http": CheckType(HttpProbe(), _HTTP),
    "https": CheckType(
        HttpProbe(tls=True),
        {
            **_HTTP,
            "verify": Key(FLAG, "https: whether the certificate must be valid. Default: `true`."),
            "ca": Key(
                FILE,
                "https: certificates to trust, in a regular file of at most 1 MiB. Not in etcd, where "
                "nothing names files of hosts. Default: the host's.",
            ),
            "server_name": Key(
                _host("the name in the certificate"),
                "https: name sent (SNI) and verified. Default: `host`, else the address.",
            ),
        },
    ),
    "udp": CheckType(
        UdpProbe(),
        {
            **_PORT_ASKED,
            "send": Key(_PAYLOAD, "udp: the datagram. Required."),
            "expect": Key(
                _PAYLOAD,
                "udp: what the answer begins with. Without it only an ICMP refusal is bad. Default: "
                "silence is good.",
            ),
        },
        {"send": "write what the server answers to: {type: udp, send: ping}"},
    ),
    "dns": CheckType(
        DnsProbe(),
        {
            **_PORT_ASKED,
            "query": Key(
                text_like(
                    "a domain name",
                    DOMAIN_NAME,
                    "write a name like example.com, or .",
                    schema_hint="a name such as example.com, or .",
                ),
                "dns: the name that is asked for. Default: `.`.",
            ),
            "record": Key(choice(DNS_TYPES), "dns: the type of record. Default: `A`."),
            "rcode": Key(
                choice(DNS_RCODES, words="a response code"), "dns: of a good answer. Default: `NOERROR`."
            ),
            "answer": Key(
                any_text("the text of a record", _TEXT, "the text of a record"),
                "dns: must be among the answers. Default: any or none.",
            ),
        },
    ),
    "exec": CheckType(
        ExecProbe(),
        {
            **_PORT_ASKED,
            "command": Key(
                Kind(
                    "a list of text",
                    list_or(
                        matching("/\\S*", "a program's absolute path, or a list with its arguments"),
                        [FILE.schema],
                        additionalItems={"type": ["integer", "string"]},
                        minItems=1,
                        maxItems=MAX_ARGUMENTS,
                    ),
                    _read_command,
                    list,
                ),
                "exec: a program's absolute path and its arguments, each word by itself. No shell. Required.",
            ),
            "user": Key(
                text_like(
                    "a user's name",
                    "[a-z_][a-z0-9_-]{0,31}",
                    "a user without rights, such as vipd-check",
                    schema_hint="the name of a user, such as vipd-check",
                ),
                "exec: the user that runs it. Never root, nor a user that may change what vipd does. "
                "Default: one for each author.",
            ),
        },
        {"command": "write {type: exec, command: [/usr/local/bin/check, --quick]}"},
    ),
}
PROBE_FIELDS = {"record": "type"}
"""Keys that a probe's field is not named after."""
_TYPE = choice(list(CHECK_TYPES))
CHECK_KEYS: Mapping[str, Key] = {
    "type": Key(_TYPE, "Required in a mapping."),
    **TIMING,
    **{name: key for kind in CHECK_TYPES.values() for name, key in kind.keys.items()},
}
"""Every key of a check, whatever its type."""


def keys_of_check(kind: str) -> Mapping[str, Key]:
    """The keys of a check of this type."""
    first = {"type": CHECK_KEYS["type"]}
    return {**first, **(TIMING if kind != "none" else {}), **CHECK_TYPES[kind].keys}


_KEYS_OF_CHECK = {kind: table("", {}, "A check", keys_of_check(kind)) for kind in CHECK_TYPES}


def _read_check(value: Any, path: Path, faults: Faults) -> Any:
    """A type of check, or a mapping."""
    if type(value) is not dict:
        kind = _TYPE.read(value, path, faults)
        return INVALID if kind is INVALID else _finished(kind, {}, {}, path, faults)
    if "type" not in value:
        return faults.refuse(path, "type is missing", "write {type: tcp}")
    kind = _TYPE.read(value["type"], (*path, "type"), faults)
    if kind is INVALID:
        return INVALID
    return _finished(kind, _KEYS_OF_CHECK[kind].read(value, path, faults), value, path, faults)


def _finished(
    kind: str, right: dict[str, Any], written: Mapping[str, Any], path: Path, faults: Faults
) -> Check:
    """The check of these values, its faults across keys reported."""
    probe, keys, required = CHECK_TYPES[kind]
    if probe is None:
        return UNCHECKED
    for key, hint in required.items():
        if key not in written:
            faults.add(path, f"{key} is missing", hint)
    own = tuple((PROBE_FIELDS.get(key, key), right[key]) for key in keys if key in right)
    timing: Timing = _made(Timing, tuple((key, right[key]) for key in TIMING if key in right))
    if timing.timeout > timing.interval:
        if "timeout" in written:
            what = f"timeout {period_text(timing.timeout)} is longer than"
            what += f" interval {period_text(timing.interval)}"
            faults.add((*path, "timeout"), what, "an answer must come before the next question")
        # A missing timeout follows the interval: a short interval alone means a short timeout too.
        timing = _made(timing, (("timeout", timing.interval),))
    return cast("Check", _made(Check, (("probe", _made(probe, own)), ("timing", timing))))


def check_to_spec(check: Check) -> object:
    """A check, defaults left out: `tcp`, or `{type: http, path: /healthz}`. `none` without a probe."""
    kind = check_type(check)
    plain, keys, required = CHECK_TYPES[kind]
    spec: dict[str, object] = {"type": kind}
    for name, key in keys.items():
        field = PROBE_FIELDS.get(name, name)
        value = getattr(check.probe, field)
        if value != getattr(plain, field) or name in required:
            spec[name] = key.kind.written(value)
    # A missing timeout is never longer than the interval.
    defaults = Timing(timeout=min(Timing().timeout, check.timing.interval))
    for name, key in TIMING.items() if plain else ():
        value = getattr(check.timing, name)
        if value != getattr(defaults, name):
            spec[name] = key.kind.written(value)
    return kind if len(spec) == 1 else spec


def check_type(check: Check) -> str:
    """The word for the kind of check: `tcp`, `http`, `https`, `udp`, `dns`, `exec` or `none`."""
    if isinstance(check.probe, HttpProbe):
        return "https" if check.probe.tls else "http"
    return next(kind for kind in CHECK_TYPES if type(CHECK_TYPES[kind].probe) is type(check.probe))


CHECK = Kind(
    "a type of check, or a mapping",
    _either({"enum": [kind for kind in CHECK_TYPES if not CHECK_TYPES[kind].required]}, reference("check")),
    _read_check,
    check_to_spec,
)


@lru_cache(maxsize=1024)
def _made(cls: Any, items: tuple[tuple[str, Any], ...]) -> Any:
    """A frozen value. Many services have equal ones, which are one object."""
    return replace(cls, **dict(items)) if not isinstance(cls, type) else cls(**dict(items))


# Ports.

PORT_TEXT = {
    **matching(
        rf"{PORT_PATTERN}(?::{PORT_PATTERN})?(?:/(?:{_PROTOCOLS})(?:, ?(?:{_PROTOCOLS}))*)?",
        "a port such as 443, 53/udp, 80:8080/tcp or 53/tcp,udp",
        ["integer", "string", "object"],
    ),
    "minimum": 1,
    "maximum": MAX_PORT,
}
PROTOCOL_WORDS = [protocol.upper() for protocol in Protocol]


_read_protocol_word = reader_of_short_form(parse_protocol, "tcp, udp or sctp")


def _read_protocol(value: Any, path: Path, faults: Faults) -> Any:
    if type(value) is list or (isinstance(value, str) and "," in value):
        hint = "write a port for each, or the short form: 53:5353/tcp,udp"
        return faults.refuse(path, "a port has one protocol", hint)
    return _read_protocol_word(value, path, faults)


PORT = table(
    "a port",
    reference("port"),
    "A port",
    {
        "name": Key(
            text_like("text", PORT_NAME.pattern, PORT_NAME_HINT, wanted="a name", noun="a port name"),
            "1 to 63 of `a-z 0-9 -`, at least one letter or digit. Needed only for `ports` of a backend. "
            "Default: none.",
        ),
        "port": Key(PORT_NUMBER, "Required. What clients connect to."),
        "protocol": Key(
            Kind("`tcp`, `udp` or `sctp`", {"enum": [*map(str, Protocol), *PROTOCOL_WORDS]}, _read_protocol),
            "Of clients and backends. Default: `tcp`.",
        ),
        "target": Key(PORT_NUMBER, "The backends' port. Default: `port`."),
        "node_port": Key(
            PORT_NUMBER, "Port on this host's own addresses that leads here too. Default: none."
        ),
    },
    PORT_TEXT,
)


_read_port_text = reader_of_short_form(parse_ports, "a port like 53/udp or a mapping")


def _read_ports(value: Any, path: Path, faults: Faults) -> Any:
    """Ports in any form, one or a list, as a list of `Located`."""
    if type(value) is list and not value:
        faults.add(path, "the list is empty", "every service needs a port, like 53/udp")
    ports: list[Located[ServicePort]] = []
    before: Any = None
    for item, at in items_of(value, path):
        if type(item) is dict:
            port = _port(item, at, faults)
            ports += () if port is INVALID else (Located(port, at),)
        elif not _is_misread(item, at, before, faults):
            several = _read_port_text(item, at, faults)
            ports += () if several is INVALID else [_located((port, at)) for port in several]
        before = item
    return ports


_PROTOCOL_WORDS = frozenset(map(str, Protocol))


def _is_misread(value: Any, path: Path, before: Any, faults: Faults) -> bool:
    """Report what YAML makes of a port without quotes: the item `udp` of `[80/tcp,udp]`, the number
    `22:22`."""
    if not isinstance(value, str):
        return False
    if isinstance(before, str) and "/" in before and value.lower() in _PROTOCOL_WORDS:
        hint = f'a comma ends an item of a list: write "{before},{value}" in quotes'
        faults.add(path, f"{quoted(value)} is not a port", hint)
        return True
    if ":" in value and meaning_of(value):
        faults.wrong_type(value, path, "a port", f'put it in quotes: "{value}", or write {value}/tcp')
        return True
    return False


def _port(value: dict[str, Any], path: Path, faults: Faults) -> Any:
    right = PORT.read(value, path, faults)
    if "port" not in value and "port" not in misspelt(value, PORT.keys, faults):
        faults.add(path, "port is missing", "write {port: 53, protocol: udp}")
    if "port" not in right or ("protocol" in value and "protocol" not in right):
        return INVALID
    target = right.get("target")
    return ServicePort(
        right["port"],
        right.get("protocol", Protocol.TCP),
        right.get("name", ""),
        None if target == right["port"] else target,
        right.get("node_port"),
    )


# Backends.

BACKEND_TEXT = matching(
    rf"(?:{IPV4_PATTERN}(?::{PORT_PATTERN})?|\[{IPV6_PATTERN}\]:{PORT_PATTERN}|{IPV6_PATTERN})"
    rf"(?:@(?:0|{PORT_PATTERN}))?|dns:{DNS_NAME_PATTERN}(?::{PORT_PATTERN})?(?:@(?:0|{PORT_PATTERN}))?"
    rf"|srv:{DNS_NAME_PATTERN}",
    "a backend such as 10.244.0.5, 10.244.0.5:5353@2, [fd00::5]:5353 or dns:web.internal:80",
    ["string", "object"],
)
STATES = {
    **{state.value: state for state in BackendState},
    "active": BackendState.UP,
    "ready": BackendState.UP,
    "draining": BackendState.DRAIN,
    "disabled": BackendState.DOWN,
}
"""The words for a backend's state. The canonical ones are those of the model; they are used for output."""
_STATE_SYNONYMS = tuple(word for word in STATES if word not in tuple(BackendState))


def _read_named_ports(value: Any, path: Path, faults: Faults) -> Any:
    """Pairs of name and number. Whether the service has such ports is not checked here."""
    if type(value) is not dict:
        hint = "for one port for all, write port: 8080"
        faults.wrong_type(value, path, "a mapping like {http: 8080}", hint)
        return ()
    if not value:
        faults.add(path, "the mapping is empty", "a backend of no port is none: remove the backend")
    numbers = ((name, PORT_NUMBER.read(item, (*path, name), faults)) for name, item in value.items())
    return tuple([(name, number) for name, number in numbers if number is not INVALID])


_DNS_NAME = Kind(
    "a DNS name", matching(DNS_NAME_PATTERN, "a DNS name"), reader_of_short_form(parse_dns_name, "a DNS name")
)


BACKEND = table(
    "a backend",
    reference("backend"),
    "A backend",
    {
        "address": Key(
            replace(ADDRESS, read=reader_of_short_form(parse_backend_address, "an IP address")),
            "Of a family that the service has an address of; not loopback, and no service's `address`. A "
            "backend has this, `dns` or `srv`.",
        ),
        "dns": Key(_DNS_NAME, "A name in place of `address`: each of its addresses is a backend."),
        "srv": Key(
            _DNS_NAME,
            "A name in place of `address` whose SRV records say the backends, their ports, weights and "
            "which are backups. Only in services of one port; not beside `port`, `ports` or `weight`.",
        ),
        "port": Key(
            PORT_NUMBER, "The backend's own port, for all ports of the service. Default: the port's `target`."
        ),
        "ports": Key(
            Kind(
                "a mapping of port names to numbers",
                {
                    "type": "object",
                    "propertyNames": matching(PORT_NAME.pattern, f"the name of a port: {PORT_NAME_HINT}"),
                    "additionalProperties": PORT_NUMBER.schema,
                    "minProperties": 1,
                },
                _read_named_ports,
                dict,
            ),
            "The only ports that it serves, each with its own number. Not beside `port`. Default: all ports.",
        ),
        "weight": Key(
            number(0, MAX_WEIGHT),
            "Its share of new flows is its weight over the sum of all. 0: no new flows. Default: 1.",
        ),
        "state": Key(
            choice(STATES, *_STATE_SYNONYMS),
            "`drain`: new flows only while nothing that is up can serve. `down`: none, and flows are "
            "treated as if it were removed. Default: `up`.",
        ),
        "node": Key(
            NODE,
            "The host it runs on, for the policy `local`. Compared with the setting `node_name`. Default: "
            "none.",
        ),
        "zone": Key(
            one_or_more("text or a list", ZONE, "the list is empty", "name a zone, or remove the key"),
            "Zones whose clients it should serve. Compared with the setting `zone`. Default: none.",
            field="zones",
        ),
        "backup": Key(FLAG, "Serves only while no backend that is none can. Default: `false`."),
        "check": Key(CHECK, "How this backend is checked. Default: the service's."),
        "max_connections": Key(
            number(1, MAX_CONNECTIONS),
            "With so many live flows of the service through this host it gets no new ones, until a "
            "twentieth of them has ended. vipd counts about once a second, so that more may come within a "
            "second. Default: no limit.",
        ),
    },
    BACKEND_TEXT,
)
_read_backend_text = reader_of_short_form(parse_any_backend, "a backend address or a mapping")


class BackendList(NamedTuple):
    """Backends as they are written."""

    by_address: Sequence[Located[Backend]] = ()
    by_name: Sequence[Located[NamedBackend]] = ()
    detailed: bool = False
    """Whether one is written as a mapping: a short form says neither ports nor a check."""


def _read_backends(value: Any, path: Path, faults: Faults) -> Any:
    """A `BackendList` of backends in any form, one or a list; null is an empty list."""
    by_address: list[Located[Backend]] = []
    by_name: list[Located[NamedBackend]] = []
    several, detailed = type(value) is list, False
    for index, item in enumerate(value if several else () if value is None else (value,)):
        at = (*path, index) if several else path
        if type(item) is dict:
            backend, detailed = _backend(item, at, faults), True
        else:
            try:
                backend = parse_backend(item)
            except (InvalidTextError, TypeError):
                backend = _read_backend_text(item, at, faults)  # a name, or says what is wrong
        if type(backend) is Backend:
            address = backend.address
            if not address_kind(address) or usable(address, at, faults, FORBIDDEN_BACKEND_KINDS):
                by_address.append(_located((backend, at)))
        elif backend is not INVALID:
            by_name.append(_located((backend, at)))
    return BackendList(by_address, by_name, detailed)


def _backend(value: dict[str, Any], path: Path, faults: Faults) -> Any:
    right = BACKEND.read(value, path, faults)
    if "ports" in value and "port" in value:
        hint = "ports names the only service ports that the backend serves; port is for all of them"
        faults.add(path, "port and ports exclude each other", hint, key="port")
        right.pop("port", None)
    if "zone" in right:
        right["zones"] = tuple(dict.fromkeys(zone for zone, _ in right.pop("zone")))
    if "dns" in value or "srv" in value:
        kind = NameKind.DNS if "dns" in value else NameKind.SRV
        return _named_backend(kind, value, right, path, faults)
    if "address" not in value and "address" not in misspelt(value, BACKEND.keys, faults):
        faults.add(path, "address is missing", "write {address: 10.0.0.5, weight: 2}")
    return Backend(**right) if "address" in right else INVALID


def _named_backend(
    kind: NameKind, value: dict[str, Any], right: dict[str, Any], path: Path, faults: Faults
) -> Any:
    own = ("port", "ports", "weight") if kind is NameKind.SRV else ()
    for key in ("address", *(other for other in NameKind if other is not kind), *own):
        if key in value:
            hint = f"remove {key}: an SRV record has its own" if key in own else "write one of them"
            faults.add(path, f"{kind} and {key} exclude each other", hint, key=str(key))
            return INVALID
    rest = {key: value for key, value in right.items() if key not in ("address", *NameKind)}
    return NamedBackend(kind, right[kind], Backend("", **rest)) if kind in right else INVALID


def _backends(words: str, least: int) -> Kind:
    schema = list_or(
        reference("backend"),
        null=not least,
        minItems=least,
        uniqueItems=True,
        maxItems=limits.BACKENDS,
    )
    return Kind(words, schema, _read_backends)


BACKENDS = _backends("a backend or a list, may be empty", 0)
FALLBACK_BACKENDS = _backends("as for a service, at least one", 1)

# What a service may inherit from `defaults`.

AFFINITY_TIMEOUT = _duration("a duration, 1s to 1d", "3h", 1, MAX_AFFINITY_SECONDS, "from 1s to 1d")
AFFINITY = table(
    "affinity",
    reference("affinity"),
    "Affinity",
    {
        "by": Key(choice({"client-ip": True}), "Required in a mapping."),
        "timeout": Key(AFFINITY_TIMEOUT, "Counts from the client's last new flow. Default: `3h`."),
    },
)
_AFFINITIES = choice({"none": None, "client-ip": Affinity(), "true": Affinity(), "false": None})


def _read_affinity(value: Any, path: Path, faults: Faults) -> Any:
    """A word, a duration, or a mapping, as the affinity or None."""
    if isinstance(value, str | int) and str(value)[:1].isdigit():
        seconds = AFFINITY_TIMEOUT.read(value, path, faults)
        return Affinity() if seconds is INVALID else Affinity(seconds)
    if type(value) is not dict:
        return _AFFINITIES.read(value, path, faults)
    right = AFFINITY.read(value, path, faults)
    if "by" not in value:
        faults.add(path, "by is missing", "write {by: client-ip, timeout: 3h}")
    return Affinity(right["timeout"]) if "timeout" in right else Affinity()


def _affinity_spec(affinity: Affinity) -> object:
    if affinity == Affinity():
        return "client-ip"
    return {"by": "client-ip", "timeout": duration_text(affinity.timeout)}


class Fallback(NamedTuple):
    """What a new flow meets while no backend can serve."""

    refusal: RejectAction = RejectAction.REJECT
    keeps_unhealthy: bool = False
    backends: BackendList = BackendList()


FALLBACK = table(
    "fallback",
    reference("fallback"),
    "Fallback",
    {
        "backends": Key(
            FALLBACK_BACKENDS,
            "Required. Serve while no backend of the service can, on any host. If they cannot either, the "
            "flow is refused.",
        ),
    },
)
_REFUSALS = {word: word for word in (*map(str, RejectAction), "keep")}
_read_refusal = reader_of_words(_REFUSALS)
_ONE_BACKEND = ("address", *NameKind)
"""A mapping with one of these keys is a single backend."""


def _read_fallback(value: Any, path: Path, faults: Faults) -> Any:
    """A `Fallback`: a word, or backends."""
    # What is no backend, by address or name, is a word.
    if not isinstance(value, dict | list) and not any(sign in str(value) for sign in ".:"):
        word = _read_refusal(value, path, faults)
        refusal = RejectAction.REJECT if word in (INVALID, "keep") else RejectAction(word)
        return Fallback(refusal, word == "keep")
    backends, at = value, path
    if type(value) is dict and value.keys().isdisjoint(_ONE_BACKEND):
        for name in value:
            if name not in FALLBACK.keys:
                unknown_key(name, path, faults, FALLBACK.keys)
        if "backends" not in value:
            faults.add(path, "backends is missing", "write reject, drop, keep or {backends: [10.0.0.9]}")
            return Fallback()
        backends, at = value["backends"], (*path, "backends")
    if backends is None or backends == []:
        faults.add(at, "the list is empty", "name a backend, or write reject")
    words = [(item, place) for item, place in items_of(backends, at) if _is_refusal(item)]
    for item, place in words:
        hint = "write reject, drop or keep alone, or only backends"
        faults.wrong_type(item, place, "a backend", hint)
    return Fallback(backends=BackendList() if words else FALLBACK_BACKENDS.read(backends, at, faults))


def _is_refusal(value: Any) -> bool:
    return isinstance(value, str) and value in _REFUSALS


class Announce(NamedTuple):
    """The key `announce` as written."""

    by: AnnounceMethod
    inside: bool | None = None
    """Whether `address` is announced, too; None: only if the service has no other address."""


_METHODS = choice({**{method.value: method for method in AnnounceMethod}, "none": None})
ANNOUNCE = table(
    "announce",
    reference("announce"),
    "Announce",
    {
        "by": Key(choice({method.value: method for method in AnnounceMethod}), "Required in a mapping."),
        "addresses": Key(
            choice({"external": False, "all": True}),
            "`all`: its `address`, too, besides the external and load balancer addresses. Default: as the "
            "short form.",
        ),
    },
)


def _read_announce(value: Any, path: Path, faults: Faults) -> Any:
    """An `Announce`, or None: a method, or a mapping."""
    if type(value) is not dict:
        method = _METHODS.read(value, path, faults)
        return None if method in (INVALID, None) else Announce(method)
    right = ANNOUNCE.read(value, path, faults)
    if "by" not in value:
        faults.add(path, "by is missing", "write {by: routes, addresses: all}")
    return Announce(right["by"], right.get("addresses")) if "by" in right else None


_PER_PORT = "of each port, in each address family by itself"
LIMITS = table(
    "limits",
    reference("flow_limits"),
    "Flow limits",
    {
        "connections": Key(
            number(1, MAX_CONNECTIONS), f"Flows at the same time, {_PER_PORT}. Default: no limit."
        ),
        "connections_per_client": Key(
            number(1, MAX_CONNECTIONS), "The same of one client. Default: no limit."
        ),
        "new_per_second": Key(
            number(1, MAX_NEW_PER_SECOND), f"New flows in a second, {_PER_PORT}. Default: no limit."
        ),
        "burst": Key(
            number(1, MAX_BURST),
            "New flows that may come at once after a pause; each second makes room for `new_per_second` "
            "more. Default: `new_per_second`.",
        ),
        "new_per_client": Key(
            number(1, MAX_NEW_PER_SECOND), "New flows of one client in a second. Default: no limit."
        ),
        "client_burst": Key(number(1, MAX_BURST), "`burst` of one client. Default: `new_per_client`."),
        "client_ipv6_prefix": Key(
            number(MIN_CLIENT_IPV6_PREFIX, 128),
            "Length of the IPv6 prefix whose addresses count as one client. With IPv4 each address does. "
            "Default: 64.",
        ),
    },
)
_BURSTS = {"burst": Limit.NEW_PER_SECOND, "client_burst": Limit.NEW_PER_CLIENT}
"""Each burst, and the rate that it belongs to."""
_LIMITS_EXAMPLE = "write {connections_per_client: 100, new_per_second: 50}, or none"


def _read_limits(value: Any, path: Path, faults: Faults) -> Any:
    """The limits, `none` or a mapping; None: there are none."""
    if type(value) is not dict:
        if value != "none":
            faults.wrong_type(value, path, "a mapping or none", _LIMITS_EXAMPLE)
        return None
    right = LIMITS.read(value, path, faults)
    for burst, rate in _BURSTS.items():
        if burst in value and rate not in value:
            faults.add((*path, burst), f"there is no {rate}", f"write {rate}, too")
    if value.keys() <= {"client_ipv6_prefix"}:
        faults.add(path, "names no limit", _LIMITS_EXAMPLE)
    some = right.keys() - {"client_ipv6_prefix", *_BURSTS}
    return _made(FlowLimits, tuple(right.items())) if some else None


def _limits_spec(limits: FlowLimits) -> object:
    """The keys that differ from their defaults."""
    defaults = {each.name: each.default for each in fields(FlowLimits)}
    return {key: value for key in defaults if (value := getattr(limits, key)) != defaults[key]}


class MasqueradeMode(NamedTuple):
    """The new flows that a mode masquerades, and where to choose it."""

    flows: str
    choose_it_when: str


MASQUERADE_MODES = {
    "auto": MasqueradeMode(
        "as the setting `masquerade` says; if that is `auto` too: `off-cluster` where `cluster_cidrs` names "
        "a network of the family, else `forwarded` (with `compat: kube-proxy`: no flow to `address`)",
        "you have no reason for another",
    ),
    "always": MasqueradeMode(
        "all", "programs of this host, too, use a source address that backends have no route to"
    ),
    "forwarded": MasqueradeMode(
        "those that come from other hosts", "backends would answer clients directly, past this host"
    ),
    "off-cluster": MasqueradeMode(
        "those from outside the setting `cluster_cidrs`; if that names no network of the family, all",
        "replies to clients in those networks come back through this host anyway",
    ),
    "hairpin": MasqueradeMode(
        "no others; also not those to external addresses and node ports",
        "this host is the backends' route to all clients, and backends must see the client",
    ),
}

DEFAULTS: Mapping[str, Key] = {
    "affinity": Key(
        Kind(
            "`none`, `client-ip`, `true`, a duration, or a mapping",
            _either(
                {"enum": ["none", "client-ip", True, False]}, AFFINITY_TIMEOUT.schema, reference("affinity")
            ),
            _read_affinity,
            _affinity_spec,
        ),
        "Whether a client keeps its backend. Default: `none`.",
        field="affinity",
    ),
    "masquerade": Key(
        choice({**{mode.value: mode for mode in Masquerade}, "auto": None}, words="a mode"),
        "Which flows get this host's address as their source. Default: `auto`.",
        field="masquerade",
    ),
    "fallback": Key(
        Kind(
            "`reject`, `drop`, `keep`, a backend, a list of them, or a mapping",
            _either({"enum": list(_REFUSALS)}, FALLBACK_BACKENDS.schema, reference("fallback")),
            _read_fallback,
        ),
        "What a new flow meets while no backend can serve. `keep`: while all are unhealthy, all serve. "
        "Default: `reject`.",
    ),
    "balance": Key(
        choice({balance.value: balance for balance in Balance}),
        "How a new flow's backend is chosen, by weight. `source-hash`: by the client's address, the same "
        "on every host; nftables dataplane only. Made for up to 3,000 backends: their table takes about "
        "one second to make, beside all other work, and 30 MB meanwhile. `least-connections`: at random, "
        "by weights that follow the live flows of each backend through this host, about once a second. "
        "Default: `random`.",
        field="balance",
    ),
    "check": Key(CHECK, "Health check for backends that define none of their own. Default: `none`."),
    "slow_start": Key(
        _duration("a duration, up to 1h", "30s", 0, MAX_SLOW_START_SECONDS, "at most 1h"),
        "How long the share of a backend that has become healthy again takes to grow to its full. Default: "
        "`0s`.",
        field="slow_start",
    ),
    "weight_from": Key(
        choice({"declaration": False, "check": True}),
        "`check`: a backend may say its weight in the header `X-Vipd-Weight` of its answer to an HTTP "
        "check: 0 to 65535, or a percentage of its declared one, 0% to 100%. Digits are those of ASCII; "
        "zeros in front count for nothing. With anything else the declared weight counts, and `vipctl "
        "describe` says what came. Default: `declaration`.",
        field="weight_from_check",
    ),
    "announce": Key(
        Kind(
            "`routes`, `l2`, `none`, or a mapping",
            _either(_METHODS.schema, reference("announce")),
            _read_announce,
        ),
        "How hosts elsewhere learn where its addresses are. `routes`: a routing daemon announces each from "
        "every host that serves it; `l2`: one host at a time answers ARP and neighbour discovery for it. "
        "Meant are external and load balancer addresses; if the service has none, `address`, unless only "
        "`defaults` says it. See `announce_addresses` in the settings. Default: `none`.",
    ),
    "limits": Key(
        Kind(
            "`none`, or a mapping",
            _either({"enum": ["none"]}, reference("flow_limits")),
            _read_limits,
            _limits_spec,
        ),
        "How many flows the service and each client may begin and have. A new flow over a limit is refused "
        "as `fallback` says: `drop` in silence, else at once. Never with the prefix KUBE or `compat: "
        "kube-proxy`. Default: `none`.",
        field="limits",
    ),
}
"""The keys of `defaults`, which a service may have, too."""

# Services.

EXTERNAL_ADDRESS = table(
    "an external address",
    reference("external_address"),
    "An external address",
    {
        "address": Key(ADDRESS, "Required."),
        "allow_from": Key(
            NETWORKS,
            "Sources that may use it. Packets of others are dropped. Default: the service's `allow_from`.",
        ),
    },
    {**_IP_ADDRESS, "type": ["string", "object"]},
)


_read_short_external = reader_of_short_form(parse_address, "an IP address or a mapping")


def _read_external(value: Any, path: Path, faults: Faults) -> Any:
    """An address, or a mapping: the address, with the networks that may use it."""
    if type(value) is dict:
        right = EXTERNAL_ADDRESS.read(value, path, faults)
        if "address" not in value:
            faults.add(path, "address is missing", "write {address: 203.0.113.10, allow_from: any}")
    else:
        right = {"address": _read_short_external(value, path, faults)}
    address = right.get("address", INVALID)
    if address is INVALID or not usable(address, path, faults, FORBIDDEN_VIP_KINDS):
        return INVALID
    return ExternalAddress(address, allow_from=right.get("allow_from"))


def _external_spec(external: ExternalAddress) -> object:
    if external.allow_from is None:
        return external.address
    return {"address": external.address, "allow_from": NETWORKS.written(external.allow_from)}


_EXTERNAL_ADDRESSES = one_or_more(
    "an external address or a list",
    Kind("an external address", reference("external_address"), _read_external, _external_spec),
    "the list is empty",
    "name an address, or remove the key",
    uniqueItems=True,
)
_POLICIES = {policy.value: policy for policy in TrafficPolicy}
_POLICY = choice(_POLICIES)
TRAFFIC_POLICY = table(
    "a mapping",
    reference("traffic_policies"),
    "Traffic policies",
    {
        "internal": Key(_POLICY, "For traffic to `address`. Default: `cluster`."),
        "external": Key(_POLICY, "For traffic to external addresses and node ports. Default: `cluster`."),
    },
)


def _read_traffic_policy(value: Any, path: Path, faults: Faults) -> Any:
    """Policies for traffic from inside and from outside, by name."""
    if value is not None and not isinstance(value, dict | list):
        word = value if value in _POLICIES else "local"
        hint = f"write {{internal: {word}, external: {word}}}, or one of the two"
        return faults.refuse(path, f"must be a mapping, not {shown(value)}", hint)
    return TRAFFIC_POLICY.read(value, path, faults)


SERVICE = table(
    "a service",
    reference("service"),
    "A service",
    {
        "name": Key(
            any_text("text", matching(f"{SERVICE_NAME.pattern}|{_FRONTEND}", SERVICE_NAME_HINT), "a name"),
            "1 to 128 of `A-Z a-z 0-9 . _ / -`, a letter or digit at both ends. Unique on the host. "
            "Default: the first frontend, `10.96.0.10:53/udp`.",
        ),
        "description": Key(
            any_text("text", _TEXT, "text"),
            "What it is for, or whose it is: `vipctl describe` shows it. Default: none.",
            field="description",
        ),
        "address": Key(
            one_or_more(
                "an IPv4 or IPv6 address, or a list",
                VIP,
                "the list is empty",
                "every service needs an address",
                uniqueItems=True,
            ),
            "The virtual IPs. Default: none.",
        ),
        "ports": Key(
            Kind(
                "a port or a list, at least one",
                list_or(reference("port"), minItems=1, uniqueItems=True, maxItems=limits.PORTS),
                _read_ports,
            ),
            "Required. What clients connect to.",
        ),
        "backends": Key(BACKENDS, "Who serves. Default: none."),
        "external_addresses": Key(_EXTERNAL_ADDRESSES, "Addresses for clients from outside. Default: none."),
        "load_balancer_addresses": Key(
            _EXTERNAL_ADDRESSES,
            "The same, called a load balancer's in rules and by Kubernetes. Default: none.",
        ),
        "allow_from": Key(
            NETWORKS,
            "Who may use the service at its addresses and node ports. Packets of others are dropped. "
            "Default: `any`.",
            field="allow_from",
        ),
        "node_port": Key(PORT_NUMBER, "Short for `node_port` of the only port. Default: none."),
        "health_port": Key(
            PORT_NUMBER,
            "TCP port of this host that tells outer load balancers whether to send traffic here. Default: "
            "none.",
            field="health_port",
        ),
        "traffic_policy": Key(
            Kind("a mapping", reference("traffic_policies"), _read_traffic_policy),
            "Whether only backends on this host serve. Default: `cluster` for both.",
        ),
        "traffic_distribution": Key(
            choice({each.value: each for each in TrafficDistribution}),
            "Which ready backends serve first under the policy `cluster`: those for this host's zone, or "
            "those on this host and then those for its zone. Default: `prefer-same-zone`.",
            field="traffic_distribution",
        ),
        "on_remove": Key(
            choice({"keep": False, "reset": True}),
            "Whether established TCP and SCTP flows to a backend that is removed or `down` go on or are "
            "ended; also when the port or the whole service is removed. A TCP client gets a reset with the "
            "next packet that it sends, for ten minutes after a frontend was removed. UDP flows always "
            "end. Default: `keep`.",
            field="ends_flows",
        ),
        "respond_to_ping": Key(
            FLAG,
            "Whether the addresses in `address` answer ICMP echo while a backend serves; this host "
            "answers. Never with the prefix KUBE or `compat: kube-proxy`. Default: `true`.",
            field="answers_ping",
        ),
        "registrations": Key(
            FLAG,
            "Whether backends that register themselves in etcd take part. Default: `true` in etcd, else "
            "`false`.",
            field="registrations",
        ),
        "flow_takeover": Key(
            FLAG,
            "Whether established TCP flows go on through this host when the host that they went through is "
            "lost. Needs `balance: source-hash` and `masquerade: hairpin`. Do not set it where clients "
            "also connect to the backends' ports directly. Default: `false`.",
            field="flow_takeover",
        ),
        **DEFAULTS,
    },
)

DOCUMENT = table(
    "a document",
    {},
    "A document",
    {
        "apiVersion": Key(choice([API_VERSION]), "Required. A document of another version is not read on."),
        "defaults": Key(
            table(
                f"a mapping of {', '.join(f'`{key}`' for key in DEFAULTS)}",
                reference("defaults"),
                "Defaults",
                DEFAULTS,
            ),
            "Defaults for all services in this document.",
        ),
        "services": Key(
            Kind("a list", {"type": ["array", "null"], "items": reference("service")}),
            "May be missing or empty.",
        ),
    },
)

FIELDS: Mapping[str, str] = {name: key.field for name, key in SERVICE.keys.items() if key.field}
"""The fields of the model that are the values of keys."""

GROUPS: Mapping[str, Table] = {
    table.title: table
    for table in (
        DOCUMENT,
        SERVICE,
        PORT,
        BACKEND,
        AFFINITY,
        FALLBACK,
        ANNOUNCE,
        LIMITS,
        EXTERNAL_ADDRESS,
        TRAFFIC_POLICY,
        table("a check", reference("check"), "A check", CHECK_KEYS),
    )
}
"""Every mapping of the language, in the order of the manual."""

PERIOD_TEXT = matching(
    r"[0-9]{1,9}(?:\.[0-9]{1,3})?(?:ms|s|m)?",
    "a duration such as 500ms, 2.5s or 1m",
    ["number", "string"],
)
DEFINITIONS: Mapping[str, Schema] = {
    "ip_address": _IP_ADDRESS,
    "network": matching(
        rf"{IPV4_PATTERN}(?:/(?:3[0-2]|[12]?[0-9]))?|{IPV6_PATTERN}(?:/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9]))?",
        "a network such as 203.0.113.0/24 or fd00::/8, or an address",
    ),
    "period": {**PERIOD_TEXT, "minimum": MIN_CHECK_SECONDS, "maximum": MAX_CHECK_SECONDS},
}
"""Schemas of values that many keys have."""
