"""Reads the stream block of nginx.conf. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from vipd.declaration.conversion.directives import (
    AT_RANDOM,
    IMPOSSIBLE,
    Directive,
    Keys,
    Names,
    Table,
    Token,
    impossible,
    keys_of,
    lost,
    max_connections,
    split_address,
    tree_of,
    weight,
)
from vipd.declaration.conversion.draft import UNCHECKED, Conversion, ServiceDraft
from vipd.declaration.dns_names import is_bare_name
from vipd.model.service import Protocol

_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<comment>#[^\n]*)|(?P<sign>[;{}])|'(?P<single>(?:\\.|[^'\\])*)'?"
    r"|\"(?P<double>(?:\\.|[^\"\\])*)\"?|(?P<word>(?:\$\{\w*\}|\\.|[^\s;{}\\])+)|(?P<rest>.)",
    re.DOTALL,
)
_IGNORED = Names(
    "access_log, error_log, log_format, open_log_file_cache, status_zone, proxy_timeout, "
    "proxy_session_drop, proxy_connect_timeout, proxy_next_upstream*, proxy_buffer_size, "
    "proxy_socket_keepalive, proxy_half_close, proxy_responses, proxy_requests, proxy_ssl_*, tcp_nodelay, "
    "preread_buffer_size, preread_timeout, variables_hash_max_size, resolver, resolver_timeout, zone, "
    "state, ssl_*"
)
"""Directives about the data, its log, and the proxy's own connections; also most about TLS."""
_DEFAULT_SECONDS = 5.0
"""Default of the interval and the timeout of nginx's health_check."""


def read_nginx(conversion: Conversion, text: str) -> None:
    """Every server of the stream block; also of a file that is included there."""
    top = tree_of(conversion.report, _tokens(text))
    streams = [directive for directive in top if directive.name == "stream" and directive.block]
    outside = [directive for directive in top if directive not in streams]
    # A server of http has its proxy_pass within a location.
    if not streams and any(server.last("proxy_pass") for server in outside if server.name == "server"):
        streams, outside = [Directive(conversion.report, 0, ["stream"], outside)], []
    for stream in streams:
        _read_stream(conversion, stream)
    for directive in outside:
        if directive.name == "include":
            directive.not_read()
        elif directive.block:
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


def _read_stream(conversion: Conversion, stream: Directive) -> None:
    upstreams = {upstream.value: upstream for upstream in stream.all("upstream")}
    common = stream.settings
    used: set[str] = set()
    keys_of(stream.block, _LOST, _IGNORED, {*_SERVER, *_READ, "upstream", "server"})
    for server in stream.all("server"):
        used |= {target.value for target in server.all("proxy_pass")}
        if draft := _read_server(conversion, common, server, upstreams):
            conversion.add(draft)
    for name, upstream in upstreams.items():
        if name not in used:
            upstream.note("no server of the stream block leads to it")


def _read_server(
    conversion: Conversion,
    common: Mapping[str, Directive],
    server: Directive,
    upstreams: Mapping[str, Directive],
) -> ServiceDraft | None:
    """A server block; None after a report. `common`: what the stream block says of all servers."""
    listen = server.last("listen")
    draft = ServiceDraft(conversion, server.part("server", *(listen.words[1:2] if listen else ())))
    for directive in server.all("listen"):
        _read_listen(draft, directive)
    keys_of(server.block, _LOST, _IGNORED, {*_SERVER, *_READ})
    settings = {name: common[name] for name in (*_SERVER, *_READ) if name in common} | server.settings
    draft.keys = keys_of((settings[name] for name in _SERVER if name in settings), _SERVER, ())
    target = settings.get("proxy_pass")
    if draft.keys.pop(IMPOSSIBLE, False) or target is None or not target.first or "$" in target.first:
        draft.at.lost("is not converted: it leads to no servers that vipd could serve")
        return None
    check = _check(settings)
    if target.first in upstreams:
        draft.name = target.first
        _read_upstream(draft, upstreams[target.first], check)
    else:
        _read_backend(draft, target, check)
    return draft


def _proxy_bind(bind: Directive) -> Keys:
    if bind.arguments == ["$remote_addr", "transparent"]:
        return {"masquerade": "hairpin"}
    if bind.arguments != ["off"]:
        bind.lost()
    return {}


def _impossible_if_on(directive: Directive) -> Keys:
    """Where it is on, servers do not understand what clients send."""
    return impossible(directive) if directive.arguments == ["on"] else {}


_SERVER: Table = {
    "proxy_bind": _proxy_bind,
    "proxy_ssl": _impossible_if_on,
    "proxy_protocol": _impossible_if_on,
}
_LOST: Table = {"ssl_preread": lost}
_READ = {"listen", "proxy_pass", "health_check", "health_check_timeout"}


