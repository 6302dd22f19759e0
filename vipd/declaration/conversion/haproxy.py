"""Reads the proxies in tcp mode of haproxy.cfg. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from vipd.declaration.conversion.directives import (
    AT_RANDOM,
    IMPOSSIBLE,
    Directive,
    Keys,
    Names,
    Report,
    Table,
    impossible,
    keys_of,
    lost,
    max_connections,
    number_in,
    split_address,
    weight,
)
from vipd.declaration.conversion.draft import Conversion, ServiceDraft
from vipd.declaration.dns_names import is_bare_name
from vipd.model.service import Protocol

_WORD = re.compile(r"#.*|(?:\\.|'[^']*+'?|\"(?:\\.|[^\"\\])*+\"?|[^\s\\'\"#]++|\\)++")
_QUOTED = re.compile(r"'(?P<strong>[^']*+)'?|\"(?P<weak>(?:\\.|[^\"\\])*+)\"?|\\(?P<escaped>.)")
_ESCAPE = re.compile(r"\\(.)")
_VARIABLE = re.compile(r"(?<!\\)\$[A-Za-z_{]")
_TWO_WORDS = frozenset({"option", "timeout", "http-check", "tcp-check", "stick", "no", "stats", "rate-limit"})
"""Keywords whose second word says which."""
_PROXIES = ("frontend", "backend", "listen")
_SECTIONS = {
    *(*_PROXIES, "global", "defaults", "peers", "userlist", "resolvers", "mailers", "cache", "program"),
    *("ring", "http-errors", "log-forward", "log-profile", "fcgi-app", "crt-store", "acme", "traces"),
}
_READ = Names(
    "mode, bind, server, server-template, default-server, default_backend, use_backend, balance, source, "
    "disabled, stick-table, stick on, timeout check, tcp-check, tcp-check connect, http-check send, "
    "http-check expect, option allbackups, option httpchk, option tcp-check"
)
_LOST: Table = dict.fromkeys(
    [f"option {name}-check" for name in ("mysql", "pgsql", "redis", "ldap", "spop", "external")]
    + [
        "option smtpchk",
        "option ssl-hello-chk",
        "option transparent",
        "http-check disable-on-404",
        "http-check connect",
    ],
    lost,
)
_IGNORED = Names(
    "log*, error*, capture, unique-id-*, description, id, guid, stats*, email-alert, enabled, bind-process, "
    "backlog, grace, load-server-state-from-file, server-state-file-name, retries, retry-on, hash-*, "
    "cookie, external-check, compression, monitor-uri, redirect, http-*, use-fcgi-app, "
    "max-keep-alive-queue, timeout*, no*, clitcpka-*, srvtcpka-*, option *"
)
"""Lines about the data, its log, and the proxy's own connections."""
_BALANCES = {
    **dict.fromkeys(("roundrobin", "static-rr"), "round-robin"),
    "random": "random",
    "source": "source-hash",
    "leastconn": "least-connections",
}

_VALUED_NAMES = (
    "accept-netscaler-cip, namespace, interface, maxconn, name, id, backlog, mss, nice, process, thread, "
    "shards, tcp-ut, mode, user, group, uid, gid, level, proto, guid, guid-prefix, weight, port, inter, "
    "fall, rise, slowstart, source, verify, ca-file, check-sni, check-proto, check-alpn, socks4, minconn, "
    "maxqueue, observe, track, addr, on-error, on-marked-*, fastinter, downinter, cookie, redir, max-reuse, "
    "pool-*, log-proto, error-limit, resolvers, resolve-*, init-addr, agent-inter, agent-port, agent-addr, "
    "agent-send, sni, alpn, npn, proxy-v2-options, crt, crl-file, ciphers, ciphersuites, verifyhost, "
    "ssl-min-ver, ssl-max-ver, curves"
)
_VALUED = Names(_VALUED_NAMES)
"""Parameters of bind and server lines with a value behind them."""
_KNOWN = Names(
    f"{_VALUED_NAMES}, defer-accept, tfo, transparent, v4v6, v6only, non-stick, stick, allow-0rtt, "
    "ssl-reuse, tls-tickets, force-*"
)
"""Parameters that no flow depends on, unless a table has them."""
_SERVER_READ = Names(
    "check, inter, fall, rise, port, check-ssl, check-sni, verify, ca-file, slowstart, source"
)
_DEFAULT_INTERVAL = 2.0
_HOST_HEADER = re.compile(r"(?i)host:(?:\\? )*([^\s\\]+)")
_SPECIAL = re.compile(r"[.^$*+?\[|(){\\]")
"""Characters that mean something in the body of a check."""


