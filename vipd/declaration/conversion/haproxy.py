"""Reads the proxies in tcp mode of haproxy.cfg. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from vipd.declaration.conversion.directives import AT_RANDOM, NOT_CONVERTED, Directive, Report, split_address
from vipd.declaration.conversion.draft import ANY_ADDRESS, Conversion, Keys, Server, ServiceDraft, server_keys
from vipd.model.check import MAX_COUNT
from vipd.model.service import Family, Protocol

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

_OTHER_CHECKS = (
    *("ssl-hello-chk", "mysql-check", "pgsql-check", "redis-check", "smtpchk", "ldap-check", "spop-check"),
    "external-check",
)
_READ = {
    *("mode", "bind", "server", "server-template", "default-server", "default_backend", "balance", "source"),
    *("stick-table", "stick on", "timeout check", "tcp-check", "http-check", "disabled"),
    *(f"option {name}" for name in ("allbackups", "httpchk", "tcp-check", *_OTHER_CHECKS)),
}
"""Keywords that are read, or reported, elsewhere."""
_WITHOUT_EFFECT = {
    *("log", "log-format", "log-format-sd", "log-tag", "error-log-format", "capture", "unique-id-format"),
    *("stats", "email-alert", "description", "id", "guid", "enabled", "bind-process", "backlog", "grace"),
    *("load-server-state-from-file", "server-state-file-name", "retries", "retry-on", "hash-type", "no"),
    *("hash-balance-factor", "hash-preserve-affinity", "external-check", "cookie", "compression"),
    *("errorfile", "errorfiles", "monitor-uri", "redirect", "unique-id-header", "http-reuse", "http-error"),
    *("max-keep-alive-queue", "http-request", "http-response", "http-after-response", "use-fcgi-app"),
    "timeout",
}
"""Keywords about the data, its log, and the proxy's own connections."""
_OPTIONS_WITHOUT_EFFECT = {
    *("tcplog", "dontlognull", "dontlog-normal", "logasap", "contstats", "log-separate-errors"),
    *("log-health-checks", "socket-stats", "prefer-last-server", "splice-auto", "splice-request"),
    *("splice-response", "nolinger", "tcpka", "clitcpka", "srvtcpka", "abortonclose", "redispatch"),
    *("tcp-smart-accept", "tcp-smart-connect", "independent-streams", "idle-close-on-response", "persist"),
    *("httplog", "httpslog", "forwardfor", "originalto", "httpclose", "checkcache", "forwarded"),
}
_STARTS_WITHOUT_EFFECT = (
    *("option http-", "option h1-", "option accept-", "option disable-h2", "errorloc", "clitcpka-"),
    "srvtcpka-",
)
_HINTS = {
    "tcp-request": "allow_from says who may use the service",
    "maxconn": "or write limits: {connections: N} in the service",
    "rate-limit": "or write limits: {new_per_second: N} in the service",
    "dispatch": "write it as a server",
}
_BALANCES = {
    "roundrobin": "round-robin",
    "static-rr": "round-robin",
    "random": "random",
    "source": "source-hash",
    "leastconn": "least-connections",
}


def _parameter_table(**names: str) -> dict[str, tuple[str, int]]:
    """For each parameter what becomes of it, and how many words it has. Each name lists parameters; those
    with a value have `=` behind them."""
    listed = [(effect, text) for effect, texts in names.items() for text in texts.split()]
    return {text.rstrip("="): (effect, 2 if text.endswith("=") else 1) for effect, text in listed}


