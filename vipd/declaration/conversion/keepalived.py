"""Reads the virtual servers of keepalived.conf. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from ipaddress import ip_address, ip_network
from typing import TypeAlias

from vipd.declaration.conversion.directives import Directive, Token, named, tree_of
from vipd.declaration.conversion.draft import UNCHECKED, Conversion, Keys, Server, ServiceDraft, server_keys
from vipd.declaration.conversion.ipvsadm import (
    DEFAULT_SCHEDULER,
    LOWER_THRESHOLD,
    METHODS,
    set_balance,
    set_masquerade,
)
from vipd.declaration.service import DNS_TYPES
from vipd.model import limits
from vipd.model.check import MAX_COUNT
from vipd.model.service import Protocol

_TOKEN = re.compile(
    r'[ \t\r\f\v]+|"(?P<quoted>[^"]*)"?|(?P<sign>[{}])|(?P<word>(?:\$\{\w*\}|[^\s{}"])+)', re.ASCII
)
_CONTINUED = re.compile(r"\\[ \t]*$")
_PROTOCOLS = {protocol.value.upper(): protocol for protocol in Protocol}
_METHODS = {"NAT": "m", "DR": "g", "TUN": "i"}
_DEFAULT_PERSISTENCE = "360"
"""Seconds of persistence_timeout without a number."""
_DEFAULT_INTERVAL = 60.0
_DEFAULT_TIMEOUT = 5.0
_DEFAULT_RETRIES = {"DNS_CHECK": 3, "MISC_CHECK": 0}

_FLAGS = ("flag-1", "flag-2", "flag-3", "sh-port", "sh-fallback", "mh-port", "mh-fallback")
_CHECK_SETTINGS = {
    *("delay_loop", "connect_timeout", "retry", "delay_before_retry", "warmup", "alpha", "virtualhost"),
}
"""What a virtual server, a real server or a checker says of checks: the innermost one counts."""
_VIRTUAL = {
    *(*_CHECK_SETTINGS, *_FLAGS, "lb_algo", "lvs_sched", "lb_kind", "lvs_method", "persistence_timeout"),
    *("persistence_granularity", "protocol", "sorry_server", "sorry_server_lvs_method"),
}
_SERVER = {*_CHECK_SETTINGS, "weight", "uthreshold", "lthreshold", "lb_kind", "lvs_method"}
_CHECKER = {*_CHECK_SETTINGS, "connect_port", "misc_timeout"}
_WITHOUT_EFFECT = {
    *("smtp_alert", "snmp_name", "omega", "ha_suspend", "inhibit_on_failure", "sorry_server_inhibit"),
    "ip_family",
}
_CHECKER_WITHOUT_EFFECT = {
    *("http_protocol", "fast_recovery", "log_all_failures", "enable_sni", "helo_name", "regex_stack"),
    *("regex_min_offset", "regex_max_offset"),
}
_HINTS = {
    "digest": "write body: with a text that the page contains",
    "regex": "write body: with a text, or an RE2 expression",
}
_NOT_CONVERTED = ("PING_CHECK", "BFD_CHECK", "FILE_CHECK")
_BY_PROGRAM = "let a program check it: type: exec"
_SHELL_SIGNS = frozenset("|&;<>()$`*?[~")


def read_keepalived(conversion: Conversion, text: str) -> None:
    """Every virtual_server of the text."""
    top = list(_usable(tree_of(conversion.report, _tokens(text))))
    groups = {group.value: group for group in named(top, "virtual_server_group")}
    for directive in top:
        if directive.name == "virtual_server":
            if draft := _read_virtual(directive, groups):
                conversion.add(draft)
            else:
                directive.lost("is not converted")
        elif directive.name == "SSL":
            directive.part("SSL").leave_out()
        elif directive.name.startswith("vrrp"):
            directive.note("stays with keepalived: vipd announces no address")
        elif directive.name != "virtual_server_group":
            directive.leave_out(without_effect=True)


def _tokens(text: str) -> Iterator[Token]:
    """The words and braces; a directive ends with its line, unless a brace opens the next one."""
    ended = 0
    for number, row in _rows(text):
        for sign, word in _tokens_of(row):
            if ended and sign != "{":
                yield ended, ";", ""
            ended = 0
            yield number, sign, word
        ended = ended or number
    if ended:
        yield ended, ";", ""


def _rows(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their continuations after a backslash; the number is that of the first one."""
    parts: list[str] = []
    start = 0
    for number, row in enumerate(text.split("\n"), 1):
        start = start if parts else number
        continued = _CONTINUED.search(row)
        parts.append(row[: continued.start()] if continued else row)
        if not continued:
            yield start, " ".join(parts)
            parts = []
    if parts:
        yield start, " ".join(parts)