def read_haproxy(conversion: Conversion, text: str) -> None:
    """Every frontend and listen section in tcp mode, with its backend."""
    sections = _sections(conversion.report, text)
    tables = {section.first: section for section in sections}
    backends = {section.first: section for section in sections if section.name == "backend"}
    used: set[str] = set()
    for section in sections:
        if section.name == "backend":
            continue
        used |= {line.first for line in section.block if "backend" in line.name}
        mode = section.last("mode")
        if section.last("disabled"):
            section.note("is disabled, and was left out")
        elif mode and mode.first not in ("tcp", ""):
            section.note(f"is in mode {mode.first}, and stays with HAProxy: vipd balances flows alone")
        elif draft := _read_proxy(conversion, section, backends, tables):
            conversion.add(draft)
    for name, section in backends.items():
        if name not in used:
            section.note("no frontend leads to it")


def _sections(report: Report, text: str) -> list[Directive]:
    """The proxies of a file. The block of each has the lines of its defaults before its own."""
    proxies: list[Directive] = []
    latest: list[Directive] = []
    defaults: dict[str, list[Directive]] = {}
    block: list[Directive] = []
    for line in _lines(report, text):
        words = line.arguments
        if line.name not in _SECTIONS:
            block.append(line)
            continue
        name = "" if line.first == "from" else line.first
        base = words[words.index("from") + 1] if "from" in words[:-1] else ""
        section, block = line.part(line.name, name), []
        if line.name == "defaults":
            block += defaults.get(base, ()) if base else ()
            latest = defaults[name] = block
        elif line.name in _PROXIES:
            block += defaults.get(base, latest) if base else latest
            if len(words) > 1 and words[1] != "from":
                block.append(line.part("bind", *words[1:]))
            section.block = block
            proxies.append(section)
        elif line.name != "global":
            line.note()
    for section in proxies:
        section.block = _in_force(section.block)
    return proxies


def _in_force(lines: Sequence[Directive]) -> list[Directive]:
    """The lines without options that a later `no option` turns off."""
    kept: list[Directive] = []
    off: set[str] = set()
    for line in reversed(lines):
        if line.name == "no option":
            off.add(f"option {line.first}")
        if line.name not in off:
            kept.append(line)
    return kept[::-1]


def _lines(report: Report, text: str) -> Iterator[Directive]:
    """The lines with words. Those that depend on the host are reported, and left out."""
    conditions = 0
    for number, row in enumerate(text.split("\n"), 1):
        written = [word[0] for word in _WORD.finditer(row) if word[0][0] != "#"]
        if not written:
            continue
        words = [_QUOTED.sub(_unquoted, word) for word in written]
        size = 2 if words[0] in _TWO_WORDS else 1
        line = Directive(report, number, [" ".join(words[:size]), *words[size:]])
        if words[0].startswith("."):
            conditions += {".if": 1, ".endif": -1}.get(words[0], 0)
            if words[0] == ".if":
                line.not_read()
        elif conditions <= 0 and any(map(_has_variable, written)):
            line.lost("has a variable of the environment, and was not read", "write its value")
        elif conditions <= 0:
            yield line


def _unquoted(piece: re.Match[str]) -> str:
    if piece["weak"] is not None:
        return _ESCAPE.sub(r"\1", piece["weak"])
    return piece["escaped"] or piece["strong"] or ""