_BIND = _parameter_table(
    read="v4v6",
    impossible="ssl accept-proxy accept-netscaler-cip= namespace=",
    lost="interface= maxconn=",
    without_effect="defer-accept tfo transparent v6only name= id= backlog= mss= nice= process= thread= "
    "shards= tcp-ut= mode= user= group= uid= gid= level= proto= guid-prefix=",
)
_SERVER = _parameter_table(
    read="check backup disabled check-ssl weight= port= inter= fall= rise= slowstart= source= maxconn= "
    "verify= ca-file= check-sni=",
    impossible="ssl send-proxy send-proxy-v2 send-proxy-v2-ssl send-proxy-v2-ssl-cn socks4= namespace=",
    lost="minconn= maxqueue= observe= track= addr= on-marked-down= on-marked-up= fastinter= downinter= "
    "resolve-net=",
    without_effect="cookie= redir= proto= check-proto= check-alpn= max-reuse= pool-max-conn= pool-low-conn= "
    "pool-purge-delay= log-proto= id= guid= non-stick stick error-limit= on-error= tfo no-tfo tcp-ut= "
    "resolvers= resolve-prefer= resolve-opts= init-addr= agent-inter= agent-port= agent-addr= agent-send= "
    "proxy-v2-options= allow-0rtt ssl-reuse no-ssl-reuse tls-tickets no-tls-tickets sni= alpn= npn= crt= "
    "crl-file= ciphers= ciphersuites= verifyhost= ssl-min-ver= ssl-max-ver= curves= no-sslv3 no-tlsv10 "
    "no-tlsv11 no-tlsv12 no-tlsv13 force-sslv3 force-tlsv10 force-tlsv11 force-tlsv12 force-tlsv13",
)
_IMPOSSIBLE = {name for name, (effect, _) in _SERVER.items() if effect == "impossible"}
"""Without these a server does not understand its clients, and is left out."""
_UNDONE = {"enabled": "disabled"} | {
    f"no-{name}": name
    for name in ("check", "backup", "ssl", "check-ssl", "agent-check", "send-proxy", "send-proxy-v2")
}
"""Parameters that undo another one."""

_DEFAULT_INTERVAL, _DEFAULT_RISE, _DEFAULT_FALL = 2.0, 2, 3
_HOST_HEADER = re.compile(r"(?i)host:(?:\\? )*([^\s\\]+)")
_STATUS = re.compile(r"[1-5][0-9]{2}(?:-[1-5][0-9]{2})?(?:,[1-5][0-9]{2}(?:-[1-5][0-9]{2})?)*")
_SPECIAL = re.compile(r"[.^$*+?\[|(){\\]")
"""Characters that mean something in the body of a check."""
_HTTP_CHECK_WITHOUT_EFFECT = ("http-check comment", "http-check send-state")
_ONLY_CONNECTS = "has no counterpart: the check only connects"


class _Line(Directive):
    """A line of a section. Its name has two words where the second one says which: `option tcplog`."""

    def __str__(self) -> str:
        return " ".join(self.words)


@dataclass(slots=True)
class _Section:
    """A proxy, with the lines of its defaults before its own."""

    at: Directive
    kind: str
    name: str
    lines: list[Directive] = field(default_factory=list)

    def all(self, name: str) -> list[Directive]:
        """Every line of this name."""
        return [line for line in self.lines if line.name == name]

    def last(self, name: str) -> Directive | None:
        """The line of this name that counts."""
        return next((line for line in reversed(self.lines) if line.name == name), None)

    def option(self, name: str) -> Directive | None:
        """The line that turns an option on; None if it is off."""
        for line in reversed(self.lines):
            if line.name == f"option {name}":
                return line
            if line.name == "no option" and line.arguments[:1] == [name]:
                return None
        return None

    @property
    def mode(self) -> str:
        """The mode; HAProxy's default is tcp."""
        line = self.last("mode")
        return line.arguments[0] if line and line.arguments else "tcp"


def read_haproxy(conversion: Conversion, text: str) -> None:
    """Every frontend and listen section in tcp mode, with its backend."""
    sections = _sections(conversion.report, text)
    backends = {section.name: section for section in sections if section.kind == "backend"}
    tables = {section.name: section for section in sections}
    used: set[str] = set()
    for section in sections:
        if section.kind == "backend":
            continue
        used |= {name for line in section.lines if "backend" in line.name for name in line.arguments[:1]}
        if section.last("disabled"):
            section.at.note("is disabled, and was left out")
        elif section.mode != "tcp":
            reason = f"is in mode {section.mode}, and stays with HAProxy: vipd balances flows alone"
            section.at.note(reason)
        elif draft := _read_proxy(section, backends, tables):
            conversion.add(draft)
    for section in backends.values():
        if section.name not in used:
            section.at.note("no frontend leads to it")


