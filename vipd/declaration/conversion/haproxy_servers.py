"""Reads the servers and checks of a backend in haproxy.cfg. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from vipd.declaration.conversion.draft import Conversion, ServiceDraft, with_state
from vipd.declaration.conversion.haproxy_syntax import Line, Section, read_parameters, read_time
from vipd.declaration.fields import Located
from vipd.declaration.service_rules import templates
from vipd.model.check import MAX_COUNT, Check, HttpProbe, Probe, TcpProbe, Timing
from vipd.model.service import Backend, Masquerade, NamedBackend, NameKind

_USED = {
    "check": 0,
    "backup": 0,
    "disabled": 0,
    "check-ssl": 0,
    **dict.fromkeys(("weight", "port", "inter", "fall", "rise", "slowstart", "source", "maxconn"), 1),
    **dict.fromkeys(("verify", "ca-file", "check-sni"), 1),
}
_NEGATIONS = {
    "no-check": "check",
    "no-backup": "backup",
    "enabled": "disabled",
    "no-ssl": "ssl",
    "no-check-ssl": "check-ssl",
    "no-agent-check": "agent-check",
    "no-send-proxy": "send-proxy",
    "no-send-proxy-v2": "send-proxy-v2",
}
_NO_PROXY = "vipd adds nothing to the data: this server would wait for the PROXY protocol"
_IMPOSSIBLE = {
    "ssl": (0, "vipd does not encrypt: this server would get plain text"),
    "send-proxy": (0, _NO_PROXY),
    "send-proxy-v2": (0, _NO_PROXY),
    "send-proxy-v2-ssl": (0, _NO_PROXY),
    "send-proxy-v2-ssl-cn": (0, _NO_PROXY),
    "socks4": (1, "vipd has no way through a SOCKS proxy"),
    "namespace": (1, "vipd sends from its own network namespace"),
}
"""Without these the server does not work, so that it is left out: number of values, and why."""
_QUEUE = "flows wait nowhere: while all backends are full, a new one is refused"
_LOST = {
    "minconn": (1, "a limit does not depend on the load: write max_connections"),
    "maxqueue": (1, _QUEUE),
    "agent-check": (0, "only an HTTP check may say a weight: weight_from: check"),
    "observe": (1, "a check judges, not the traffic of clients"),
    "track": (1, "every backend has its own check: this one has none"),
    "addr": (1, "a check asks the backend's own address"),
    "check-send-proxy": (0, "a check sends no PROXY protocol"),
    "check-via-socks4": (0, "a check connects directly"),
    "on-marked-down": (1, "open flows of an unhealthy backend go on"),
    "on-marked-up": (1, "open flows of a backup go on"),
    "fastinter": (1, "interval is the same in every state"),
    "downinter": (1, "interval is the same in every state"),
    "resolve-net": (1, "every address of a name serves that allowed_backends in vipd's settings has"),
}
_HTTP = "has no effect in mode tcp"
_NO_TLS = "there is no TLS to the server"
_AGENT = "there is no agent"
_OWN_NAMES = "vipd looks names up by its own settings: dns_servers, dns_min_ttl and dns_max_ttl"
_NO_EFFECT = {
    "cookie": (1, _HTTP),
    "redir": (1, _HTTP),
    "proto": (1, _HTTP),
    "check-proto": (1, "the check decides it"),
    "check-alpn": (1, "the check decides it"),
    "max-reuse": (1, _HTTP),
    "pool-max-conn": (1, _HTTP),
    "pool-low-conn": (1, _HTTP),
    "pool-purge-delay": (1, _HTTP),
    "log-proto": (1, _HTTP),
    "id": (1, "backends have no number"),
    "guid": (1, "backends have no number"),
    "non-stick": (0, "affinity is that of the service"),
    "stick": (0, "affinity is that of the service"),
    "error-limit": (1, "it belongs to observe"),
    "on-error": (1, "it belongs to observe"),
    "tfo": (0, "the connection is the client's own"),
    "no-tfo": (0, "the connection is the client's own"),
    "tcp-ut": (1, "the connection is the client's own"),
    "resolvers": (1, _OWN_NAMES),
    "resolve-prefer": (1, "a name has addresses of the families that its service has"),
    "resolve-opts": (1, _OWN_NAMES),
    "init-addr": (1, "the last good answer serves from the start"),
    "agent-inter": (1, _AGENT),
    "agent-port": (1, _AGENT),
    "agent-addr": (1, _AGENT),
    "agent-send": (1, _AGENT),
    "proxy-v2-options": (1, "there is no PROXY protocol"),
    "allow-0rtt": (0, _NO_TLS),
    "ssl-reuse": (0, _NO_TLS),
    "no-ssl-reuse": (0, _NO_TLS),
    "tls-tickets": (0, _NO_TLS),
    "no-tls-tickets": (0, _NO_TLS),
    **dict.fromkeys(("sni", "alpn", "npn", "crt", "crl-file", "ciphers", "ciphersuites"), (1, _NO_TLS)),
    **dict.fromkeys(("verifyhost", "ssl-min-ver", "ssl-max-ver", "curves"), (1, _NO_TLS)),
    **{f"no-{name}": (0, _NO_TLS) for name in ("sslv3", "tlsv10", "tlsv11", "tlsv12", "tlsv13")},
    **{f"force-{name}": (0, _NO_TLS) for name in ("sslv3", "tlsv10", "tlsv11", "tlsv12", "tlsv13")},
}
_ARITY = {**_USED, **{name: arity for name, (arity, _) in (_IMPOSSIBLE | _LOST | _NO_EFFECT).items()}}

_DEFAULT_INTERVAL = 2.0
_HOST_HEADER = re.compile(r"(?i)host:(?:\\? )*([^\s\\]+)")
_STATUS = re.compile(r"[1-5][0-9]{2}(?:-[1-5][0-9]{2})?(?:,[1-5][0-9]{2}(?:-[1-5][0-9]{2})?)*")
_SPECIAL = re.compile(r"[.^$*+?\[|(){\\]")
"""Characters that mean something in the body of a check."""
_OTHER_CHECKS = (
    "ssl-hello-chk",
    "mysql-check",
    "pgsql-check",
    "redis-check",
    "smtpchk",
    "ldap-check",
    "spop-check",
    "external-check",
)


@dataclass(frozen=True, slots=True)
class _Parameter:
    line: int
    value: str


_NONE = _Parameter(0, "")


def read_servers(conversion: Conversion, section: Section, draft: ServiceDraft) -> None:
    """Add the servers of a backend or listen section to a draft."""
    probe = _read_probe(conversion, section)
    slow: dict[float, int] = {}
    for line in section.lines:
        if line.words[0] in ("server", "server-template"):
            _add_server(conversion, section, draft, line, probe, slow)
    conversion.set_slow_start(draft, slow)
    backups = [server for server in (*draft.backends, *templates(draft.names)) if server.value.backup]
    if len(backups) > 1 and section.option("allbackups") is None:
        why = "all backups serve at once, not the first one alone"
        conversion.lost(backups[1].line, backups[1].path, why, "or leave out this one")


def _add_server(
    conversion: Conversion,
    section: Section,
    draft: ServiceDraft,
    line: Line,
    probe: Probe,
    slow: dict[float, int],
) -> None:
    """Add the servers of a line. `slow` takes the time of a slow start."""
    line, number = _without_number(line)
    what = " ".join(line.words[:3])
    parameters = _parameters(conversion, section, line)
    backend = _read_server(conversion, line, what, parameters)
    if backend is None:
        draft.lost_backends = True
        return
    if "check" in parameters:
        backend = replace(backend, check=_check(conversion, section, line, probe, parameters))
        if "slowstart" in parameters:
            each = parameters["slowstart"]
            slow[read_time(conversion, each.line, "slowstart", each.value) or 0] = each.line
    if "source" in parameters:
        each = parameters["source"]
        read_source(conversion, draft, Line(each.line, ["source", each.value]))
    if backend.address:
        if number:
            conversion.lost(line.number, what, "is one address, and was written once")
        draft.backends.append(Located(backend, line.number, what))
    elif named := _read_name(conversion, line, what, parameters, backend, number):
        draft.names.append(Located(named, line.number, what))
    else:
        draft.lost_backends = True


def _without_number(line: Line) -> tuple[Line, str]:
    """A server line, and nothing; of a server-template the line of one server, and how many there may be."""
    if line.words[0] == "server" or len(line.words) < 4:
        return line, ""
    return Line(line.number, ["server-template", line.words[1], *line.words[3:]]), line.words[2]


def _read_name(
    conversion: Conversion,
    line: Line,
    what: str,
    parameters: Mapping[str, _Parameter],
    template: Backend,
    number: str,
) -> NamedBackend | None:
    """The name of a server; notes where its addresses are others than HAProxy's."""
    host, _ = split_address(line.words[2])
    if "resolvers" not in parameters and conversion.unqualified(line.number, what, host):
        return None
    kind = NameKind.SRV if host.startswith("_") else NameKind.DNS
    why = "every address of the name serves, and vipd follows DNS; "
    if "resolvers" not in parameters:
        why += "HAProxy takes one, when it starts"
    else:
        why += f"HAProxy takes {number or 'one'} at most"
    if kind is NameKind.SRV:
        why += ", and ignores the priority of records: the lowest number serves, others are its backups"
    conversion.note(line.number, what, why)
    if kind is NameKind.SRV and "ignore-weight" in parameters.get("resolve-opts", _NONE).value:
        conversion.lost(line.number, f"{what} resolve-opts ignore-weight", "the records say the weights")
    return conversion.named_backend(line.number, what, kind, host, template)