def _has_variable(written: str) -> bool:
    """Whether a word needs a variable of the environment."""
    return any(_VARIABLE.search(piece["weak"] or "") for piece in _QUOTED.finditer(written))


def _parameters(line: Directive, words: Sequence[str]) -> Iterator[Directive]:
    """The parameters of a bind or server line."""
    start = 0
    while start < len(words):
        size = 2 if words[start] in _VALUED else 1
        # A source address may be followed by what it is used for.
        if words[start] == "source" and words[start + 2 : start + 3] in (["usesrc"], ["interface"]):
            size = 4
        yield line.part(*words[start : start + size])
        start += size


def _read_proxy(
    conversion: Conversion,
    section: Directive,
    backends: Mapping[str, Directive],
    tables: Mapping[str, Directive],
) -> ServiceDraft | None:
    """A frontend and its backend, or a listen section; None without a backend, which is reported."""
    draft = ServiceDraft(conversion, section, section.first)
    for line in section.all("bind"):
        _read_bind(draft, line)
    servers = section.last("server") or section.last("server-template")
    backend = section if servers else _backend_of(section, backends)
    _report(section)
    if backend is None:
        section.lost("is not converted: it leads to no backend of this file")
        return None
    if backend is not section:
        _report(backend)
        if backend.last("disabled"):
            backend.lost("is disabled: its servers would serve here")
    _read_servers(draft, backend)
    draft.keys["balance"] = _balance(backend.last("balance"))
    _read_stickiness(draft, backend, tables)
    if source := backend.last("source"):
        draft.keys |= _source(source)
    return draft


def _report(section: Directive) -> None:
    """Report every line that is not read."""
    keys_of(section.block, _LOST, _IGNORED, _READ)
    for name, number in (("use_backend", 1), ("tcp-check connect", 0)):
        for line in section.all(name):
            if len(line.arguments) > number:
                line.lost()


def _backend_of(section: Directive, backends: Mapping[str, Directive]) -> Directive | None:
    """The backend that all flows of a frontend go to."""
    plain = [rule for rule in section.all("use_backend") if len(rule.words) == 2]
    line = plain[0] if plain else section.last("default_backend")
    if line is None or not line.arguments:
        return None
    if line.first not in backends:
        line.lost("there is no such backend in this file", "put both into one file")
    return backends.get(line.first)


def _read_bind(draft: ServiceDraft, line: Directive) -> None:
    parameters = list(_parameters(line, line.words[2:]))
    if IMPOSSIBLE in keys_of(parameters, _BIND, (), _KNOWN):
        return
    both = any(parameter.name == "v4v6" for parameter in parameters)
    for text in line.first.split(","):
        at = line.part("bind", text)
        host, ports = _split_address(text)
        if "@" in host or "/" in text or not ports:
            at.lost("is no address and port of TCP")
        else:
            any_address = "::" if text.startswith(("ipv6@", "tcp6@")) else "*"
            draft.listen(at, Protocol.TCP, host or any_address, ports, both=both)


_BIND: Table = {
    **dict.fromkeys(("ssl", "accept-proxy", "accept-netscaler-cip", "namespace"), impossible),
    **dict.fromkeys(("interface", "maxconn"), lost),
}


def _split_address(text: str) -> tuple[str, str]:
    """Address and port, also with a family before them. Text of other kinds of addresses stays whole."""
    kind, at, rest = text.rpartition("@")
    return split_address(rest if at and kind in ("ipv4", "ipv6", "tcp", "tcp4", "tcp6") else text)


def _balance(line: Directive | None) -> str:
    if line is None or not line.arguments:
        return "round-robin"
    name = line.first.partition("(")[0]
    if line.arguments == ["hash", "src"]:
        name = "source"
    if name not in _BALANCES:
        line.lost(AT_RANDOM)
    elif name == "random":
        line.note("vipd draws one backend by weight, and does not compare two")
    return _BALANCES.get(name, "random")


