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
    DEFAULT_BALANCE,
    FLAGS,
    METHODS,
    add_server,
    lower_threshold,
    scheduler,
)
from vipd.model import limits
from vipd.model.service import Protocol

_TOKEN = re.compile(
    r'(?P<continued>\\[ \t]*\n)|(?P<end>\n)|[ \t\r\f\v]+|(?P<comment>[#!][^\n]*)|"(?P<quoted>[^"\n]*)"?'
    r'|(?P<sign>[{}])|(?P<word>(?:\$\{\w*\}|(?!\\[ \t]*\n)[^\s{}"])+)',
    re.ASCII,
)
_PROTOCOLS = {protocol.value.upper(): protocol for protocol in Protocol}
_METHODS = {"NAT": "m", "DR": "g", "TUN": "i"}
_CHECK_SETTINGS = ("delay_loop", "connect_timeout", "retry", "alpha", "virtualhost")
"""What a virtual server, a real server or a checker says of checks: the innermost one counts."""
_IGNORED = Names(
    "smtp_alert, snmp_name, omega, ha_suspend, inhibit_on_failure, sorry_server_inhibit, ip_family, "
    "sh-fallback, mh-fallback, flag-1, delay_before_retry, warmup, http_protocol, fast_recovery, "
    "log_all_failures, enable_sni, helo_name, regex_stack, regex_min_offset, regex_max_offset"
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
    line, ended = 1, 0
    for token in _TOKEN.finditer(text):
        kind = token.lastgroup or ""
        if kind == "end":
            ended = ended or line
        elif kind in ("sign", "word", "quoted"):
            if ended and token[0] != "{":
                yield ended, ";", ""
            ended = 0
            yield line, *((token[0], "") if kind == "sign" else ("", token[kind]))
        line += token[0].count("\n")
    yield line, ";", ""


def _read_virtual(
    conversion: Conversion, virtual: Directive, groups: Mapping[str, Directive]
) -> ServiceDraft | None:
    """A virtual_server; None without an address and port, which is reported."""
    draft = ServiceDraft(conversion, virtual, keys={"balance": DEFAULT_BALANCE})
    draft.keys |= keys_of(virtual.block, _VIRTUAL, _IGNORED, {*_VIRTUAL_READ, *FLAGS})
    draft.keys |= keys_of(virtual.block, FLAGS, (), _EVERY)
    settings = virtual.settings
    protocol = settings.get("protocol", virtual.part("protocol", "TCP"))
    if protocol.value.upper() not in _PROTOCOLS:
        protocol.lost("is no protocol that vipd balances")
        return None
    for member, words in _members(draft, virtual, groups):
        _read_listener(draft, member, words, _PROTOCOLS[protocol.value.upper()])
    if not draft.listeners:
        return None
    method = _method(settings.get("lb_kind") or settings.get("lvs_method"), "m")
    for server in virtual.all("real_server"):
        _read_server(draft, server, settings, method)
    if (sorry := settings.get("sorry_server")) and (keys := _socket(draft, sorry)):
        draft.add(sorry, keys, fallback=True)
        _method(settings.get("sorry_server_lvs_method"), method)
    return draft


def _method(directive: Directive | None, default: str) -> str:
    """The letter of a forwarding method; reports one that is not NAT where it is written."""
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
    "lb_algo": scheduler,
    "lvs_sched": scheduler,
    "persistence_timeout": _persistence_timeout,
    "persistence_granularity": _persistence_granularity,
}


def _members(
    draft: ServiceDraft, virtual: Directive, groups: Mapping[str, Directive]
) -> list[tuple[Directive, list[str]]]:
    """The addresses of a virtual server, or of its group, each with its words."""
    if virtual.first != "group":
        return [(virtual, virtual.arguments)]
    draft.name = " ".join(virtual.words[2:])
    if draft.name not in groups:
        virtual.lost("this file has no such virtual_server_group", "put both into one file")
        return []
    return [(member, member.words) for member in groups[draft.name].block or ()]