def read_source(conversion: Conversion, draft: ServiceDraft, line: Line) -> None:
    """`source ADDR usesrc clientip` keeps the client's address; any other source has no counterpart."""
    words = " ".join(line.arguments).split()
    if words[1:2] == ["usesrc"] and words[2:3] in (["clientip"], ["client"]):
        draft.masquerade = Masquerade.HAIRPIN
    else:
        why = "the address that backends see is the one that this host's routes choose"
        conversion.lost(line.number, str(line), why, "or write masquerade: hairpin for that of the client")


def _parameters(conversion: Conversion, section: Section, server: Line) -> dict[str, _Parameter]:
    """The parameters of a server, and of each default-server before its own."""
    found: dict[str, _Parameter] = {}
    for line in (*section.all("default-server"), server):
        words = line.arguments if line is not server else line.words[3:]
        for name, value in read_parameters(words, _ARITY):
            if name in _NEGATIONS:
                found.pop(_NEGATIONS[name], None)
            elif name in _ARITY:
                found[name] = _Parameter(line.number, value)
            else:
                conversion.lost(line.number, name, "is not known, and was left out")
    for name, each in found.items():
        text = f"{name} {each.value}".rstrip()
        if name in _LOST:
            conversion.lost(each.line, text, _LOST[name][1])
        elif name in _NO_EFFECT:
            conversion.note(each.line, text, _NO_EFFECT[name][1])
    return found


