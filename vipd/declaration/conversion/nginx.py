"""Reads the stream block of nginx.conf. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from vipd.declaration.conversion.directives import Directive, Sign, Token, named, tree_of
from vipd.declaration.conversion.draft import ANY_ADDRESS, Conversion, Listener, ServiceDraft, with_state
from vipd.declaration.dns_names import is_bare_name
from vipd.declaration.fields import Located
from vipd.model.check import MAX_COUNT, UNCHECKED, Check, TcpProbe, Timing
from vipd.model.service import Backend, Balance, Family, Masquerade, NamedBackend, NameKind, Protocol

_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<comment>#[^\n]*)|(?P<sign>[;{}])|'(?P<single>(?:\\.|[^'\\])*)'?"
    r"|\"(?P<double>(?:\\.|[^\"\\])*)\"?|(?P<word>(?:\$\{\w*\}|\\.|[^\s;{}\\])+)|(?P<rest>.)",
    re.DOTALL,
)
_SIGNS = {";": Sign.END, "{": Sign.OPEN, "}": Sign.CLOSE}
_TIME_PART = re.compile(r"([0-9]{1,9})(ms|s|m|h|d|w|M|y)?")
_TIME = re.compile(rf"(?:{_TIME_PART.pattern})+")
_UNITS = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "M": 2592000, "y": 31536000}
_DEFAULT_INTERVAL = "5s"
"""Default of nginx's health_check, as of its timeout."""

_OWN = "the connection is between client and server"
_IDLE = "the kernel removes an established TCP flow without traffic after five days"
_LOG = "vipd logs no flows; see vipctl flows and vipctl stats"
_RETRY = "the client itself connects, and tries again"
_OWN_NAMES = "vipd looks names up by its own settings: dns_servers, dns_min_ttl and dns_max_ttl"
_NO_EFFECT = {
    **dict.fromkeys(("access_log", "error_log", "log_format", "open_log_file_cache", "status_zone"), _LOG),
    **dict.fromkeys(("proxy_timeout", "proxy_session_drop"), _IDLE),
    **dict.fromkeys(("proxy_connect_timeout", "proxy_next_upstream", "proxy_next_upstream_timeout"), _RETRY),
    "proxy_next_upstream_tries": _RETRY,
    **dict.fromkeys(("proxy_buffer_size", "proxy_socket_keepalive", "tcp_nodelay", "proxy_half_close"), _OWN),
    **dict.fromkeys(("preread_buffer_size", "preread_timeout", "variables_hash_max_size"), _OWN),
    "proxy_responses": "a UDP flow expires, or ends with its backend",
    "proxy_requests": "a UDP flow expires, or ends with its backend",
    **dict.fromkeys(("resolver", "resolver_timeout"), _OWN_NAMES),
    **dict.fromkeys(("zone", "state"), "vipd keeps the state of backends itself"),
}
_CONDITIONS = "vipd chooses by address, port and protocol alone"
_TLS = "vipd neither encrypts nor decrypts"
_RATE = "vipd limits no bytes a second"
_ZONE = "a zone and its key have no counterpart"
_LOST = {
    **dict.fromkeys(("proxy_download_rate", "proxy_upload_rate"), _RATE),
    **dict.fromkeys(("limit_conn", "limit_conn_zone"), _ZONE),
    **dict.fromkeys(("limit_conn_log_level", "limit_conn_status", "limit_conn_dry_run"), _ZONE),
    **dict.fromkeys(("allow", "deny", "geo", "map", "split_clients", "server_name"), _CONDITIONS),
    "ssl_preread": "vipd does not read the data",
    "match": "a check of TCP only connects",
    "set_real_ip_from": "vipd sees the address of packets",
}
_HINTS = {
    "limit_conn": "write limits: {connections_per_client: N} in the service for $binary_remote_addr",
    "allow": "allow_from says who may use the service",
    "deny": "allow_from says who may use the service",
}
_IMPOSSIBLE = {
    "proxy_ssl": "vipd does not encrypt: the servers would get plain text",
    "proxy_protocol": "vipd adds nothing to the data: the servers would wait for the PROXY protocol",
}
"""Without these, where they are on, the servers do not work."""
_READ = {"listen", "proxy_pass", "proxy_bind", "health_check", "health_check_timeout", *_IMPOSSIBLE}
_LISTEN_PARAMETERS = {
    *("udp", "reuseport", "bind", "deferred", "multipath", "ipv6only", "backlog", "rcvbuf", "sndbuf"),
    *("so_keepalive", "fastopen", "setfib", "accept_filter"),
}
_SERVER_PARAMETERS = {
    *("weight", "slow_start", "down", "backup", "max_fails", "fail_timeout", "max_conns", "resolve"),
    "service",
}
_LISTEN_IMPOSSIBLE = {"ssl": _TLS, "proxy_protocol": "vipd does not read the PROXY protocol"}