def _sections(report: Report, text: str) -> list[_Section]:
    """The proxies of a file."""
    proxies: list[_Section] = []
    bases: dict[str, _Section] = {}
    defaults = _Section(Directive(report, 0, []), "", "")
    current = replace(defaults, lines=[])
    for line in _lines(report, text):
        kind, words = line.name, line.arguments
        if kind not in _SECTIONS:
            current.lines.append(line)
            continue
        name = words[0] if words and words[0] != "from" else ""
        base = words[words.index("from") + 1] if "from" in words[:-1] else ""
        current = _Section(line.part(kind, name), kind, name)
        if kind == "defaults":
            defaults = bases[name] = current
            current.lines += bases[base].lines if base in bases else []
        elif kind in _PROXIES:
            current.lines += (bases.get(base, defaults) if base else defaults).lines
            if len(words) > 1 and words[1] != "from":
                current.lines.append(line.part("bind", *words[1:]))
            proxies.append(current)
        elif kind != "global":
            line.leave_out(without_effect=True)
    return proxies


def _lines(report: Report, text: str) -> Iterator[Directive]:
    """The lines with words. Those that depend on the host are reported, and left out."""
    conditions = 0
    for number, row in enumerate(text.split("\n"), 1):
        written = [word[0] for word in _WORD.finditer(row) if word[0][0] != "#"]
        if not written:
            continue
        words = [_QUOTED.sub(_unquoted, word) for word in written]
        size = 2 if words[0] in _TWO_WORDS else 1
        line = _Line(report, number, [" ".join(words[:size]), *words[size:]])
        if words[0].startswith("."):
            conditions += {".if": 1, ".endif": -1}.get(words[0], 0)
            if words[0] == ".if":
                reason = "depends on the host: the lines up to its .endif were not read"
                line.lost(reason, "keep those that this host needs, without .if")
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


def _parameters(
    line: Directive, words: Sequence[str], table: Mapping[str, tuple[str, int]]
) -> Iterator[tuple[Directive, str]]:
    """The parameters of a bind or server line, and what becomes of each. Unknown ones have no value, and are
    lost."""
    start = 0
    while start < len(words):
        effect, size = table.get(words[start], ("lost", 1))
        # A source address may be followed by what it is used for.
        if words[start] == "source" and words[start + 2 : start + 3] in (["usesrc"], ["interface"]):
            size = 4
        yield line.part(*words[start : start + size]), effect
        start += size


def _read_proxy(
    section: _Section, backends: Mapping[str, _Section], tables: Mapping[str, _Section]
) -> ServiceDraft | None:
    """A frontend and its backend, or a listen section; None without a backend, which is reported."""
    draft = ServiceDraft(section.at, section.name)
    for line in section.all("bind"):
        _read_bind(draft, line)
    servers = section.all("server") or section.all("server-template")
    backend = section if servers else _backend_of(section, backends)
    _report(section)
    if backend is None:
        section.at.lost("is not converted: it leads to no backend of this file")
        return None
    if backend is not section:
        _report(backend)
        if backend.last("disabled"):
            backend.at.lost("is disabled: its servers would serve here")
    _read_servers(draft, backend)
    _read_balance(draft, backend)
    _read_stickiness(draft, backend, tables)
    if source := backend.last("source"):
        _read_source(draft, source)
    return draft


def _backend_of(section: _Section, backends: Mapping[str, _Section]) -> _Section | None:
    """The backend that all flows of a frontend go to."""
    plain = [line for line in section.all("use_backend") if len(line.words) == 2]
    line = plain[0] if plain else section.last("default_backend")
    if line is None or not line.arguments:
        return None
    backend = backends.get(line.arguments[0])
    if backend is None:
        line.lost("there is no such backend in this file", "put both into one file")
    return backend


def _report(section: _Section) -> None:
    """Report every line that is not read."""
    for line in section.lines:
        keyword, _, option = line.name.partition(" ")
        if {line.name, keyword} & _READ or (keyword == "use_backend" and len(line.words) == 2):
            continue
        quiet = option in _OPTIONS_WITHOUT_EFFECT if keyword == "option" else keyword in _WITHOUT_EFFECT
        quiet = quiet or line.name.startswith(_STARTS_WITHOUT_EFFECT)
        line.leave_out(quiet, _HINTS.get(keyword, ""))


