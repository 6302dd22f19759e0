"""Reads the virtual servers of keepalived.conf. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from ipaddress import ip_address, ip_network

from vipd.declaration.conversion.directives import Directive, Sign, Token, named, tree_of
from vipd.declaration.conversion.draft import Conversion, Listener, ServiceDraft
from vipd.declaration.conversion.ipvs import (
    DEFAULT_SCHEDULER,
    LOWER_THRESHOLD,
    METHODS,
    set_balance,
    set_masquerade,
)
from vipd.declaration.conversion.keepalived_checks import (
    CHECK_SETTINGS,
    CHECKERS,
    CheckSettings,
    read_check,
    usable,
)
from vipd.declaration.fields import Located
from vipd.model import limits
from vipd.model.service import Backend, Protocol

_TOKEN = re.compile(
    r'[ \t\r\f\v]+|"(?P<quoted>[^"]*)"?|(?P<sign>[{}])|(?P<word>(?:\$\{\w*\}|[^\s{}"])+)', re.ASCII
)
_CONTINUED = re.compile(r"\\[ \t]*$")
_SIGNS = {"{": Sign.OPEN, "}": Sign.CLOSE}
_PROTOCOLS = {protocol.value.upper(): protocol for protocol in Protocol}
_METHODS = {"NAT": "m", "DR": "g", "TUN": "i"}
_DEFAULT_PERSISTENCE = 360
"""Seconds of persistence_timeout without a number."""

_FLAGS = ("flag-1", "flag-2", "flag-3", "sh-port", "sh-fallback", "mh-port", "mh-fallback")
_EVENTS = "vipd runs no program at changes; watch vipctl events"
_NO_EFFECT = {
    "smtp_alert": "vipd sends no mail; watch vipctl events",
    "snmp_name": "vipd has no SNMP; it has metrics",
    "omega": "vipd runs no program at changes",
    "ha_suspend": "checks run whether or not this host has the address",
    "inhibit_on_failure": "open TCP flows of an unhealthy backend go on in any case",
    "sorry_server_inhibit": "open TCP flows of the fallback go on in any case",
    "ip_family": "the family is that of the addresses",
}
_LOST = {
    "ops": "every packet of a UDP flow goes to the backend of the first one",
    "persistence_engine": "affinity goes by the client's address alone",
    "quorum": "the fallback serves when no backend does, and no earlier",
    "hysteresis": "there is no quorum",
    "quorum_up": _EVENTS,
    "quorum_down": _EVENTS,
    "notify_up": _EVENTS,
    "notify_down": _EVENTS,
}
_VIRTUAL = {
    "lb_algo",
    "lvs_sched",
    "lb_kind",
    "lvs_method",
    "persistence_timeout",
    "persistence_granularity",
    "protocol",
    "sorry_server",
    "sorry_server_lvs_method",
    "real_server",
    *_FLAGS,
}

_SERVER = {"weight", "uthreshold", "lthreshold", "lb_kind", "lvs_method"}


def read_keepalived(conversion: Conversion, text: str) -> None:
    """Every virtual_server of the text."""
    top = list(usable(conversion, tree_of(conversion.reading(), _tokens(text))))
    groups = {" ".join(group.arguments): group for group in named(top, "virtual_server_group")}
    for directive in top:
        if directive.name == "virtual_server":
            _read_virtual(conversion, directive, groups)
        elif directive.name == "SSL":
            why = "a check shows no certificate of its own, and has ca for those to trust"
            conversion.lost(directive.line, "SSL", why)
        elif directive.name.startswith("vrrp"):
            why = "stays with keepalived: vipd announces no address"
            conversion.note(directive.line, str(directive), why)
        elif directive.name != "virtual_server_group":
            conversion.note(directive.line, str(directive), "concerns keepalived itself")


def _tokens(text: str) -> Iterator[Token]:
    """The words and braces; a directive ends with its line, unless a brace opens the next one."""
    ended = 0
    for number, line in _lines(text):
        for token in _tokens_of(line):
            if ended and token is not Sign.OPEN:
                yield ended, Sign.END
            ended = 0
            yield number, token
        ended = ended or number
    if ended:
        yield ended, Sign.END


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their continuations after a backslash; the number is that of the first one."""
    parts: list[str] = []
    start = 0
    for number, line in enumerate(text.split("\n"), 1):
        start = start if parts else number
        continued = _CONTINUED.search(line)
        parts.append(line[: continued.start()] if continued else line)
        if not continued:
            yield start, " ".join(parts)
            parts = []
    if parts:
        yield start, " ".join(parts)