def _tokens_of(row: str) -> Iterator[tuple[str, str]]:
    """Signs, and words without a sign."""
    for token in _TOKEN.finditer(row):
        word = token["word"] or token["quoted"]
        if token["word"] and word[0] in "#!":
            return
        if token["sign"] or word is not None:
            yield token["sign"] or "", word or ""


def _usable(directives: Iterable[Directive]) -> Iterator[Directive]:
    """The directives that mean themselves. Others need the host or another file, and are reported."""
    for directive in directives:
        if directive.name.startswith("@"):
            reason = "depends on the configuration id, and was not read"
            directive.lost(reason, "write the lines of this host without it")
        elif directive.name.startswith("include"):
            directive.lost("is not read", "put its lines into this file")
        elif directive.name.startswith(("$", "~")):
            directive.lost("definitions and repetitions are not expanded", "write their lines out")
        else:
            yield directive


def _settings(block: Directive, names: Iterable[str]) -> tuple[dict[str, Directive], list[Directive]]:
    """The directives of a block that have these names, the last ones, and all others."""
    usable = list(_usable(block.block or ()))
    return {directive.name: directive for directive in usable if directive.name in names}, [
        directive for directive in usable if directive.name not in names
    ]


def _read_virtual(virtual: Directive, groups: Mapping[str, Directive]) -> ServiceDraft | None:
    """A virtual_server; None without an address and port, which is reported."""
    draft = ServiceDraft(virtual)
    settings, rest = _settings(virtual, _VIRTUAL)
    servers = [directive for directive in rest if directive.name == "real_server"]
    for directive in rest:
        if directive.name != "real_server":
            directive.leave_out(directive.name in _WITHOUT_EFFECT)
    protocol = settings.get("protocol", virtual.part("protocol", "TCP"))
    if protocol.value.upper() not in _PROTOCOLS:
        protocol.lost("is no protocol that vipd balances")
        return None
    if not _read_listeners(draft, _PROTOCOLS[protocol.value.upper()], groups):
        return None
    method = _method(settings.get("lb_kind") or settings.get("lvs_method"), "m")
    methods = {_read_server(draft, server, settings, method) for server in servers}
    if sorry := settings.get("sorry_server"):
        if keys := _server_keys(draft, sorry):
            draft.fallback.append(Server(sorry, keys))
        _method(settings.get("sorry_server_lvs_method"), method)
    _read_persistence(draft, settings)
    scheduler = settings.get("lb_algo") or settings.get("lvs_sched") or virtual.part("lb_algo")
    name = scheduler.arguments[0] if scheduler.arguments else DEFAULT_SCHEDULER
    set_balance(draft, scheduler, name, [flag for flag in _FLAGS if flag in settings])
    set_masquerade(draft, methods)
    return draft


def _method(directive: Directive | None, default: str) -> str:
    """The letter of a forwarding method; reports one that is not NAT where it is written."""
    if directive is None:
        return default
    method = _METHODS.get(directive.arguments[0] if directive.arguments else "", "m")
    if METHODS[method]:
        directive.lost(METHODS[method])
    return method