def _read_bind(draft: ServiceDraft, line: Directive) -> None:
    addresses = line.arguments[0] if line.arguments else ""
    parameters = list(_parameters(line, line.arguments[1:], _BIND))
    for parameter, effect in parameters:
        at = line.part("bind", addresses, *parameter.words)
        if effect == "impossible":
            at.lost(NOT_CONVERTED)
            return
        if effect == "lost":
            at.leave_out()
    both = any(parameter.name == "v4v6" for parameter, _ in parameters)
    for text in addresses.split(",") if line.arguments else ():
        _read_listener(draft, line.part("bind", text), both)


def _read_listener(draft: ServiceDraft, at: Directive, both: bool) -> None:
    """Add one address of a bind line, with its port or range of ports. `both`: of each family, if it is any
    address of IPv6."""
    address, ports = _split_address(at.value)
    if "@" in address or "/" in at.value or not ports:
        hint = "" if ports else "a service needs an address and a port"
        at.lost("is no address and port of TCP", hint)
        return
    family = Family.IPV6 if at.value.startswith(("ipv6@", "tcp6@")) else Family.IPV4
    address = ANY_ADDRESS[family] if address in ("", "*") else address
    draft.listen(at, Protocol.TCP, address, ports, both=both)


def _split_address(text: str) -> tuple[str, str]:
    """Address and port, also with a family before them. Text of other kinds of addresses stays whole."""
    kind, at, rest = text.rpartition("@")
    return split_address(rest if at and kind in ("ipv4", "ipv6", "tcp", "tcp4", "tcp6") else text)


def _read_balance(draft: ServiceDraft, section: _Section) -> None:
    line = section.last("balance")
    if line is None or not line.arguments:
        draft.keys["balance"] = "round-robin"
        return
    name = line.arguments[0].partition("(")[0]
    if name == "hash" and line.arguments[1:] == ["src"]:
        name = "source"
    draft.keys["balance"] = _BALANCES.get(name, "random")
    if name not in _BALANCES:
        line.lost(AT_RANDOM, "or write balance: round-robin")
    elif name == "random":
        line.note("vipd draws one backend by weight, and does not compare two")


def _read_stickiness(draft: ServiceDraft, section: _Section, tables: Mapping[str, _Section]) -> None:
    rules = section.all("stick on")
    for line in rules:
        words = line.arguments
        owner = section
        if words[1:2] == ["table"] and len(words) == 3 and words[2] in tables:
            owner, words = tables[words[2]], words[:1]
        table = owner.last("stick-table")
        if words != ["src"] or table is None:
            line.leave_out(hint="affinity: client-ip is the counterpart of src")
        elif "affinity" not in draft.keys:
            _read_table(draft, table)
    table = section.last("stick-table")
    if table is not None and not rules:
        table.leave_out(hint="see vipctl flows")


def _read_table(draft: ServiceDraft, table: Directive) -> None:
    values = dict(pairwise(table.arguments))
    expire = values.get("expire")
    draft.keys["affinity"] = table.affinity(
        None if expire is None else table.part("expire").time(expire, "ms")
    )
    for name, hint in (("peers", "or write balance: source-hash"), ("store", "see vipctl flows")):
        if name in values:
            table.part("stick-table", name, values[name]).leave_out(hint=hint)


def _read_source(draft: ServiceDraft, line: Directive) -> None:
    """`source ADDR usesrc clientip` keeps the client's address; any other source has no counterpart."""
    if line.arguments[1:2] == ["usesrc"] and line.arguments[2:3] in (["clientip"], ["client"]):
        draft.keys["masquerade"] = "hairpin"
    else:
        line.leave_out(hint="or write masquerade: hairpin for that of the client")


def _read_servers(draft: ServiceDraft, section: _Section) -> None:
    """Add the servers of a backend or listen section to a draft."""
    check = _read_check(section)
    for line in section.lines:
        if line.name == "server-template" and len(line.words) > 3:
            server = line.part("server-template", line.words[1], *line.words[3:])
            _read_server(draft, section, server, check, number=line.words[2])
        elif line.name in ("server", "server-template"):
            _read_server(draft, section, line, check)
    backups = [server for server in draft.servers if server.keys.get("backup")]
    if len(backups) > 1 and section.option("allbackups") is None:
        reason = "all backups serve at once, not the first one alone"
        backups[1].at.lost(reason, "or leave out this one")