def read_nginx(conversion: Conversion, text: str) -> None:
    """Every server of the stream block; also of a file that is included there."""
    top = tree_of(conversion.reading(), _tokens(text))
    streams = [each for each in top if each.name == "stream" and each.block is not None]
    outside = [each for each in top if each not in streams]
    for each in streams:
        _read_stream(conversion, each.block or [])
    if not streams and any(map(_is_stream_part, outside)):
        _read_stream(conversion, outside)
        return
    for each in outside:
        if each.name == "include":
            _report(conversion, each)
        elif each.block is not None:
            conversion.note(each.line, str(each), "stays with nginx: vipd balances flows alone")


def _is_stream_part(directive: Directive) -> bool:
    """Whether it is a server of a stream block: one of http has its proxy_pass within a location."""
    return directive.name == "server" and any(named(directive.block or (), "proxy_pass"))


def _tokens(text: str) -> Iterator[Token]:
    line = 1
    for found in _TOKEN.finditer(text):
        kind = found.lastgroup or ""
        if kind == "sign":
            yield line, _SIGNS[found["sign"]]
        elif kind not in ("space", "comment"):
            yield line, re.sub(r"\\(.)", r"\1", found[kind], flags=re.DOTALL)
        line += found[0].count("\n")


def _read_stream(conversion: Conversion, block: list[Directive]) -> None:
    upstreams = {" ".join(each.arguments): each for each in named(block, "upstream")}
    common = [each for each in block if each.name not in ("upstream", "server")]
    used: set[str] = set()
    for each in common:
        if each.name not in _READ:
            _report(conversion, each)
    for each in named(block, "server"):
        _read_server(conversion, each, common, upstreams)
        used |= {" ".join(line.arguments) for line in named(each.block or (), "proxy_pass")}
    for name, each in upstreams.items():
        if name not in used:
            conversion.note(each.line, str(each), "no server of the stream block leads to it")


def _report(conversion: Conversion, directive: Directive) -> None:
    """Say what becomes of a directive that is not read."""
    name = directive.name
    if name in _NO_EFFECT:
        conversion.note(directive.line, str(directive), _NO_EFFECT[name])
    elif name == "include":
        conversion.lost(directive.line, str(directive), "is not read", "put its lines into this file")
    elif name.startswith(("proxy_ssl_", "ssl_")) and name not in _LOST:
        conversion.note(directive.line, str(directive), _TLS)
    else:
        why = _LOST.get(name) or "has no counterpart"
        conversion.lost(directive.line, str(directive), why, _HINTS.get(name, ""))


def _read_server(
    conversion: Conversion,
    directive: Directive,
    common: list[Directive],
    upstreams: Mapping[str, Directive],
) -> None:
    """Make services of a server block. `common`: what the stream block says of all servers."""
    block = directive.block or []
    found = {each.name: each for each in (*common, *block)}
    target = found.get("proxy_pass")
    what = " ".join(["server", *(found["listen"].arguments[:1] if "listen" in found else ())])
    draft = ServiceDraft(directive.line, what)
    for each in block:
        if each.name == "listen":
            _read_listen(conversion, draft, each)
        elif each.name not in _READ:
            _report(conversion, each)
    on = [name for name in _IMPOSSIBLE if name in found and found[name].arguments == ["on"]]
    for name in on:
        conversion.lost(found[name].line, str(found[name]), _IMPOSSIBLE[name])
    if on or target is None or not target.arguments or "$" in target.arguments[0]:
        why = "is not converted: it leads to no servers that vipd could serve"
        conversion.lost(directive.line, what, why)
        return
    check = _read_check(conversion, found)
    name = target.arguments[0]
    if name in upstreams:
        draft.name = name
        _read_upstream(conversion, draft, upstreams[name], check)
    else:
        _read_backend(conversion, draft, target, name, check)
    if "proxy_bind" in found:
        _read_bind(conversion, draft, found["proxy_bind"])
    conversion.add(draft)