def _read_listeners(draft: ServiceDraft, protocol: Protocol, groups: Mapping[str, Directive]) -> bool:
    """The addresses of a virtual server, or of its group; whether there are any."""
    virtual = draft.at
    if virtual.arguments[:1] != ["group"]:
        _read_listener(draft, virtual, virtual.arguments, protocol)
        return bool(draft.listeners)
    draft.name = " ".join(virtual.arguments[1:])
    if draft.name not in groups:
        virtual.lost("this file has no such virtual_server_group", "put both into one file")
    else:
        for member in _usable(groups[draft.name].block or ()):
            _read_listener(draft, member.part(" ".join(member.words)), member.words, protocol)
    return bool(draft.listeners)


def _read_listener(draft: ServiceDraft, at: Directive, words: list[str], protocol: Protocol) -> None:
    """Add the address and port, or the range."""
    if words[:1] == ["fwmark"]:
        reason = "a mark of packets has no counterpart"
        at.lost(reason, "declare the addresses and ports that the mark stands for")
    elif len(words) < 2:
        reason = "a service needs its ports, and this is every port"
        at.lost(reason, "declare the ports that are in use")
    elif port := at.port(words[1]):
        for address in _range(at, words[0]):
            draft.listen(at, protocol, address, str(port))


def _range(at: Directive, text: str) -> Iterable[str]:
    """The addresses of `192.168.1.1`, `192.168.1.1-10`, `192.168.1.1-192.168.1.10` or `192.168.1.0/29`."""
    start, dash, end = text.partition("-")
    if not dash and "/" not in text:
        return (text,)
    try:
        if dash:
            first = ip_address(start)
            colon = ":" if first.version == 6 else "."
            last = ip_address(end if colon in end else f"{start.rpartition(colon)[0]}{colon}{end}")
        else:
            network = ip_network(text, strict=False)
            first, last = network[0], network[-1]
    except ValueError:
        at.lost("is no range of addresses")
        return ()
    number = int(last) - int(first) + 1
    if first.version != last.version or not 0 < number <= limits.PORTS:
        at.lost(f"is no range of 1 to {limits.PORTS} addresses")
        return ()
    return [str(first + offset) for offset in range(number)]


def _read_persistence(draft: ServiceDraft, settings: Mapping[str, Directive]) -> None:
    if timeout := settings.get("persistence_timeout"):
        text = timeout.arguments[0] if timeout.arguments else _DEFAULT_PERSISTENCE
        if seconds := timeout.seconds(text):
            draft.keys["affinity"] = timeout.affinity(seconds)
    mask = settings.get("persistence_granularity")
    if mask and mask.arguments not in (["255.255.255.255"], ["128"]):
        mask.leave_out(hint="or write balance: source-hash")


def _read_server(
    draft: ServiceDraft, server: Directive, virtual: Mapping[str, Directive], method: str
) -> str:
    """Add a real_server; the letter of its forwarding method."""
    settings, rest = _settings(server, _SERVER)
    checkers = [directive for directive in rest if directive.name in _CHECKERS]
    for directive in rest:
        if directive.name not in _CHECKERS:
            directive.leave_out(directive.name in _WITHOUT_EFFECT)
    method = _method(settings.get("lb_kind") or settings.get("lvs_method"), method)
    keys = _server_keys(draft, server)
    if keys is None:
        draft.lost_servers = True
        return method
    if weight := settings.get("weight"):
        keys["weight"] = weight.weight(weight.value)
    if most := settings.get("uthreshold"):
        keys["max_connections"] = most.max_connections(most.value)
    if lower := settings.get("lthreshold"):
        lower.note(LOWER_THRESHOLD)
    _read_checks(checkers, {**virtual, **settings}, keys)
    draft.servers.append(Server(server, keys))
    return method


