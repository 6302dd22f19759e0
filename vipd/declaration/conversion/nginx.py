"""Reads the stream block of nginx.conf. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from vipd.declaration.conversion.directives import (
    AT_RANDOM,
    NOT_CONVERTED,
    Directive,
    Token,
    named,
    split_address,
    tree_of,
)
from vipd.declaration.conversion.draft import (
    ANY_ADDRESS,
    UNCHECKED,
    Conversion,
    Keys,
    Server,
    ServiceDraft,
    server_keys,
)
from vipd.declaration.dns_names import is_bare_name
from vipd.model.check import MAX_COUNT
from vipd.model.service import Family, Protocol

_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<comment>#[^\n]*)|(?P<sign>[;{}])|'(?P<single>(?:\\.|[^'\\])*)'?"
    r"|\"(?P<double>(?:\\.|[^\"\\])*)\"?|(?P<word>(?:\$\{\w*\}|\\.|[^\s;{}\\])+)|(?P<rest>.)",
    re.DOTALL,
)
_DEFAULT_INTERVAL = "5s"
"""Default of nginx's health_check, as of its timeout."""
_WITHOUT_EFFECT = {
    *("access_log", "error_log", "log_format", "open_log_file_cache", "status_zone", "proxy_timeout"),
    *("proxy_session_drop", "proxy_connect_timeout", "proxy_next_upstream", "proxy_next_upstream_timeout"),
    *("proxy_next_upstream_tries", "proxy_buffer_size", "proxy_socket_keepalive", "tcp_nodelay"),
    *("proxy_half_close", "preread_buffer_size", "preread_timeout", "variables_hash_max_size"),
    *("proxy_responses", "proxy_requests", "resolver", "resolver_timeout", "zone", "state"),
}
"""Directives about the data, its log, and the proxy's own connections; also most about TLS."""
_HINTS = {
    "limit_conn": "write limits: {connections_per_client: N} in the service for $binary_remote_addr",
    "allow": "allow_from says who may use the service",
    "deny": "allow_from says who may use the service",
}
_IMPOSSIBLE = ("proxy_ssl", "proxy_protocol")
"""Where these are on, servers do not understand what clients send."""
_READ = {"listen", "proxy_pass", "proxy_bind", "health_check", "health_check_timeout", *_IMPOSSIBLE}
_LISTEN_PARAMETERS = {
    *("udp", "reuseport", "bind", "deferred", "multipath", "ipv6only", "backlog", "rcvbuf", "sndbuf"),
    *("so_keepalive", "fastopen", "setfib", "accept_filter"),
}
_NUMBERS: dict[str, tuple[str, Callable[[Directive, str], int | None]]] = {
    "weight": ("weight", Directive.weight),
    "max_conns": ("max_connections", Directive.max_connections),
}
_FLAGS: dict[str, Keys] = {"down": {"state": "down"}, "backup": {"backup": True}}
"""Parameters of servers, and the keys of backends that they are."""


def read_nginx(conversion: Conversion, text: str) -> None:
    """Every server of the stream block; also of a file that is included there."""
    top = tree_of(conversion.report, _tokens(text))
    streams = [directive for directive in top if directive.name == "stream" and directive.block is not None]
    outside = [directive for directive in top if directive not in streams]
    for stream in streams:
        _read_stream(conversion, stream.block or [])
    # A server of http has its proxy_pass within a location.
    if not streams and any(
        list(named(directive.block or (), "proxy_pass")) for directive in named(outside, "server")
    ):
        _read_stream(conversion, outside)
        return
    for directive in outside:
        if directive.name == "include":
            _report(directive)
        elif directive.block is not None:
            directive.note("stays with nginx: vipd balances flows alone")


def _tokens(text: str) -> Iterator[Token]:
    line = 1
    for token in _TOKEN.finditer(text):
        kind = token.lastgroup or ""
        if kind == "sign":
            yield line, token[0], ""
        elif kind not in ("space", "comment"):
            yield line, "", re.sub(r"\\(.)", r"\1", token[kind], flags=re.DOTALL)
        line += token[0].count("\n")