def _read_listen(conversion: Conversion, draft: ServiceDraft, directive: Directive) -> None:
    line, what = directive.line, str(directive)
    text, *parameters = directive.arguments or [""]
    for each in parameters:
        name = each.partition("=")[0]
        if name in _LISTEN_IMPOSSIBLE:
            conversion.lost(line, what, f"is not converted: {_LISTEN_IMPOSSIBLE[name]}")
            return
        if name not in _LISTEN_PARAMETERS:
            conversion.lost(line, f"{what} {each}", "is not known, and was left out")
    if text.startswith("unix:"):
        conversion.lost(line, what, "is not converted: vipd serves no UNIX socket")
        return
    address, ports = _split(text)
    if not ports:
        address, ports = "*", address
    address = ANY_ADDRESS[Family.IPV4] if address == "*" else address
    protocol = Protocol.UDP if "udp" in parameters else Protocol.TCP
    listener = Listener(address, 0, protocol, line, what)
    conversion.listen(draft, listener, ports, both="ipv6only=off" in parameters)


def _split(text: str) -> tuple[str, str]:
    """Address and port of `ADDR:PORT` or `[ADDR]:PORT`; without a port, the text and nothing."""
    address, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        return text.strip("[]"), ""
    return address.strip("[]"), port


def _read_upstream(conversion: Conversion, draft: ServiceDraft, upstream: Directive, check: Check) -> None:
    draft.balance = Balance.ROUND_ROBIN
    slow: dict[float, int] = {}
    quiet = False
    for each in upstream.block or ():
        if each.name == "server":
            quiet = "max_fails=0" in each.arguments or quiet
            _read_backend(conversion, draft, each, (each.arguments or [""])[0], check, slow)
        elif each.name in ("hash", "random", "least_conn", "least_time"):
            draft.balance = _balance(conversion, each)
        else:
            _report(conversion, each)
    conversion.set_slow_start(draft, slow)
    if check.probe is None and len(draft.backends) > 1 and not quiet:
        why = "nginx leaves out a server after a failed connection, vipd by a check alone: add check: tcp"
        conversion.note(upstream.line, str(upstream), why)


def _balance(conversion: Conversion, directive: Directive) -> Balance:
    arguments = directive.arguments
    if directive.name == "hash" and arguments[:1] in (["$remote_addr"], ["$binary_remote_addr"]):
        return Balance.SOURCE_HASH
    if directive.name == "least_conn":
        return Balance.LEAST_CONNECTIONS
    if directive.name == "random" and not arguments:
        return Balance.RANDOM
    why = "vipd does not compare two backends for each flow, and chooses at random by weight"
    if directive.name == "hash":
        why = "vipd hashes the client's address alone, and chooses at random by weight"
    conversion.lost(directive.line, str(directive), why, "or write balance: round-robin or source-hash")
    return Balance.RANDOM


def _read_backend(
    conversion: Conversion,
    draft: ServiceDraft,
    directive: Directive,
    text: str,
    check: Check,
    slow: dict[float, int] | None = None,
) -> None:
    """Add a server of an upstream, or that of proxy_pass."""
    what = f"{directive.name} {text}"
    host, port = _split(text)
    backend = None
    if _srv_service(directive):
        if is_bare_name(text):
            backend = conversion.server(directive.line, what, text, None)
        else:
            conversion.lost(directive.line, what, "is not converted: service fits a name without a port")
    elif text.startswith("unix:") or not port:
        conversion.lost(directive.line, what, "is not converted: a backend needs an address and a port")
    elif (number := conversion.port(directive.line, what, port)) is not None:
        backend = conversion.server(directive.line, what, host, number)
    if backend is None:
        draft.lost_backends = True
        return
    backend = _with_parameters(conversion, directive, backend, {} if slow is None else slow)
    backend = replace(backend, check=check)
    if backend.address:
        draft.backends.append(Located(backend, directive.line, what))
    elif named := _read_name(conversion, directive, what, host, backend):
        draft.names.append(Located(named, directive.line, what))
    else:
        draft.lost_backends = True