def _server_keys(draft: ServiceDraft, server: Directive) -> Keys | None:
    """The backend that the arguments of a real_server or sorry_server name."""
    words = server.arguments
    port = server.port(words[1]) if len(words) > 1 else None
    if len(words) > 1 and port is None:
        return None
    address = server.server_address(words[0] if words else "")
    if address is None:
        return None
    ports = {listener.port.port for listener in draft.listeners}
    # Without a port, a server has that of the virtual server.
    return server_keys(address=address, port=port or (ports.pop() if len(ports) == 1 else None))


def _read_checks(checkers: list[Directive], settings: Mapping[str, Directive], keys: Keys) -> None:
    for checker in checkers[:1]:
        keys["check"] = _check(checker, settings, keys["address"])
    for checker in checkers[1:]:
        reason = "a backend has one check, and this is another one"
        checker.lost(reason, "let a program check both: type: exec")


def _check(checker: Directive, outer: Mapping[str, Directive], server: str) -> Keys | str:
    """The check that a checker is, of a server at that address."""
    inner, rest = _settings(checker, _CHECKER)
    settings = {**outer, **inner}
    first, table = _CHECKERS[checker.name]
    check = dict(first)
    if table is _HTTP:
        rest = list(_flat(rest))
        check["host"] = _first(settings.get("virtualhost", checker.part("")))
    options = {directive.name: directive for directive in rest}
    for directive in rest:
        if directive.name not in table:
            _report_option(checker, directive, server)
            continue
        key, read = table[directive.name]
        value = read(directive)
        check[key] = check.get(key) if value is None else value
    if not _is_complete(checker, check, options):
        return UNCHECKED
    if port := settings.get("connect_port"):
        check["port"] = port.port(port.value)
    return {**check, **_timing(checker, settings)}


def _report_option(checker: Directive, directive: Directive, server: str) -> None:
    if directive.name == "connect_ip":
        if directive.arguments != [server]:
            directive.lost("a check asks the backend's own address")
    elif checker.name not in _NOT_CONVERTED:
        directive.leave_out(directive.name in _CHECKER_WITHOUT_EFFECT, _HINTS.get(directive.name, ""))


def _flat(directives: Iterable[Directive]) -> Iterator[Directive]:
    """The directives, and those in the first `url`; reports further ones."""
    urls: list[Directive] = []
    for directive in directives:
        if directive.name != "url":
            yield directive
        elif urls:
            paths = [str(path) for path in named(directive.block or (), "path")]
            reason = "a check asks for one path, and this is another one"
            directive.part(" ".join(["url", *paths])).lost(reason, "choose the path that says most")
        else:
            yield from _usable(directive.block or ())
            urls.append(directive)


def _is_complete(checker: Directive, check: Keys, options: Mapping[str, Directive]) -> bool:
    """Whether a check can judge a backend; reports where it differs from the checker, which has these
    directives."""
    if checker.name in _NOT_CONVERTED:
        reason = "has no counterpart: the backend is not checked"
        checker.part(checker.name).lost(reason, f"write check: tcp, or {_BY_PROGRAM}")
        return False
    if checker.name == "SMTP_CHECK":
        checker.part(checker.name).lost("has no counterpart: the check only connects", f"or {_BY_PROGRAM}")
    elif checker.name == "UDP_CHECK" and "payload" not in options:
        checker.part("UDP_CHECK").note("keepalived sends random bytes, vipd a zero byte")
    elif checker.name == "MISC_CHECK" and not check.get("command"):
        if "misc_path" not in options:
            _command(checker)
        return False
    elif checker.name == "MISC_CHECK" and not check.get("user"):
        options["misc_path"].note(
            "a check runs as a user without an account, with VIPD_ADDRESS and VIPD_PORT in its environment"
        )
    return True


