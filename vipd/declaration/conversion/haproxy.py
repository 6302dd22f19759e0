"""Reads the proxies in tcp mode of haproxy.cfg. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from vipd.declaration.conversion.draft import ANY_ADDRESS, Conversion, Listener, ServiceDraft
from vipd.declaration.conversion.haproxy_servers import read_servers, read_source, split_address
from vipd.declaration.conversion.haproxy_syntax import (
    Line,
    Section,
    read_parameters,
    read_sections,
    read_time,
)
from vipd.model.service import Balance, Family, Protocol

_READ = {
    "mode",
    "bind",
    "server",
    "server-template",
    "default-server",
    "default_backend",
    "balance",
    "source",
    "stick-table",
    "stick on",
    "timeout check",
    "tcp-check",
    "http-check",
    "disabled",
}
"""Keywords that are read, or reported, elsewhere."""
_READ_OPTIONS = {
    *("allbackups", "httpchk", "tcp-check", "ssl-hello-chk", "mysql-check", "pgsql-check", "redis-check"),
    *("smtpchk", "ldap-check", "spop-check", "external-check"),
}
_LOG = "vipd logs no flows; see vipctl flows and vipctl stats"
_IDLE = "the kernel removes an established TCP flow without traffic after five days"
_RETRY = "the client itself connects, and tries again"
_OWN = "the connection is between client and server"
_HTTP = "has no effect in mode tcp"
_NO_EFFECT = {
    **dict.fromkeys(("log", "log-format", "log-format-sd", "log-tag", "error-log-format", "capture"), _LOG),
    **dict.fromkeys(("option tcplog", "option dontlognull", "option dontlog-normal", "option logasap"), _LOG),
    **dict.fromkeys(("option log-separate-errors", "option log-health-checks", "option socket-stats"), _LOG),
    **dict.fromkeys(("option contstats", "unique-id-format", "stats", "email-alert"), _LOG),
    **dict.fromkeys(("description", "id", "guid", "enabled"), "services have a name alone"),
    **dict.fromkeys(("bind-process", "backlog", "load-server-state-from-file", "grace"), "vipd is no proxy"),
    **dict.fromkeys(("server-state-file-name", "option prefer-last-server", "option splice-auto"), _OWN),
    **dict.fromkeys(("option splice-request", "option splice-response", "option nolinger"), _OWN),
    **dict.fromkeys(("option tcpka", "option clitcpka", "option srvtcpka", "option abortonclose"), _OWN),
    **dict.fromkeys(("option tcp-smart-accept", "option tcp-smart-connect"), _OWN),
    **dict.fromkeys(("option independent-streams", "option idle-close-on-response"), _OWN),
    **dict.fromkeys(
        ("timeout connect", "timeout queue", "retries", "retry-on", "option redispatch", "option persist"),
        _RETRY,
    ),
    **dict.fromkeys(("hash-type", "hash-balance-factor"), "balance: source-hash is consistent"),
    **dict.fromkeys(("external-check", "hash-preserve-affinity"), "it belongs to an option that is left out"),
    **dict.fromkeys(("cookie", "compression", "errorfile", "errorfiles", "monitor-uri", "redirect"), _HTTP),
    **dict.fromkeys(("unique-id-header", "http-reuse", "http-error", "max-keep-alive-queue"), _HTTP),
    **dict.fromkeys(("http-request", "http-response", "http-after-response", "use-fcgi-app"), _HTTP),
    **dict.fromkeys(("option httplog", "option httpslog", "option forwardfor", "option originalto"), _HTTP),
    **dict.fromkeys(("option httpclose", "option checkcache", "option forwarded"), _HTTP),
}
_NO_EFFECT_PREFIXES = {
    "timeout ": _IDLE,
    "option http-": _HTTP,
    "option h1-": _HTTP,
    "option accept-": _HTTP,
    "option disable-h2": _HTTP,
    "errorloc": _HTTP,
    "clitcpka-": _OWN,
    "srvtcpka-": _OWN,
}
_NO_QUEUE = "clients over a limit do not wait: vipd would refuse them"
_CONDITIONS = "vipd chooses by address, port and protocol alone"
_LOST = {
    "acl": _CONDITIONS,
    "use_backend": _CONDITIONS,
    "use-server": _CONDITIONS,
    "tcp-request": _CONDITIONS,
    "tcp-response": _CONDITIONS,
    "filter": _CONDITIONS,
    "force-persist": _CONDITIONS,
    "ignore-persist": _CONDITIONS,
    "persist": _CONDITIONS,
    "maxconn": _NO_QUEUE,
    "fullconn": "a limit does not depend on the load",
    "rate-limit sessions": _NO_QUEUE,
    "dispatch": "a service has its servers one by one",
    "option transparent": "vipd needs the addresses of servers",
    "stick match": "affinity is that of the client's address alone",
    "stick store-request": "affinity is that of the client's address alone",
    "stick store-response": "affinity is that of the client's address alone",
}
_HINTS = {
    "tcp-request": "allow_from says who may use the service",
    "maxconn": "or write limits: {connections: N} in the service",
    "rate-limit": "or write limits: {new_per_second: N} in the service",
    "dispatch": "write it as a server",
}

_BIND_IMPOSSIBLE = {
    "ssl": (0, "vipd does not decrypt"),
    "accept-proxy": (0, "vipd does not read the PROXY protocol"),
    "accept-netscaler-cip": (1, "vipd does not read the data"),
    "namespace": (1, "vipd serves its own network namespace"),
}
_BIND_LOST = {
    "interface": (1, "a service is reached through every interface"),
    "maxconn": (1, _NO_QUEUE),
}
_BIND_FLAGS = ("defer-accept", "tfo", "transparent", "v4v6", "v6only")
_BIND_VALUES = (
    *("name", "id", "backlog", "mss", "nice", "process", "thread", "shards", "tcp-ut", "mode", "user"),
    *("group", "uid", "gid", "level", "proto", "guid-prefix"),
)
_BIND = {
    **{name: arity for name, (arity, _) in (_BIND_IMPOSSIBLE | _BIND_LOST).items()},
    **dict.fromkeys(_BIND_FLAGS, 0),
    **dict.fromkeys(_BIND_VALUES, 1),
}
"""The parameters of bind: how many values each has."""

_BALANCES = {
    "roundrobin": Balance.ROUND_ROBIN,
    "static-rr": Balance.ROUND_ROBIN,
    "random": Balance.RANDOM,
    "source": Balance.SOURCE_HASH,
    "leastconn": Balance.LEAST_CONNECTIONS,
}
_OTHER_BALANCES = {
    "first": "all servers serve at random by weight, not the first one until it is full",
}


def read_haproxy(conversion: Conversion, text: str) -> None:
    """Every frontend and listen section in tcp mode, with its backend."""
    sections = read_sections(conversion, text)
    backends = {section.name: section for section in sections if section.kind == "backend"}
    tables = {section.name: section for section in sections}
    used: set[str] = set()
    for section in sections:
        if section.kind == "backend":
            continue
        used |= {word for line in section.lines if "backend" in line.words[0] for word in line.arguments[:1]}
        if section.last("disabled"):
            conversion.note(section.line, str(section), "is disabled, and was left out")
        elif section.mode != "tcp":
            why = f"is in mode {section.mode}, and stays with HAProxy: vipd balances flows alone"
            conversion.note(section.line, str(section), why)
        else:
            _read_proxy(conversion, section, backends, tables)
    for section in backends.values():
        if section.name not in used:
            conversion.note(section.line, str(section), "no frontend leads to it")


def _read_proxy(
    conversion: Conversion,
    section: Section,
    backends: Mapping[str, Section],
    tables: Mapping[str, Section],
) -> None:
    """Make services of a frontend and its backend, or of a listen section."""
    draft = ServiceDraft(section.line, str(section), section.name)
    for line in section.all("bind"):
        _read_bind(conversion, draft, line)
    own = section.all("server") or section.all("server-template")
    backend = section if own else _backend_of(conversion, section, backends)
    for each in (section,) if backend is section or backend is None else (section, backend):
        _report(conversion, each)
    if backend is None:
        conversion.lost(section.line, draft.what, "is not converted: it leads to no backend of this file")
        return
    if backend is not section and backend.last("disabled"):
        conversion.lost(backend.line, str(backend), "is disabled: its servers would serve here")
    read_servers(conversion, backend, draft)
    _read_balance(conversion, draft, backend)
    _read_stickiness(conversion, draft, backend, tables)
    source = backend.last("source")
    if source is not None:
        read_source(conversion, draft, source)
    conversion.add(draft)


def _backend_of(conversion: Conversion, section: Section, backends: Mapping[str, Section]) -> Section | None:
    """The backend that all flows of a frontend go to."""
    plain = [line for line in section.all("use_backend") if len(line.words) == 2]
    line = plain[0] if plain else section.last("default_backend")
    if line is None or not line.arguments:
        return None
    found = backends.get(line.arguments[0])
    if found is None:
        why = "there is no such backend in this file"
        conversion.lost(line.number, str(line), why, "put both into one file")
    return found


def _report(conversion: Conversion, section: Section) -> None:
    """Report every line that is not read."""
    for line in section.lines:
        key = line.key
        option = key.removeprefix("option ")
        if key in _READ or line.words[0] in _READ or (option != key and option in _READ_OPTIONS):
            continue
        if key == "use_backend" and len(line.words) == 2:
            continue
        why = _NO_EFFECT.get(key) or _NO_EFFECT.get(line.words[0])
        why = why or next((text for start, text in _NO_EFFECT_PREFIXES.items() if key.startswith(start)), "")
        if line.words[0] == "no":
            why = "it is off here, too"
        if why:
            conversion.note(line.number, str(line), why)
        else:
            lost = _LOST.get(key) or _LOST.get(line.words[0]) or "is not known, and was left out"
            conversion.lost(line.number, str(line), lost, _HINTS.get(line.words[0], ""))


def _read_bind(conversion: Conversion, draft: ServiceDraft, line: Line) -> None:
    words = line.arguments
    parameters = dict(read_parameters(words[1:], _BIND))
    for name, value in parameters.items():
        text = f"bind {words[0]} {name} {value}".rstrip()
        if name in _BIND_IMPOSSIBLE:
            conversion.lost(line.number, text, f"is not converted: {_BIND_IMPOSSIBLE[name][1]}")
            return
        if name in _BIND_LOST:
            conversion.lost(line.number, text, _BIND_LOST[name][1])
        elif name not in _BIND:
            conversion.lost(line.number, text, "is not known, and was left out")
    for text in words[0].split(",") if words else ():
        _read_listener(conversion, draft, line.number, text, both="v4v6" in parameters)


def _read_listener(conversion: Conversion, draft: ServiceDraft, line: int, text: str, *, both: bool) -> None:
    """Add one address of a bind line, with its port or range of ports. `both`: of each family, if it is any
    address of IPv6."""
    what = f"bind {text}"
    address, ports = split_address(text)
    if "@" in address or "/" in text or not ports:
        hint = "" if ports else "a service needs an address and a port"
        conversion.lost(line, what, "is no address and port of TCP", hint)
        return
    family = Family.IPV6 if text.startswith(("ipv6@", "tcp6@")) else Family.IPV4
    address = ANY_ADDRESS[family] if address in ("", "*") else address
    conversion.listen(draft, Listener(address, 0, Protocol.TCP, line, what), ports, both=both)


def _read_balance(conversion: Conversion, draft: ServiceDraft, section: Section) -> None:
    line = section.last("balance")
    if line is None or not line.arguments:
        draft.balance = Balance.ROUND_ROBIN
        return
    name = line.arguments[0].partition("(")[0]
    if name == "hash" and line.arguments[1:] == ["src"]:
        name = "source"
    draft.balance = _BALANCES.get(name, Balance.RANDOM)
    if name not in _BALANCES:
        why = _OTHER_BALANCES.get(name, "vipd does not read the data, and chooses at random by weight")
        conversion.lost(line.number, str(line), why, "or write balance: round-robin")
    elif name == "random":
        why = "vipd draws one backend by weight, and does not compare two"
        conversion.note(line.number, str(line), why)


def _read_stickiness(
    conversion: Conversion, draft: ServiceDraft, section: Section, tables: Mapping[str, Section]
) -> None:
    rules = section.all("stick on")
    for line in rules:
        words = line.arguments
        owner = section
        if words[1:2] == ["table"] and len(words) == 3 and words[2] in tables:
            owner, words = tables[words[2]], words[:1]
        table = owner.last("stick-table")
        if words != ["src"] or table is None:
            why = "affinity is that of the client's address alone"
            conversion.lost(line.number, str(line), why, "affinity: client-ip is the counterpart of src")
        elif draft.affinity is None:
            _read_table(conversion, draft, table)
    table = section.last("stick-table")
    if table is not None and not rules:
        conversion.lost(table.number, str(table), "vipd does not count by client", "see vipctl flows")


def _read_table(conversion: Conversion, draft: ServiceDraft, table: Line) -> None:
    words = table.arguments
    values = dict(pairwise(words))
    expire = values.get("expire")
    seconds = None if expire is None else read_time(conversion, table.number, "expire", expire)
    draft.affinity = conversion.affinity(table.number, str(table), seconds)
    if "peers" in values:
        why = "each host stores the affinity of its own flows"
        hint = "or write balance: source-hash"
        conversion.lost(table.number, f"stick-table peers {values['peers']}", why, hint)
    if "store" in values:
        why = "vipd does not count by client"
        conversion.lost(table.number, f"stick-table store {values['store']}", why, "see vipctl flows")