def _srv_service(directive: Directive) -> str:
    """The value of the parameter `service`, or empty."""
    found = (each.partition("=") for each in directive.arguments[1:])
    return next((value for name, _, value in found if name == "service"), "")


def _read_name(
    conversion: Conversion, directive: Directive, what: str, host: str, template: Backend
) -> NamedBackend | None:
    """The name of a server: with the parameter `service` that of its SRV records."""
    line, service = directive.line, _srv_service(directive)
    if "resolve" not in directive.arguments:
        if conversion.unqualified(line, what, host):
            return None
        conversion.note(line, what, "nginx looks the name up when it starts, and vipd follows DNS")
    if not service:
        return conversion.named_backend(line, what, NameKind.DNS, host, template)
    if template.backup:
        conversion.lost(line, what, "records of every priority are backups, not those of the lowest alone")
    prefix = service if "." in service else f"_{service}._tcp"
    return conversion.named_backend(line, what, NameKind.SRV, f"{prefix}.{host}", template)


def _with_parameters(
    conversion: Conversion, directive: Directive, backend: Backend, slow: dict[float, int]
) -> Backend:
    """The backend with the parameters of its server line. `slow` takes the time of a slow start."""
    line, parameters = directive.line, directive.arguments[1:]
    values = {name: value for name, equals, value in (each.partition("=") for each in parameters) if equals}
    if "weight" in values:
        weight = conversion.weight(line, f"weight={values['weight']}", values["weight"])
        backend = replace(backend, weight=weight)
    if "max_conns" in values:
        what = f"max_conns={values['max_conns']}"
        backend = conversion.max_connections(line, what, backend, values["max_conns"])
    if "slow_start" in values:
        slow[_seconds(conversion, line, "slow_start", values["slow_start"]) or 0] = line
    for each in parameters:
        name = each.partition("=")[0]
        if name in ("max_fails", "fail_timeout") and values.get("max_fails") != "0":
            why = "a check judges, not the traffic of clients"
            conversion.lost(line, each, why, "add check: tcp, with interval and fall")
        elif name not in _SERVER_PARAMETERS:
            conversion.lost(line, each, "is not known, and was left out")
    return with_state(backend, down="down" in parameters, backup="backup" in parameters)


def _read_bind(conversion: Conversion, draft: ServiceDraft, directive: Directive) -> None:
    if directive.arguments == ["$remote_addr", "transparent"]:
        draft.masquerade = Masquerade.HAIRPIN
    elif directive.arguments != ["off"]:
        why = "the address that backends see is the one that this host's routes choose"
        conversion.lost(directive.line, str(directive), why, "or write masquerade: hairpin for the client's")


def _read_check(conversion: Conversion, found: Mapping[str, Directive]) -> Check:
    """The check that `health_check` is: a connection."""
    directive = found.get("health_check")
    if directive is None:
        return UNCHECKED
    line = directive.line
    if "udp" in directive.arguments:
        why = "the backends are not checked: it asks by UDP"
        conversion.lost(line, str(directive), why, "write check: {type: udp, send: TEXT}")
        return UNCHECKED
    values = dict(each.partition("=")[::2] for each in directive.arguments)
    for name in sorted(values.keys() - {"interval", "passes", "fails", "port"}):
        conversion.lost(line, f"health_check {name}", "has no counterpart: the check only connects")

    def count(name: str) -> int:
        return conversion.integer(line, name, values.get(name, "1"), 1, MAX_COUNT) or 1

    timeout = found.get("health_check_timeout")
    text = " ".join(timeout.arguments) if timeout else _DEFAULT_INTERVAL
    timing = Timing(
        _seconds(conversion, line, "interval", values.get("interval", _DEFAULT_INTERVAL)) or 0,
        _seconds(conversion, timeout.line if timeout else line, "health_check_timeout", text) or 0,
        rise=count("passes"),
        fall=count("fails"),
    )
    probe = TcpProbe(conversion.port(line, "port", values["port"]) if "port" in values else None)
    return Check(probe, conversion.timing(line, str(directive), timing))


def _seconds(conversion: Conversion, line: int, what: str, text: str) -> float | None:
    """Seconds of a time such as `1m30s`; None after a report."""
    if not _TIME.fullmatch(text):
        conversion.lost(line, what, f"{text} is no time")
        return None
    return sum(int(number) * _UNITS[unit or "s"] for number, unit in _TIME_PART.findall(text))
