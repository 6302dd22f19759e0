"""Reads the virtual servers of keepalived.conf. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from ipaddress import ip_address, ip_network
from typing import NamedTuple

from vipd.declaration.conversion.directives import (
    ELSEWHERE,
    Directive,
    Keys,
    Names,
    Table,
    Token,
    keys_of,
    max_connections,
    number_in,
    tree_of,
    weight,
)
from vipd.declaration.conversion.draft import UNCHECKED, Conversion, ServiceDraft
from vipd.declaration.conversion.ipvsadm import (
    DEFAULT_SCHEDULER,
    METHODS,
    lower_threshold,
    set_balance,
    set_masquerade,
)
from vipd.model import limits
from vipd.model.service import Protocol

_TOKEN = re.compile(
    r'[ \t\r\f\v]+|"(?P<quoted>[^"]*)"?|(?P<sign>[{}])|(?P<word>(?:\$\{\w*\}|[^\s{}"])+)', re.ASCII
)
_CONTINUED = re.compile(r"\\[ \t]*$")
_PROTOCOLS = {protocol.value.upper(): protocol for protocol in Protocol}
_METHODS = {"NAT": "m", "DR": "g", "TUN": "i"}
_FLAGS = ("flag-1", "flag-2", "flag-3", "sh-port", "sh-fallback", "mh-port", "mh-fallback")
_CHECK_SETTINGS = (
    *("delay_loop", "connect_timeout", "retry", "delay_before_retry", "warmup", "alpha", "virtualhost"),
)
"""What a virtual server, a real server or a checker says of checks: the innermost one counts."""
_VIRTUAL_READ = {
    *(*_CHECK_SETTINGS, *_FLAGS, "lb_algo", "lvs_sched", "lb_kind", "lvs_method", "protocol", "real_server"),
    *("sorry_server", "sorry_server_lvs_method"),
}
_IGNORED = Names(
    "smtp_alert, snmp_name, omega, ha_suspend, inhibit_on_failure, sorry_server_inhibit, ip_family"
)
_CHECKER_IGNORED = Names(
    "http_protocol, fast_recovery, log_all_failures, enable_sni, helo_name, regex_stack, regex_min_offset, "
    "regex_max_offset"
)
_SHELL_SIGNS = frozenset("|&;<>()$`*?[~")


def read_keepalived(conversion: Conversion, text: str) -> None:
    """Every virtual_server of the text."""
    top = tree_of(conversion.report, _tokens(text))
    groups = {group.value: group for group in top if group.name == "virtual_server_group"}
    for directive in top:
        if directive.name == "virtual_server":
            if draft := _read_virtual(conversion, directive, groups):
                conversion.add(draft)
            else:
                directive.lost("is not converted")
        elif directive.name == "SSL":
            directive.lost()
        elif directive.name.startswith("vrrp"):
            directive.note("stays with keepalived: vipd announces no address")
        else:
            keys_of([directive], {}, _EVERY, {"virtual_server_group"})


_EVERY = Names("*")


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


def _read_virtual(
    conversion: Conversion, virtual: Directive, groups: Mapping[str, Directive]
) -> ServiceDraft | None:
    """A virtual_server; None without an address and port, which is reported."""
    draft = ServiceDraft(conversion, virtual)
    draft.keys = keys_of(virtual.block or (), _VIRTUAL, _IGNORED, _VIRTUAL_READ)
    settings = _settings(virtual)
    protocol = settings.get("protocol", virtual.part("protocol", "TCP"))
    if protocol.value.upper() not in _PROTOCOLS:
        protocol.lost("is no protocol that vipd balances")
        return None
    for member in _members(draft, virtual, groups):
        _read_listener(draft, member, _PROTOCOLS[protocol.value.upper()])
    if not draft.listeners:
        return None
    method = _method(virtual, "m")
    methods = {_read_server(draft, server, settings, method) for server in virtual.all("real_server")}
    if sorry := settings.get("sorry_server"):
        _add(draft, sorry, {}, fallback=True)
        _method(virtual, method, "sorry_server_lvs_method")
    scheduler = settings.get("lb_algo") or settings.get("lvs_sched") or virtual.part("lb_algo")
    flags = [flag for flag in _FLAGS if flag in settings]
    set_balance(draft, scheduler, scheduler.first or DEFAULT_SCHEDULER, flags)
    set_masquerade(draft, methods)
    return draft


def _settings(block: Directive) -> dict[str, Directive]:
    """The directives of a block that count."""
    return {directive.name: directive for directive in block.block or ()}


def _method(block: Directive, default: str, *names: str) -> str:
    """The letter of a forwarding method; reports one that is not NAT where it is written."""
    written = (block.last(name) for name in names or ("lb_kind", "lvs_method"))
    directive = next(filter(None, written), None)
    if directive is None:
        return default
    method = _METHODS.get(directive.first, "m")
    if METHODS[method]:
        directive.lost(METHODS[method])
    return method


def _persistence_timeout(directive: Directive) -> Keys:
    seconds = directive.part(directive.name, directive.first or "360").time()
    return directive.affinity(seconds) if seconds else {}


def _persistence_granularity(directive: Directive) -> Keys:
    if directive.arguments not in (["255.255.255.255"], ["128"]):
        directive.lost()
    return {}


_VIRTUAL: Table = {
    "persistence_timeout": _persistence_timeout,
    "persistence_granularity": _persistence_granularity,
}


def _members(draft: ServiceDraft, virtual: Directive, groups: Mapping[str, Directive]) -> list[Directive]:
    """The addresses of a virtual server, or of its group."""
    if virtual.first != "group":
        return [virtual.part("", *virtual.arguments)]
    draft.name = " ".join(virtual.words[2:])
    if draft.name not in groups:
        virtual.lost("this file has no such virtual_server_group", "put both into one file")
        return []
    return [member.part("", *member.words) for member in groups[draft.name].block or ()]


def _read_listener(draft: ServiceDraft, member: Directive, protocol: Protocol) -> None:
    """Add the address and port, or the range."""
    at = member.part(member.value)
    if member.first.startswith(ELSEWHERE):
        at.not_read()
    elif member.first == "fwmark":
        at.lost("declare the addresses and ports that the mark stands for")
    elif len(member.words) < 3:
        at.lost("a service needs its ports, and this is every port")
    else:
        for address in _range(at, member.first):
            draft.listen(at, protocol, address, member.words[2])


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


def _read_server(
    draft: ServiceDraft, server: Directive, virtual: Mapping[str, Directive], method: str
) -> str:
    """Add a real_server; the letter of its forwarding method."""
    keys = keys_of(server.block or (), _SERVER, _IGNORED, _SERVER_READ)
    settings = {**virtual, **_settings(server)}
    for number, checker in enumerate(d for d in server.block or () if d.name in _CHECKERS):
        if number:
            checker.lost("a backend has one check, and this is another one")
        else:
            keys["check"] = _check(checker, settings, server.first)
    _add(draft, server, keys)
    return _method(server, method)


def _add(draft: ServiceDraft, at: Directive, keys: Keys, *, fallback: bool = False) -> None:
    """Add the server that the arguments name; without a port it has that of the virtual server."""
    port = at.port(at.words[2]) if len(at.words) > 2 else draft.only_port
    if port is None and len(at.words) > 2:
        draft.lost_servers = draft.lost_servers or not fallback
    else:
        draft.add(at, {**keys, "address": at.first, "port": port}, fallback=fallback)


_SERVER: Table = {"weight": weight, "uthreshold": max_connections, "lthreshold": lower_threshold}


def _check(checker: Directive, outer: Mapping[str, Directive], server: str) -> Keys | str:
    """The check that a checker is, of a server at that address."""
    kind, settings = _CHECKERS[checker.name], {**outer, **_settings(checker)}
    at = checker.part(checker.name)
    if not kind.keys:
        at.lost("has no counterpart: the backend is not checked")
        return UNCHECKED
    if checker.name == "SMTP_CHECK":
        at.lost("has no counterpart: the check only connects")
    check = dict(kind.keys)
    if kind.table is _HTTP and (host := settings.get("virtualhost")) and host.first:
        check["host"] = host.first
    own = list(_flat(checker))
    check |= keys_of(own, kind.table, _CHECKER_IGNORED, _CHECKER_READ)
    if (ip := settings.get("connect_ip")) and ip.arguments != [server]:
        ip.lost("a check asks the backend's own address")
    if "send" in check and not any(directive.name == "payload" for directive in own):
        at.note("keepalived sends random bytes, vipd a zero byte")
    if check["type"] == "exec" and not _is_command(checker, check):
        return UNCHECKED
    if port := settings.get("connect_port"):
        check |= port.key("port")
    return {**check, **_timing(checker, settings, kind)}


def _flat(checker: Directive) -> Iterator[Directive]:
    """The directives of a checker, and those in the first `url`; reports further ones."""
    urls = checker.all("url")
    for directive in checker.block or ():
        if directive.name != "url":
            yield directive
        elif directive is urls[0]:
            yield from directive.block or ()
        else:
            paths = [str(path) for path in directive.all("path")]
            directive.part(" ".join(["url", *paths])).lost(
                "a check asks for one path, and this is another one"
            )


def _is_command(checker: Directive, check: Keys) -> bool:
    """Whether a check has its program; notes whose it is."""
    path = checker.last("misc_path")
    if "command" not in check:
        if path is None:
            checker.part(checker.name).lost(_NO_PROGRAM)
        return False
    if path and "user" not in check:
        path.note(
            "a check runs as a user without an account, with VIPD_ADDRESS and VIPD_PORT in its environment"
        )
    return True


def _timing(checker: Directive, settings: Mapping[str, Directive], kind: _Checker) -> Keys:
    def seconds(name: str, default: float) -> float:
        number = settings[name].time() if name in settings else None
        return default if number is None else number

    retry = settings.get("retry")
    retries = kind.retries if retry is None else number_in(retry.first)
    if not isinstance(retries, int):
        settings["retry"].lost(f"{retries} is not a number")
        retries = 0
    interval = seconds("delay_loop", 60.0)
    program = checker.name == "MISC_CHECK"
    timeout = seconds("misc_timeout", interval) if program else seconds("connect_timeout", 5.0)
    for name, key in (("delay_before_retry", "interval"), ("warmup", "jitter")):
        if name in settings:
            settings[name].note(f"{key} of the check holds here, too")
    alpha = settings.get("alpha")
    healthy = alpha is None or alpha.arguments in (["false"], ["off"], ["no"])
    start = "healthy" if healthy else "unhealthy"
    return {**checker.part(checker.name).timing(interval, timeout, 1, retries + 1), "start": start}


def _hexadecimal(directive: Directive) -> str:
    """The bytes that the arguments write: of a word with an odd number of digits the last one is a byte."""
    pairs: list[str] = []
    for word in directive.arguments:
        pairs += [word[start : start + 2] for start in range(0, len(word), 2)]
    try:
        payload = bytes(int(pair, 16) for pair in pairs) if all(map(str.isalnum, pairs)) else b""
    except ValueError:
        directive.lost("is not hexadecimal throughout, and was left out")
        payload = b""
    return f"hex:{payload.hex()}" if payload else ""


_NO_PROGRAM = "is no program with an absolute path and plain arguments: the backend is not checked"


def _command(directive: Directive) -> Keys:
    """The words of a command that needs no shell."""
    text = directive.value
    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    if words and words[0].startswith("/") and not _SHELL_SIGNS.intersection(text):
        return {"command": words}
    directive.lost(_NO_PROGRAM, "write a script, and check: {type: exec, command: [PATH]}")
    return {}


def _text(key: str) -> Callable[[Directive], Keys]:
    """The reader of a key whose value is the first argument."""
    return lambda directive: {key: directive.first} if directive.first else {}


def _payload(directive: Directive) -> Keys:
    return {"send": payload} if (payload := _hexadecimal(directive)) else {}


_HTTP: Table = {
    "path": _text("path"),
    "virtualhost": _text("host"),
    "status_code": lambda directive: directive.key("status", [*map(number_in, directive.arguments)]),
}
_DNS: Table = {
    "type": lambda directive: directive.key("record", directive.value.upper()),
    "name": lambda directive: {"query": directive.value},
}
_UDP: Table = {"payload": _payload, "require_reply": lambda directive: {"expect": _hexadecimal(directive)}}
_MISC: Table = {"misc_path": _command, "user": _text("user")}


class _Checker(NamedTuple):
    """What a checker is without directives, and which directive is which key of it."""

    keys: Keys
    table: Table
    retries: int = 1


_CHECKERS = {
    "TCP_CHECK": _Checker({"type": "tcp"}, {}),
    "HTTP_GET": _Checker({"type": "http", "status": "200-299"}, _HTTP),
    # keepalived does not verify certificates.
    "SSL_GET": _Checker({"type": "https", "verify": False, "status": "200-299"}, _HTTP),
    "DNS_CHECK": _Checker({"type": "dns", "record": "SOA"}, _DNS, retries=3),
    "UDP_CHECK": _Checker({"type": "udp", "send": "hex:00"}, _UDP),
    "MISC_CHECK": _Checker({"type": "exec"}, _MISC, retries=0),
    "SMTP_CHECK": _Checker({"type": "tcp"}, {}),
    **dict.fromkeys(("PING_CHECK", "BFD_CHECK", "FILE_CHECK"), _Checker({}, {})),
}
_SERVER_READ = {*_CHECK_SETTINGS, *_CHECKERS, "lb_kind", "lvs_method"}
_CHECKER_READ = {*_CHECK_SETTINGS, "connect_port", "connect_ip", "misc_timeout"}