def _read_server(
    conversion: Conversion, line: Line, what: str, parameters: Mapping[str, _Parameter]
) -> Backend | None:
    """The server; without an address if it has a name. None after a report."""
    for name, (_, why) in _IMPOSSIBLE.items():
        if name in parameters:
            conversion.lost(line.number, f"{what} {name}", f"is not converted: {why}")
            return None
    address, port = split_address(line.words[2] if len(line.words) > 2 else "")
    if port[:1] in ("+", "-"):
        conversion.lost(line.number, what, "is not converted: its port depends on the client's")
        return None
    number = conversion.port(line.number, what, port) if port.strip("0") else None
    if port.strip("0") and number is None:
        return None
    backend = conversion.server(line.number, what, address, number)
    if backend is None:
        return None
    if "weight" in parameters:
        each = parameters["weight"]
        backend = replace(backend, weight=conversion.weight(each.line, f"weight {each.value}", each.value))
    if "maxconn" in parameters:
        each = parameters["maxconn"]
        backend = conversion.max_connections(each.line, f"maxconn {each.value}", backend, each.value)
    return with_state(backend, down="disabled" in parameters, backup="backup" in parameters)


def split_address(text: str) -> tuple[str, str]:
    """Address and port of `ADDR:PORT`, `[ADDR]:PORT`, or with a family before it. Text of other kinds of
    addresses stays whole."""
    kind, at, rest = text.rpartition("@")
    if at and kind in ("ipv4", "ipv6", "tcp", "tcp4", "tcp6"):
        text = rest
    if text.endswith("]") or ":" not in text:
        return text.strip("[]"), ""
    address, _, port = text.rpartition(":")
    return address.strip("[]"), port


def _check(
    conversion: Conversion,
    section: Section,
    line: Line,
    probe: Probe,
    parameters: Mapping[str, _Parameter],
) -> Check:
    def seconds(name: str, default: float) -> float:
        each = parameters.get(name)
        if each is None:
            return default
        found = read_time(conversion, each.line, f"{name} {each.value}", each.value)
        return default if found is None else found

    def count(name: str, default: int) -> int:
        each = parameters.get(name)
        if each is None:
            return default
        return conversion.integer(each.line, name, each.value, 1, MAX_COUNT) or default

    interval = seconds("inter", _DEFAULT_INTERVAL)
    timeout = _timeout(conversion, section, interval, isinstance(probe, HttpProbe))
    timing = Timing(interval, timeout, count("rise", Timing().rise), count("fall", Timing().fall))
    if "port" in parameters:
        each = parameters["port"]
        probe = replace(probe, port=conversion.port(each.line, f"port {each.value}", each.value))
    if "check-ssl" in parameters:
        probe = _with_tls(conversion, line, probe, parameters)
    return Check(probe, conversion.timing(line.number, " ".join(line.words[:2]), timing))