def _timing(checker: Directive, settings: Mapping[str, Directive]) -> Keys:
    def seconds(name: str, default: float) -> float:
        setting = settings.get(name)
        number = setting.seconds(setting.value) if setting else None
        return default if number is None else number

    retries = _DEFAULT_RETRIES.get(checker.name, 1)
    if retry := settings.get("retry"):
        retries = retry.integer(retry.value, 0, MAX_COUNT) or 0
    interval = seconds("delay_loop", _DEFAULT_INTERVAL)
    if checker.name == "MISC_CHECK":
        timeout = seconds("misc_timeout", interval)
    else:
        timeout = seconds("connect_timeout", _DEFAULT_TIMEOUT)
    for name, key in (("delay_before_retry", "interval"), ("warmup", "jitter")):
        if name in settings:
            settings[name].note(f"{key} of the check holds here, too")
    alpha = settings.get("alpha")
    healthy = alpha is None or alpha.arguments in (["false"], ["off"], ["no"])
    start = "healthy" if healthy else "unhealthy"
    return {**checker.timing(interval, timeout, 1, retries + 1), "start": start}


def _status(directive: Directive) -> list[str | int] | None:
    ranges: list[str | int] = []
    for text in directive.arguments:
        if re.fullmatch(r"[1-5][0-9]{2}(?:-[1-5][0-9]{2})?", text):
            ranges.append(int(text) if text.isdecimal() else text)
        else:
            directive.lost(f"{text} is no status")
    return ranges or None


def _record_type(directive: Directive) -> str | None:
    if directive.value.upper() in DNS_TYPES:
        return directive.value.upper()
    directive.lost("no check asks for such records; SOA was written")
    return None


def _hexadecimal(directive: Directive) -> str | None:
    """The bytes that the arguments write: of a word with an odd number of digits the last one is a byte."""
    pairs: list[str] = []
    for word in directive.arguments:
        pairs += [word[start : start + 2] for start in range(0, len(word), 2)]
    try:
        payload = bytes(int(pair, 16) for pair in pairs) if all(map(str.isalnum, pairs)) else b""
    except ValueError:
        directive.lost("is not hexadecimal throughout, and was left out")
        return None
    return f"hex:{payload.hex()}" if payload else None


def _command(directive: Directive) -> list[str] | None:
    """The words of a command that needs no shell."""
    text = directive.value
    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    if words and words[0].startswith("/") and not _SHELL_SIGNS.intersection(text):
        return words
    reason = "is no program with an absolute path and plain arguments: the backend is not checked"
    directive.lost(reason, "write a script, and check: {type: exec, command: [PATH]}")
    return None


def _first(directive: Directive) -> str | None:
    return directive.arguments[0] if directive.arguments else None


_Table: TypeAlias = dict[str, tuple[str, Callable[[Directive], object]]]
_HTTP: _Table = {
    "path": ("path", _first),
    "virtualhost": ("host", _first),
    "status_code": ("status", _status),
}
_DNS: _Table = {"type": ("record", _record_type), "name": ("query", lambda directive: directive.value)}
_UDP: _Table = {
    "payload": ("send", _hexadecimal),
    "require_reply": ("expect", lambda directive: _hexadecimal(directive) or ""),
}
_MISC: _Table = {"misc_path": ("command", _command), "user": ("user", _first)}
_CHECKERS: dict[str, tuple[Keys, _Table]] = {
    "TCP_CHECK": ({"type": "tcp"}, {}),
    "HTTP_GET": ({"type": "http", "status": "200-299"}, _HTTP),
    # keepalived does not verify certificates.
    "SSL_GET": ({"type": "https", "verify": False, "status": "200-299"}, _HTTP),
    "DNS_CHECK": ({"type": "dns", "record": "SOA"}, _DNS),
    "UDP_CHECK": ({"type": "udp", "send": "hex:00"}, _UDP),
    "MISC_CHECK": ({"type": "exec"}, _MISC),
    "SMTP_CHECK": ({"type": "tcp"}, {}),
    **dict.fromkeys(_NOT_CONVERTED, ({"type": "none"}, {})),
}
"""The checkers: the check that each is without directives, and which directive is which key of it."""