def _read_stickiness(draft: ServiceDraft, section: Directive, tables: Mapping[str, Directive]) -> None:
    rules = section.all("stick on")
    own = section.last("stick-table")
    if own and not rules:
        own.lost()
    for line in rules:
        words, table = line.arguments, own
        if words[1:2] == ["table"] and len(words) == 3 and words[2] in tables:
            words, table = words[:1], tables[words[2]].last("stick-table")
        if words != ["src"] or table is None:
            line.lost()
        elif "affinity" not in draft.keys:
            _read_table(draft, table)


def _read_table(draft: ServiceDraft, table: Directive) -> None:
    values = dict(pairwise(table.arguments))
    seconds = table.part("expire", values["expire"]).time("ms") if "expire" in values else None
    draft.keys |= table.affinity(seconds)
    for name in ("peers", "store"):
        if name in values:
            table.part("stick-table", name, values[name]).lost()


def _source(line: Directive) -> Keys:
    """`source ADDR usesrc clientip` keeps the client's address; any other source has no counterpart."""
    if line.words[2:4] in (["usesrc", "clientip"], ["usesrc", "client"]):
        return {"masquerade": "hairpin"}
    line.lost()
    return {}


def _read_servers(draft: ServiceDraft, section: Directive) -> None:
    """Add the servers of a backend or listen section to a draft."""
    check = _check_of_all(section)
    for line in section.block:
        if line.name == "server-template" and len(line.words) > 3:
            server = line.part("server-template", line.first, *line.words[3:])
            _read_server(draft, section, server, check, number=line.words[2])
        elif line.name in ("server", "server-template"):
            _read_server(draft, section, line, check)
    backups = [server for server in draft.servers if server.keys.get("backup")]
    if len(backups) > 1 and section.last("option allbackups") is None:
        backups[1].at.lost("all backups serve at once, not the first one alone", "or leave out this one")


def _read_server(
    draft: ServiceDraft, section: Directive, line: Directive, check: Keys, number: str = ""
) -> None:
    """Add the server of a line. `number`: of servers that a name stands for."""
    at = line.part(*line.words[:3])
    parameters = _server_parameters(section, line)
    keys = keys_of(parameters.values(), _SERVER, _KNOWN, _SERVER_READ)
    host, port_text = _split_address(line.words[2] if len(line.words) > 2 else "")
    port = at.port(port_text) if port_text.strip("0") else None
    if IMPOSSIBLE in keys:
        at.lost("is not converted")
    if IMPOSSIBLE in keys or (port is None and port_text.strip("0")):
        draft.lost_servers = True
        return
    if "check" in parameters:
        keys["check"] = _check(section, at, check, parameters)
    kind = ("srv" if host.startswith("_") else "dns") if is_bare_name(host) else "address"
    if not draft.add(at, {**keys, kind: host, "port": port}, resolved="resolvers" in parameters):
        return
    if "check" in parameters and (start := parameters.get("slowstart")):
        draft.slow_starts[start.time("ms") or 0] = start
    if "source" in parameters:
        draft.keys |= _source(parameters["source"])
    if kind == "address" and number:
        at.lost("is one address, and was written once")


def _server_parameters(section: Directive, server: Directive) -> dict[str, Directive]:
    """The parameters of a server, and of each default-server before its own."""
    parameters: dict[str, Directive] = {}
    for line in (*section.all("default-server"), server):
        for parameter in _parameters(line, line.words[3:] if line is server else line.arguments):
            undone = "disabled" if parameter.name == "enabled" else parameter.name.removeprefix("no-")
            if undone == parameter.name:
                parameters[undone] = parameter
            else:
                parameters.pop(undone, None)
    return parameters


_SERVER: Table = {
    "weight": weight,
    "maxconn": max_connections,
    "disabled": lambda _: {"state": "down"},
    "backup": lambda _: {"backup": True},
    **dict.fromkeys(("ssl", "socks4", "namespace"), impossible),
    **dict.fromkeys([f"send-proxy{end}" for end in ("", "-v2", "-v2-ssl", "-v2-ssl-cn")], impossible),
    **dict.fromkeys(("minconn", "maxqueue", "observe", "track", "addr", "fastinter", "downinter"), lost),
    **dict.fromkeys(("on-marked-down", "on-marked-up", "resolve-net", "resolve-opts"), lost),
}