def _read_listener(draft: ServiceDraft, at: Directive, words: list[str], protocol: Protocol) -> None:
    """Add the address and port, or the range."""
    if at.name.startswith(ELSEWHERE):
        at.not_read()
    elif words[:1] == ["fwmark"]:
        at.lost("declare the addresses and ports that the mark stands for")
    elif len(words) < 2:
        at.lost("a service needs its ports, and this is every port")
    else:
        for address in _range(at, words[0]):
            draft.listen(at, protocol, address, words[1])


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
) -> None:
    """Add a real_server."""
    keys = keys_of(server.block, _SERVER, _IGNORED, _SERVER_READ)
    method = _method(server.last("lb_kind") or server.last("lvs_method"), method)
    socket = _socket(draft, server)
    if socket is None:
        draft.lost_servers = True
        return
    settings = {**virtual, **server.settings}
    checkers = [directive for directive in server.block if directive.name in _CHECKERS]
    for checker in checkers[:1]:
        keys["check"] = _check(checker, settings, server.first)
    for checker in checkers[1:]:
        checker.lost("a backend has one check, and this is another one")
    algorithm = virtual.get("lb_algo") or virtual.get("lvs_sched")
    add_server(draft, server, {**keys, **socket}, method, algorithm.first if algorithm else "")


def _socket(draft: ServiceDraft, server: Directive) -> Keys | None:
    """The address and port that the arguments name; without a port, that of the virtual server. None after a
    report."""
    if len(server.words) < 3:
        return {"address": server.first, "port": draft.only_port}
    port = server.port(server.words[2])
    return {"address": server.first, "port": port} if port else None


_SERVER: Table = {"weight": weight, "uthreshold": max_connections, "lthreshold": lower_threshold}


def _check(checker: Directive, outer: Mapping[str, Directive], server: str) -> Keys | str:
    """The check that a checker is, of a server at that address."""
    kind, settings = _CHECKERS[checker.name], {**outer, **checker.settings}
    at = checker.part(checker.name)
    if not kind.keys:
        at.lost("has no counterpart: the backend is not checked")
        return UNCHECKED
    if checker.name == "SMTP_CHECK":
        at.lost("has no counterpart: the check only connects")
    check = dict(kind.keys)
    if kind.table is _HTTP and (host := settings.get("virtualhost")) and host.first:
        check["host"] = host.first
    check |= keys_of(_flat(checker), kind.table, _IGNORED, _CHECKER_READ)
    if (ip := settings.get("connect_ip")) and ip.arguments != [server]:
        ip.lost("a check asks the backend's own address")
    if kind.table is _MISC and "command" not in check:
        at.lost("has no program with an absolute path and plain arguments: the backend is not checked")
        return UNCHECKED
    if port := settings.get("connect_port"):
        check |= port.key("port")
    return {**check, **_timing(checker, settings, kind)}


def _flat(checker: Directive) -> Iterator[Directive]:
    """The directives of a checker, and those in the first `url`; reports further ones."""
    urls = checker.all("url")
    for directive in checker.block:
        if directive.name != "url":
            yield directive
        elif directive is urls[0]:
            yield from directive.block
        else:
            paths = [str(path) for path in directive.all("path")]
            directive.part(" ".join(["url", *paths])).lost(
                "a check asks for one path, and this is another one"
            )


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


def _command(directive: Directive) -> Keys:
    """The words of a command that needs no shell."""
    try:
        words = shlex.split(directive.value)
    except ValueError:
        words = []
    plain = words and words[0].startswith("/") and not _SHELL_SIGNS.intersection(directive.value)
    return {"command": words} if plain else {}


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
_VIRTUAL_READ = {
    *(*_CHECK_SETTINGS, "lb_kind", "lvs_method", "protocol", "real_server", "sorry_server"),
    "sorry_server_lvs_method",
}