def _tokens_of(line: str) -> Iterator[str | Sign]:
    for found in _TOKEN.finditer(line):
        word = found["word"]
        if word and word[0] in "#!":
            return
        if word or found["quoted"] is not None:
            yield word or found["quoted"]
        elif found["sign"]:
            yield _SIGNS[found["sign"]]


def _read_virtual(conversion: Conversion, directive: Directive, groups: dict[str, Directive]) -> None:
    """Make a service of one virtual_server."""
    draft = ServiceDraft(directive.line, str(directive))
    found: dict[str, Directive] = {}
    servers: list[Directive] = []
    for each in usable(conversion, directive.block or ()):
        if each.name == "real_server":
            servers.append(each)
        elif each.name in _VIRTUAL or each.name in CHECK_SETTINGS:
            found[each.name] = each
        else:
            _report(conversion, each)
    protocol = _protocol(conversion, found.get("protocol"))
    if protocol is None or not _read_listeners(conversion, draft, directive, protocol, groups):
        conversion.lost(directive.line, draft.what, "is not converted")
        return
    settings = {name: each for name, each in found.items() if name in CHECK_SETTINGS}
    method = _method(conversion, found.get("lb_kind") or found.get("lvs_method"), "m")
    methods = {_read_server(conversion, draft, server, settings, method) for server in servers}
    if "sorry_server" in found:
        _read_sorry_server(conversion, draft, found["sorry_server"])
        _method(conversion, found.get("sorry_server_lvs_method"), method)
    _read_persistence(conversion, draft, found)
    scheduler = found.get("lb_algo") or found.get("lvs_sched")
    name = scheduler.arguments[0] if scheduler and scheduler.arguments else DEFAULT_SCHEDULER
    line = scheduler.line if scheduler else directive.line
    set_balance(conversion, line, draft, name, [flag for flag in _FLAGS if flag in found])
    set_masquerade(draft, methods)
    conversion.add(draft)


def _report(conversion: Conversion, directive: Directive) -> None:
    """Say what becomes of a directive that is not converted."""
    if directive.name in _NO_EFFECT:
        conversion.note(directive.line, directive.name, _NO_EFFECT[directive.name])
    elif directive.name in _LOST:
        conversion.lost(directive.line, str(directive), _LOST[directive.name])
    else:
        conversion.lost(directive.line, str(directive), "is not known, and was left out")


def _protocol(conversion: Conversion, directive: Directive | None) -> Protocol | None:
    if directive is None:
        return Protocol.TCP
    found = _PROTOCOLS.get(" ".join(directive.arguments).upper())
    if found is None:
        conversion.lost(directive.line, str(directive), "is no protocol that vipd balances")
    return found


def _method(conversion: Conversion, directive: Directive | None, default: str) -> str:
    """The letter of a forwarding method; reports one that is not NAT where it is written."""
    if directive is None:
        return default
    method = _METHODS.get(directive.arguments[0] if directive.arguments else "", "m")
    if METHODS[method]:
        conversion.lost(directive.line, str(directive), METHODS[method])
    return method


def _read_listeners(
    conversion: Conversion,
    draft: ServiceDraft,
    directive: Directive,
    protocol: Protocol,
    groups: dict[str, Directive],
) -> bool:
    """The addresses of a virtual server, or of its group; whether there are any."""
    words = directive.arguments
    places = [directive]
    if words[:1] == ["group"]:
        draft.name = " ".join(words[1:])
        group = groups.get(draft.name)
        if group is None:
            why = "this file has no such virtual_server_group"
            conversion.lost(directive.line, draft.what, why, "put both into one file")
            return False
        places = [Directive(each.line, ["", *each.words]) for each in usable(conversion, group.block or ())]
    for place in places:
        what = " ".join(filter(None, place.words))
        _read_listener(conversion, draft, replace(place, words=[what, *place.arguments]), protocol)
    return bool(draft.listeners)


def _read_listener(conversion: Conversion, draft: ServiceDraft, place: Directive, protocol: Protocol) -> None:
    """Add the address and port, or the range, that the arguments of a directive are."""
    line, what, words = place.line, place.name, place.arguments
    if words[:1] == ["fwmark"]:
        why = "a mark of packets has no counterpart"
        conversion.lost(line, what, why, "declare the addresses and ports that the mark stands for")
        return
    if len(words) < 2:
        why = "a service needs its ports, and this is every port"
        conversion.lost(line, what, why, "declare the ports that are in use")
        return
    port = conversion.port(line, what, words[1])
    if port is None:
        return
    for address in _range(conversion, line, what, words[0]):
        draft.listeners.append(Listener(address, port, protocol, line, what))