def _check(section: Directive, at: Directive, check: Keys, parameters: Mapping[str, Directive]) -> Keys:
    """The check of a server, from that of its section."""
    inter = parameters.get("inter")
    interval = inter.time("ms") if inter else None
    interval = _DEFAULT_INTERVAL if interval is None else interval
    keys: Keys = {"rise": 2, "fall": 3}
    for name in ("rise", "fall", "port"):
        keys |= parameters[name].key(name) if name in parameters else {}
    timeout = _timeout(section, interval, check["type"] == "http")
    server = at.part(*at.words[:2])
    keys |= server.timing(interval, timeout, keys["rise"], keys["fall"])
    return {**check, **_tls(server, check, parameters), **keys}


def _timeout(section: Directive, interval: float, answer: bool) -> float:
    """The longest wait of a check: without `timeout check` the interval, else what connecting may take, and
    that time for an `answer`."""
    lines = {name: section.last(f"timeout {name}") for name in ("check", "connect")}
    times = {name: line.time("ms") if line else None for name, line in lines.items()}
    if times["check"] is None:
        return interval
    connect = interval if times["connect"] is None else min(times["connect"], interval)
    return min(connect + times["check"], interval) if answer else connect


def _tls(server: Directive, check: Keys, parameters: Mapping[str, Directive]) -> Keys:
    """The keys of a check by HTTPS."""
    if "check-ssl" not in parameters:
        return {}
    if check["type"] != "http":
        parameters["check-ssl"].lost("without option httpchk a check only connects")
        return {}
    values = {name: parameter.first for name, parameter in parameters.items()}
    keys: Keys = {"type": "https"}
    if values.get("check-sni"):
        keys["server_name"] = values["check-sni"]
    authority = values.get("ca-file", "")
    if values.get("verify") == "none":
        keys["verify"] = False
    elif authority.startswith("/"):
        keys["ca"] = authority
    elif authority:
        parameters["ca-file"].lost("is no absolute path: the host's own certificates were written")
    return keys


def _check_of_all(section: Directive) -> Keys:
    """The check of all checked servers of a section."""
    request = section.last("option httpchk")
    if request is None:
        return {"type": "tcp"}
    words = request.arguments
    check: Keys = {"type": "http", "method": "OPTIONS"}
    check |= zip(("path",) if len(words) == 1 else ("method", "path"), words, strict=False)
    if host := _HOST_HEADER.search(" ".join(words[2:])):
        check["host"] = host[1]
    for line in section.block:
        if line.name == "http-check send":
            check |= _sent(line)
        elif line.name == "http-check expect":
            check |= _expected(line)
    return check


def _expected(line: Directive) -> Keys:
    """The key for this status or text; none after a report if vipd has none."""
    words = line.arguments
    while words[:1] and words[0] in ("min-recv", "comment", "ok-status", "error-status", "tout-status"):
        words = words[2:]
    if words[:1] == ["status"] and len(words) == 2:
        return line.key("status", [*map(number_in, words[1].split(","))])
    if words[:1] == ["string"] and len(words) == 2:
        return {"body": _SPECIAL.sub(r"\\\g<0>", words[1])}
    line.lost()
    return {}


def _sent(line: Directive) -> Keys:
    """The keys of a request; others that it has are reported."""
    keys: Keys = {}
    words = line.arguments
    while words:
        size = 3 if words[0] == "hdr" else 2
        (name, *values), words = words[:size], words[size:]
        if name in ("meth", "uri") and values:
            keys["method" if name == "meth" else "path"] = values[0]
        elif name == "hdr" and len(values) == 2 and values[0].lower() == "host":
            keys["host"] = values[1]
        elif name != "ver":
            line.part("http-check send", name).lost()
    return keys