def _read_stream(conversion: Conversion, block: list[Directive]) -> None:
    upstreams = {upstream.value: upstream for upstream in named(block, "upstream")}
    common = [directive for directive in block if directive.name not in ("upstream", "server")]
    used: set[str] = set()
    for directive in common:
        if directive.name not in _READ:
            _report(directive)
    for server in named(block, "server"):
        used |= {target.value for target in named(server.block or (), "proxy_pass")}
        if draft := _read_server(server, common, upstreams):
            conversion.add(draft)
    for name, upstream in upstreams.items():
        if name not in used:
            upstream.note("no server of the stream block leads to it")


def _report(directive: Directive) -> None:
    """Say what becomes of a directive that is not read."""
    name = directive.name
    if name == "include":
        directive.lost("is not read", "put its lines into this file")
    else:
        of_tls = name.startswith(("proxy_ssl_", "ssl_")) and name != "ssl_preread"
        directive.leave_out(of_tls or name in _WITHOUT_EFFECT, _HINTS.get(name, ""))


def _read_server(
    server: Directive, common: list[Directive], upstreams: Mapping[str, Directive]
) -> ServiceDraft | None:
    """A server block; None after a report. `common`: what the stream block says of all servers."""
    block = server.block or []
    settings = {directive.name: directive for directive in (*common, *block)}
    target = settings.get("proxy_pass")
    draft = ServiceDraft(
        server.part("server", *(settings["listen"].words[1:2] if "listen" in settings else ()))
    )
    for directive in block:
        if directive.name == "listen":
            _read_listen(draft, directive)
        elif directive.name not in _READ:
            _report(directive)
    on = [settings[name] for name in _IMPOSSIBLE if name in settings and settings[name].arguments == ["on"]]
    for directive in on:
        directive.leave_out()
    if on or target is None or not target.arguments or "$" in target.arguments[0]:
        draft.at.lost("is not converted: it leads to no servers that vipd could serve")
        return None
    check = _read_check(settings)
    name = target.arguments[0]
    if name in upstreams:
        draft.name = name
        _read_upstream(draft, upstreams[name], check)
    else:
        _read_backend(draft, target, check)
    if "proxy_bind" in settings:
        _read_bind(draft, settings["proxy_bind"])
    return draft


def _read_listen(draft: ServiceDraft, listen: Directive) -> None:
    text, *parameters = listen.arguments or [""]
    for parameter in parameters:
        name = parameter.partition("=")[0]
        if name in ("ssl", "proxy_protocol"):
            listen.lost(NOT_CONVERTED)
            return
        if name not in _LISTEN_PARAMETERS:
            listen.part(str(listen), parameter).leave_out()
    if text.startswith("unix:"):
        listen.lost("is not converted: vipd serves no UNIX socket")
        return
    address, ports = split_address(text)
    if not ports:
        address, ports = "*", address
    address = ANY_ADDRESS[Family.IPV4] if address == "*" else address
    protocol = Protocol.UDP if "udp" in parameters else Protocol.TCP
    draft.listen(listen, protocol, address, ports, both="ipv6only=off" in parameters)


def _read_upstream(draft: ServiceDraft, upstream: Directive, check: Keys | str) -> None:
    draft.keys["balance"] = "round-robin"
    quiet = False
    for directive in upstream.block or ():
        if directive.name == "server":
            quiet = quiet or "max_fails=0" in directive.arguments
            _read_backend(draft, directive, check)
        elif directive.name in ("hash", "random", "least_conn", "least_time"):
            draft.keys["balance"] = _balance(directive)
        else:
            _report(directive)
    addresses = [server for server in draft.servers if server.address]
    if check == UNCHECKED and len(addresses) > 1 and not quiet:
        reason = "nginx leaves out a server after a failed connection, vipd by a check alone: add check: tcp"
        upstream.note(reason)


def _balance(directive: Directive) -> str:
    arguments = directive.arguments
    if directive.name == "hash" and arguments[:1] in (["$remote_addr"], ["$binary_remote_addr"]):
        return "source-hash"
    if directive.name == "least_conn":
        return "least-connections"
    if directive.name != "random" or arguments:
        directive.lost(AT_RANDOM, "or write balance: round-robin or source-hash")
    return "random"