def _read_server(
    draft: ServiceDraft, section: _Section, line: Directive, check: Keys, number: str = ""
) -> None:
    """Add the server of a line. `number`: of servers that a name stands for."""
    at = line.part(*line.words[:3])
    parameters = _server_parameters(section, line)
    host, port = _split_address(line.words[2] if len(line.words) > 2 else "")
    keys = _server_keys(at, host, port, parameters)
    if keys is None:
        draft.lost_servers = True
        return
    if "check" in parameters:
        keys["check"] = _check_of(section, at, check, parameters)
        if start := parameters.get("slowstart"):
            draft.slow_starts[start.part("slowstart").time(start.value, "ms") or 0] = start
    if "source" in parameters:
        _read_source(draft, parameters["source"])
    if not keys["address"]:
        _read_name(draft, at, host, number, parameters, keys)
        return
    if number:
        at.lost("is one address, and was written once")
    draft.servers.append(Server(at, keys))


def _server_parameters(section: _Section, server: Directive) -> dict[str, Directive]:
    """The parameters of a server, and of each default-server before its own."""
    parameters: dict[str, tuple[Directive, str]] = {}
    for line in (*section.all("default-server"), server):
        words = line.words[3:] if line is server else line.arguments
        for parameter, effect in _parameters(line, words, _SERVER):
            if parameter.name in _UNDONE:
                parameters.pop(_UNDONE[parameter.name], None)
            else:
                parameters[parameter.name] = (parameter, effect)
    for parameter, effect in parameters.values():
        if effect in ("lost", "without_effect"):
            parameter.leave_out(effect == "without_effect")
    return {name: parameter for name, (parameter, _) in parameters.items()}


def _server_keys(at: Directive, host: str, port: str, parameters: Mapping[str, Directive]) -> Keys | None:
    """The server; without an address if it has a name. None after a report."""
    if impossible := next((name for name in parameters if name in _IMPOSSIBLE), None):
        at.part(*at.words, impossible).lost(NOT_CONVERTED)
        return None
    if port[:1] in ("+", "-"):
        at.lost("is not converted: its port depends on the client's")
        return None
    number = at.port(port) if port.strip("0") else None
    address = at.server_host(host) if number or not port.strip("0") else None
    if address is None:
        return None
    weight, most = parameters.get("weight"), parameters.get("maxconn")
    return server_keys(
        address=address,
        port=number,
        weight=weight.weight(weight.value) if weight else 1,
        max_connections=most.max_connections(most.value) if most else None,
        state="down" if "disabled" in parameters else None,
        backup=True if "backup" in parameters else None,
    )


def _read_name(
    draft: ServiceDraft,
    at: Directive,
    host: str,
    number: str,
    parameters: Mapping[str, Directive],
    keys: Keys,
) -> None:
    """Add a server by name; note where its addresses are others than HAProxy's."""
    resolved = "resolvers" in parameters
    kind = "srv" if host.startswith("_") else "dns"
    if not draft.add_named(at, kind, host, keys, by_host=not resolved):
        return
    takes = f"takes {number or 'one'} at most" if resolved else "takes one, when it starts"
    reason = f"every address of the name serves, and vipd follows DNS; HAProxy {takes}"
    if kind == "srv":
        reason += ", and ignores the priority of records: the lowest number serves, others are its backups"
    at.note(reason)
    options = parameters.get("resolve-opts")
    if kind == "srv" and options and "ignore-weight" in options.value:
        at.part(*at.words, "resolve-opts ignore-weight").lost("the records say the weights")


def _check_of(section: _Section, at: Directive, check: Keys, parameters: Mapping[str, Directive]) -> Keys:
    """The check of a server, from that of its section."""

    def count(name: str, default: int) -> int:
        parameter = parameters.get(name)
        number = parameter.part(name).integer(parameter.value, 1, MAX_COUNT) if parameter else None
        return number or default

    server = at.part(*at.words[:2])
    inter = parameters.get("inter")
    interval = inter.time(inter.value, "ms") if inter else None
    interval = _DEFAULT_INTERVAL if interval is None else interval
    timeout = _timeout(section, interval, check["type"] == "http")
    rise, fall = count("rise", _DEFAULT_RISE), count("fall", _DEFAULT_FALL)
    port = parameters.get("port")
    check = {**check, "port": port.port(port.value) if port else None}
    if "check-ssl" in parameters:
        _add_tls(server, check, parameters)
    return {**check, **server.timing(interval, timeout, rise, fall)}