def _parameters(directive: Directive, words: Sequence[str]) -> dict[str, Directive]:
    """The words `name` and `name=value` of a directive."""
    parted = (word.partition("=") for word in words)
    return {name: directive.part(name, *([value] if equals else [])) for name, equals, value in parted}


def _read_listen(draft: ServiceDraft, listen: Directive) -> None:
    if keys_of(_parameters(listen, listen.words[2:]).values(), _LISTEN, (), _LISTEN_IGNORED):
        return
    if listen.first.startswith("unix:"):
        impossible(listen)
        return
    address, ports = split_address(listen.first)
    if not ports:
        address, ports = "*", address
    protocol = Protocol.UDP if "udp" in listen.words else Protocol.TCP
    draft.listen(listen, protocol, address, ports, both="ipv6only=off" in listen.words)


_LISTEN: Table = {"ssl": impossible, "proxy_protocol": impossible}
_LISTEN_IGNORED = Names(
    "udp, ipv6only, reuseport, bind, deferred, multipath, backlog, rcvbuf, sndbuf, so_keepalive, fastopen, "
    "setfib, accept_filter"
)


def _read_upstream(draft: ServiceDraft, upstream: Directive, check: Keys | str) -> None:
    draft.keys["balance"] = "round-robin"
    draft.keys |= keys_of(upstream.block, _UPSTREAM, _IGNORED, {"server"})
    servers = upstream.all("server")
    for server in servers:
        _read_backend(draft, server, check)
    quiet = any("max_fails=0" in server.words for server in servers)
    if check == UNCHECKED and not quiet and len([server for server in draft.servers if server.family]) > 1:
        reason = "nginx leaves out a server after a failed connection, vipd by a check alone: add check: tcp"
        upstream.note(reason)


def _balance(directive: Directive) -> Keys:
    if directive.name == "hash" and directive.first in ("$remote_addr", "$binary_remote_addr"):
        return {"balance": "source-hash"}
    if directive.name == "least_conn":
        return {"balance": "least-connections"}
    if directive.name != "random" or directive.arguments:
        directive.lost(AT_RANDOM)
    return {"balance": "random"}


_UPSTREAM: Table = dict.fromkeys(("hash", "random", "least_conn", "least_time"), _balance)


def _read_backend(draft: ServiceDraft, server: Directive, check: Keys | str) -> None:
    """Add a server of an upstream, or that of proxy_pass."""
    at = server.part(*server.words[:2])
    parameters = _parameters(server, server.words[2:])
    if "max_fails=0" in server.words:
        for name in ("max_fails", "fail_timeout"):
            parameters.pop(name, None)
    keys = {**keys_of(parameters.values(), _BACKEND, (), _BACKEND_READ), "check": check}
    host, port_text = split_address(server.first)
    if service := parameters.get("service"):
        prefix = service.first if "." in service.first else f"_{service.first}._tcp"
        kind, keys["srv"] = "srv", f"{prefix}.{server.first}"
    else:
        kind = "dns" if is_bare_name(host) else "address"
        keys |= {kind: host, "port": _port(at, port_text)}
        if keys["port"] is None:
            draft.lost_servers = True
            return
    if not draft.add(at, keys, resolved="resolve" in parameters):
        return
    if start := parameters.get("slow_start"):
        draft.slow_starts[start.time() or 0] = start
    if kind == "srv" and "backup" in keys:
        at.lost("records of every priority are backups, not those of the lowest alone")


def _port(at: Directive, text: str) -> int | None:
    if text and not at.first.startswith("unix:"):
        return at.port(text)
    at.lost("is not converted: a backend needs an address and a port")
    return None


_BACKEND: Table = {
    "weight": weight,
    "max_conns": max_connections,
    "down": lambda _: {"state": "down"},
    "backup": lambda _: {"backup": True},
}
_BACKEND_READ = {"resolve", "service", "slow_start"}


def _check(settings: Mapping[str, Directive]) -> Keys | str:
    """The check that `health_check` is: a connection."""
    directive = settings.get("health_check")
    if directive is None:
        return UNCHECKED
    if "udp" in directive.arguments:
        directive.lost("the backends are not checked: it asks by UDP")
        return UNCHECKED
    parameters = _parameters(directive, directive.arguments)
    keys = {"rise": 1, "fall": 1, **keys_of(parameters.values(), _HEALTH_CHECK, (), {"interval"})}
    times = [parameters.get("interval"), settings.get("health_check_timeout")]
    interval, timeout = (time.time() if time else _DEFAULT_SECONDS for time in times)
    return {
        "type": "tcp",
        **keys,
        **directive.timing(interval or 0, timeout or 0, keys["rise"], keys["fall"]),
    }


_HEALTH_CHECK: Table = {
    "passes": lambda parameter: parameter.key("rise"),
    "fails": lambda parameter: parameter.key("fall"),
    "port": lambda parameter: parameter.key("port"),
}