def _read_backend(draft: ServiceDraft, server: Directive, check: Keys | str) -> None:
    """Add a server of an upstream, or that of proxy_pass."""
    text, *parameters = server.arguments or [""]
    at = server.part(server.name, text)
    service = next((word[8:] for word in parameters if word.startswith("service=")), "")
    host, port = (text, "") if service else split_address(text)
    address = number = None
    if service and is_bare_name(text):
        address = ""
    elif service:
        at.lost("is not converted: service fits a name without a port")
    elif text.startswith("unix:") or not port:
        at.lost("is not converted: a backend needs an address and a port")
    elif number := at.port(port):
        address = at.server_host(host)
    if address is None:
        draft.lost_servers = True
        return
    keys = server_keys(address=address, port=number, check=check)
    for parameter in parameters:
        _read_parameter(draft, server, parameter, keys)
    if address:
        draft.servers.append(Server(at, keys))
    else:
        _read_name(draft, at, host, service, keys, resolve="resolve" in parameters)


def _read_parameter(draft: ServiceDraft, server: Directive, text: str, keys: Keys) -> None:
    """Add a parameter of a server line to the keys of the backend."""
    name, equals, value = text.partition("=")
    at = server.part(text)
    if name in _NUMBERS and equals:
        key, read = _NUMBERS[name]
        keys[key] = read(at, value)
    elif name == "slow_start":
        draft.slow_starts[at.part(name).time(value, "s") or 0] = at
    elif name in ("max_fails", "fail_timeout"):
        if "max_fails=0" not in server.arguments:
            at.leave_out(hint="add check: tcp, with interval and fall")
    elif text in _FLAGS:
        keys.update(_FLAGS[text])
    elif name not in ("resolve", "service"):
        at.leave_out()


def _read_name(
    draft: ServiceDraft, at: Directive, host: str, service: str, keys: Keys, *, resolve: bool
) -> None:
    """Add a server by name: with a `service` by that of its SRV records."""
    prefix = service if "." in service else f"_{service}._tcp"
    kind, name = ("srv", f"{prefix}.{host}") if service else ("dns", host)
    if not draft.add_named(at, kind, name, keys, by_host=not resolve):
        return
    if not resolve:
        at.note("nginx looks the name up when it starts, and vipd follows DNS")
    if service and "backup" in keys:
        at.lost("records of every priority are backups, not those of the lowest alone")


def _read_bind(draft: ServiceDraft, bind: Directive) -> None:
    if bind.arguments == ["$remote_addr", "transparent"]:
        draft.keys["masquerade"] = "hairpin"
    elif bind.arguments != ["off"]:
        bind.leave_out(hint="or write masquerade: hairpin for the client's")


def _read_check(settings: Mapping[str, Directive]) -> Keys | str:
    """The check that `health_check` is: a connection."""
    directive = settings.get("health_check")
    if directive is None:
        return UNCHECKED
    if "udp" in directive.arguments:
        reason = "the backends are not checked: it asks by UDP"
        directive.lost(reason, "write check: {type: udp, send: TEXT}")
        return UNCHECKED
    values = dict(word.partition("=")[::2] for word in directive.arguments)
    for name in sorted(values.keys() - {"interval", "passes", "fails", "port"}):
        directive.part("health_check", name).lost("has no counterpart: the check only connects")

    def count(name: str) -> int:
        return directive.part(name).integer(values.get(name, "1"), 1, MAX_COUNT) or 1

    timeout = settings.get("health_check_timeout") or directive.part("", _DEFAULT_INTERVAL)
    interval = directive.part("interval").time(values.get("interval", _DEFAULT_INTERVAL), "s")
    seconds = timeout.part("health_check_timeout").time(timeout.value, "s")
    timing = directive.timing(interval or 0, seconds or 0, count("passes"), count("fails"))
    port = directive.part("port").port(values["port"]) if "port" in values else None
    return {"type": "tcp", "port": port, **timing}