def _timeout(section: _Section, interval: float, answer: bool) -> float:
    """The longest wait of a check: without `timeout check` the interval, else what connecting may take, and
    that time for an `answer`."""
    times: dict[str, float] = {}
    for name in ("check", "connect"):
        line = section.last(f"timeout {name}")
        seconds = line.part(line.name).time(line.value, "ms") if line else None
        times |= {} if seconds is None else {name: seconds}
    if "check" not in times:
        return interval
    connect = min(times.get("connect", interval), interval)
    return min(connect + times["check"], interval) if answer else connect


def _add_tls(server: Directive, check: Keys, parameters: Mapping[str, Directive]) -> None:
    if check["type"] != "http":
        server.part(*server.words, "check-ssl").lost("without option httpchk a check only connects")
        return
    values = {name: parameter.value for name, parameter in parameters.items()}
    check |= {"type": "https", "server_name": values.get("check-sni") or None}
    authority = values.get("ca-file", "")
    if values.get("verify") == "none":
        check["verify"] = False
    elif authority.startswith("/"):
        check["ca"] = authority
    elif authority:
        parameters["ca-file"].lost("is no absolute path: the host's own certificates were written")


def _report_checks(section: _Section) -> None:
    """Report what a check of vipd cannot ask or expect."""
    for name in _OTHER_CHECKS:
        if line := section.option(name):
            line.lost(_ONLY_CONNECTS, "or let a program check it: type: exec")
    for line in section.lines:
        if line.name.startswith("tcp-check") and str(line) not in ("tcp-check", "tcp-check connect"):
            line.lost(_ONLY_CONNECTS)


def _read_check(section: _Section) -> Keys:
    """The check of all checked servers of a section."""
    _report_checks(section)
    request = section.option("httpchk")
    if request is None:
        return {"type": "tcp"}
    check = {"type": "http", "method": "OPTIONS", **_request(request.arguments)}
    for line in section.lines:
        if line.name == "http-check send":
            _read_send(check, line)
        elif line.name == "http-check expect" and (expected := _expected(line.arguments)):
            check |= expected
        elif line.name.startswith("http-check") and line.name not in _HTTP_CHECK_WITHOUT_EFFECT:
            line.leave_out(hint="see vipctl drain" if line.name == "http-check disable-on-404" else "")
    return check


def _request(words: list[str]) -> Keys:
    """`option httpchk`: nothing, a path, or method, path and version; headers follow the version."""
    names = ("path",) if len(words) == 1 else ("method", "path")
    keys: Keys = dict(zip(names, words, strict=False))
    host = _HOST_HEADER.search(" ".join(words[2:]))
    return {**keys, "host": host[1]} if host else keys


def _expected(words: list[str]) -> Keys:
    """The key for this status or text; none if vipd has none."""
    while words[:1] and words[0] in ("min-recv", "comment", "ok-status", "error-status", "tout-status"):
        words = words[2:]
    if words[:1] == ["status"] and _STATUS.fullmatch(" ".join(words[1:])):
        return {"status": [int(text) if text.isdecimal() else text for text in words[1].split(",")]}
    if words[:1] == ["string"] and len(words) == 2:
        return {"body": _SPECIAL.sub(r"\\\g<0>", words[1])}
    return {}


def _read_send(check: Keys, line: Directive) -> None:
    words = line.arguments
    while words:
        size = 3 if words[0] == "hdr" else 2
        (name, *values), words = words[:size], words[size:]
        if name in ("meth", "uri") and values:
            check["method" if name == "meth" else "path"] = values[0]
        elif name == "hdr" and len(values) == 2 and values[0].lower() == "host":
            check["host"] = values[1]
        elif name != "ver":
            line.part("http-check send", name).leave_out()