def _timeout(conversion: Conversion, section: Section, interval: float, answer: bool) -> float:
    """The longest wait of a check: without `timeout check` the interval, else what connecting may take, and
    that time for an `answer`."""
    found: dict[str, float] = {}
    for name in ("check", "connect"):
        line = section.last(f"timeout {name}")
        if line is not None:
            seconds = read_time(conversion, line.number, line.key, " ".join(line.arguments))
            found |= {} if seconds is None else {name: seconds}
    if "check" not in found:
        return interval
    connect = min(found.get("connect", interval), interval)
    return min(connect + found["check"], interval) if answer else connect


def _with_tls(
    conversion: Conversion, line: Line, probe: Probe, parameters: Mapping[str, _Parameter]
) -> Probe:
    if not isinstance(probe, HttpProbe):
        why = "without option httpchk a check only connects"
        conversion.lost(line.number, f"{' '.join(line.words[:2])} check-ssl", why)
        return probe
    values = {name: each.value for name, each in parameters.items()}
    verify = values.get("verify") != "none"
    authority = values.get("ca-file", "") if verify else ""
    if authority and not authority.startswith("/"):
        why = "is no absolute path: the host's own certificates were written"
        conversion.lost(parameters["ca-file"].line, f"ca-file {authority}", why)
        authority = ""
    return replace(probe, tls=True, verify=verify, ca=authority, server_name=values.get("check-sni", ""))


def _read_probe(conversion: Conversion, section: Section) -> Probe:
    """The probe of all checked servers of a section."""
    for name in _OTHER_CHECKS:
        line = section.option(name)
        if line is not None:
            hint = "or let a program check it: type: exec"
            conversion.lost(line.number, str(line), "has no counterpart: the check only connects", hint)
    for line in section.lines:
        if line.words[0] == "tcp-check" and line.words[1:] not in (["connect"], []):
            conversion.lost(line.number, str(line), "has no counterpart: the check only connects")
    line = section.option("httpchk")
    if line is None:
        return TcpProbe()
    probe = _request(HttpProbe(method="OPTIONS"), line.arguments)
    for each in section.lines:
        if each.words[0] == "http-check":
            probe = _read_http_check(conversion, probe, each)
    return probe


def _request(probe: HttpProbe, words: list[str]) -> HttpProbe:
    """`option httpchk`: nothing, a path, or method, path and version; headers follow the version."""
    if len(words) == 1:
        probe = replace(probe, path=words[0])
    elif words:
        probe = replace(probe, method=words[0], path=words[1])
    host = _HOST_HEADER.search(" ".join(words[2:]))
    return replace(probe, host=host[1]) if host else probe


def _read_http_check(conversion: Conversion, probe: HttpProbe, line: Line) -> HttpProbe:
    if line.key == "http-check send":
        return _read_send(conversion, probe, line)
    if line.key == "http-check expect":
        found = _expected(probe, line.arguments)
        if found is not None:
            return found
    if line.key == "http-check disable-on-404":
        conversion.lost(line.number, str(line), "no status drains a backend; see vipctl drain")
    elif line.key not in ("http-check comment", "http-check send-state"):
        conversion.lost(line.number, str(line), "has no counterpart, and was left out")
    return probe


def _expected(probe: HttpProbe, words: list[str]) -> HttpProbe | None:
    """The probe that expects this status or text; None if vipd cannot."""
    while words[:1] and words[0] in ("min-recv", "comment", "ok-status", "error-status", "tout-status"):
        words = words[2:]
    if words[:1] == ["status"] and _STATUS.fullmatch(" ".join(words[1:])):
        pairs = [part.partition("-") for part in words[1].split(",")]
        return replace(probe, status=tuple((int(low), int(high or low)) for low, _, high in pairs))
    if words[:1] == ["string"] and len(words) == 2:
        return replace(probe, body=_SPECIAL.sub(r"\\\g<0>", words[1]))
    return None


def _read_send(conversion: Conversion, probe: HttpProbe, line: Line) -> HttpProbe:
    words = line.arguments
    place = 0
    while place < len(words):
        name, values = words[place], words[place + 1 : place + 3]
        place += 3 if name == "hdr" else 2
        if name == "meth" and values:
            probe = replace(probe, method=values[0])
        elif name == "uri" and values:
            probe = replace(probe, path=values[0])
        elif name == "hdr" and len(values) == 2 and values[0].lower() == "host":
            probe = replace(probe, host=values[1])
        elif name != "ver":
            conversion.lost(line.number, f"http-check send {name}", "a check sends no other headers or body")
    return probe