def _range(conversion: Conversion, line: int, what: str, text: str) -> Iterable[str]:
    """The addresses of `192.168.1.1`, `192.168.1.1-10`, `192.168.1.1-192.168.1.10` or `192.168.1.0/29`."""
    start, dash, end = text.partition("-")
    if not dash and "/" not in text:
        address = conversion.address(line, what, text)
        return () if address is None else (address,)
    try:
        if dash:
            first = ip_address(start)
            colon = ":" if first.version == 6 else "."
            last = ip_address(end if colon in end else f"{start.rpartition(colon)[0]}{colon}{end}")
        else:
            network = ip_network(text, strict=False)
            first, last = network[0], network[-1]
    except ValueError:
        conversion.lost(line, what, "is no range of addresses")
        return ()
    number = int(last) - int(first) + 1
    if first.version != last.version or not 0 < number <= limits.PORTS:
        conversion.lost(line, what, f"is no range of 1 to {limits.PORTS} addresses")
        return ()
    return [str(first + offset) for offset in range(number)]


def _read_server(
    conversion: Conversion,
    draft: ServiceDraft,
    directive: Directive,
    settings: CheckSettings,
    method: str,
) -> str:
    """Add a real_server; the letter of its forwarding method."""
    found: dict[str, Directive] = {}
    checkers: list[Directive] = []
    for each in usable(conversion, directive.block or ()):
        if each.name in CHECKERS:
            checkers.append(each)
        elif each.name in _SERVER or each.name in CHECK_SETTINGS:
            found[each.name] = each
        else:
            _report(conversion, each)
    method = _method(conversion, found.get("lb_kind") or found.get("lvs_method"), method)
    backend = _server(conversion, directive, draft)
    if backend is None:
        draft.lost_backends = True
        return method
    backend = _with_numbers(conversion, backend, found)
    own = {name: each for name, each in found.items() if name in CHECK_SETTINGS}
    for checker in checkers[:1]:
        backend = replace(backend, check=read_check(conversion, checker, settings | own, backend.address))
    for checker in checkers[1:]:
        why = "a backend has one check, and this is another one"
        conversion.lost(checker.line, str(checker), why, "let a program check both: type: exec")
    draft.backends.append(Located(backend, directive.line, str(directive)))
    return method


def _with_numbers(conversion: Conversion, backend: Backend, found: Mapping[str, Directive]) -> Backend:
    """The backend with the weight and the thresholds of its block."""
    if "weight" in found:
        each = found["weight"]
        backend = replace(backend, weight=conversion.weight(each.line, str(each), " ".join(each.arguments)))
    if "uthreshold" in found:
        each = found["uthreshold"]
        backend = conversion.max_connections(each.line, str(each), backend, " ".join(each.arguments))
    if "lthreshold" in found:
        conversion.note(found["lthreshold"].line, str(found["lthreshold"]), LOWER_THRESHOLD)
    return backend


def _server(conversion: Conversion, directive: Directive, draft: ServiceDraft) -> Backend | None:
    """The backend that the arguments of a real_server or sorry_server name."""
    words, what = directive.arguments, str(directive)
    # Without a port, a server has that of the virtual server.
    port = conversion.port(directive.line, what, words[1]) if len(words) > 1 else None
    if len(words) > 1 and port is None:
        return None
    backend = conversion.backend(directive.line, what, words[0] if words else "", port)
    if backend and port is None and len({each.port for each in draft.listeners}) == 1:
        return replace(backend, port=draft.listeners[0].port)
    return backend


def _read_sorry_server(conversion: Conversion, draft: ServiceDraft, directive: Directive) -> None:
    backend = _server(conversion, directive, draft)
    if backend is not None:
        draft.fallback.append(Located(backend, directive.line, str(directive)))


def _read_persistence(conversion: Conversion, draft: ServiceDraft, found: dict[str, Directive]) -> None:
    timeout = found.get("persistence_timeout")
    if timeout is not None:
        text = timeout.arguments[0] if timeout.arguments else str(_DEFAULT_PERSISTENCE)
        seconds = conversion.seconds(timeout.line, str(timeout), text)
        if seconds:
            draft.affinity = conversion.affinity(timeout.line, str(timeout), seconds)
    mask = found.get("persistence_granularity")
    if mask is not None and mask.arguments not in (["255.255.255.255"], ["128"]):
        why = "affinity is that of a client address, not of a network"
        conversion.lost(mask.line, str(mask), why, "or write balance: source-hash")
