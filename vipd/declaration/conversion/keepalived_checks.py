"""Reads the checkers of a real_server in keepalived.conf. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeAlias

from vipd.declaration.check_reader import DNS_TYPES
from vipd.declaration.conversion.directives import Directive, named
from vipd.declaration.conversion.draft import Conversion, start_of
from vipd.model.check import (
    MAX_COUNT,
    UNCHECKED,
    Check,
    DnsProbe,
    ExecProbe,
    HttpProbe,
    Probe,
    TcpProbe,
    Timing,
    UdpProbe,
)

CheckSettings: TypeAlias = dict[str, Directive]
"""What a virtual server, a real server or a checker says of checks, by name: the innermost one counts."""

CHECK_SETTINGS = (
    "delay_loop",
    "connect_timeout",
    "retry",
    "delay_before_retry",
    "warmup",
    "alpha",
    "virtualhost",
)
_OPTIONS = (*CHECK_SETTINGS, "connect_port", "misc_timeout")
_DEFAULT_INTERVAL = 60.0
_DEFAULT_TIMEOUT = 5.0
_DEFAULT_RETRIES = {"DNS_CHECK": 3, "MISC_CHECK": 0}

_OTHER_SOURCE = "a check comes from the address that this host's routes choose"
_LOST = {
    "bindto": _OTHER_SOURCE,
    "bind_if": _OTHER_SOURCE,
    "bind_port": _OTHER_SOURCE,
    "fwmark": "packets of checks have no mark",
    "misc_dynamic": "the exit code is no weight",
    "min_reply_length": "an answer of any length is good",
    "max_reply_length": "an answer of any length is good",
    "digest": "the body is not digested",
    "regex": "its language is another one",
    "regex_no_match": "a body cannot be required to lack a text",
    "regex_options": "its language is another one",
}
_HINTS = {
    "digest": "write body: with a text that the page contains",
    "regex": "write body: with a text, or an RE2 expression",
}
_NO_EFFECT = {
    "http_protocol": "a check asks by HTTP/1.1",
    "fast_recovery": "one good answer is enough",
    "log_all_failures": "vipctl events shows changes of health",
    "enable_sni": "server_name is the host that the check asks for",
    "helo_name": "nothing is sent",
    "regex_stack": "there is no regex",
    "regex_min_offset": "there is no regex",
    "regex_max_offset": "there is no regex",
}
_SHELL_SIGNS = frozenset("|&;<>()$`*?[~")


def usable(conversion: Conversion, directives: Iterable[Directive]) -> Iterator[Directive]:
    """The directives that mean themselves. Others need the host or another file, and are reported."""
    for each in directives:
        if each.name.startswith("@"):
            why = "depends on the configuration id, and was not read"
            conversion.lost(each.line, str(each), why, "write the lines of this host without it")
        elif each.name.startswith("include"):
            conversion.lost(each.line, str(each), "is not read", "put its lines into this file")
        elif each.name.startswith(("$", "~")):
            why = "definitions and repetitions are not expanded"
            conversion.lost(each.line, str(each), why, "write their lines out")
        else:
            yield each


def read_check(conversion: Conversion, checker: Directive, settings: CheckSettings, server: str) -> Check:
    """The check that a checker is, of a server at that address."""
    options = dict(settings)
    rest: list[Directive] = []
    for each in usable(conversion, checker.block or ()):
        if each.name in _OPTIONS:
            options[each.name] = each
        elif each.name == "connect_ip":
            if each.arguments != [server]:
                conversion.lost(each.line, str(each), "a check asks the backend's own address")
        else:
            rest.append(each)
    host = options["virtualhost"].arguments[0] if options.get("virtualhost", checker).arguments else ""
    probe = CHECKERS[checker.name](conversion, checker, rest, host)
    for each in rest:
        _report(conversion, each)
    if probe is None:
        return UNCHECKED
    if "connect_port" in options:
        place = options["connect_port"]
        port = conversion.port(place.line, str(place), " ".join(place.arguments))
        probe = replace(probe, port=port)
    return Check(probe, _timing(conversion, checker, options))


def _report(conversion: Conversion, directive: Directive) -> None:
    name = directive.name
    if name in _NO_EFFECT:
        conversion.note(directive.line, str(directive), _NO_EFFECT[name])
    else:
        why = _LOST.get(name, "is not known, and was left out")
        conversion.lost(directive.line, str(directive), why, _HINTS.get(name, ""))


def _timing(conversion: Conversion, checker: Directive, options: CheckSettings) -> Timing:
    def seconds(name: str, default: float) -> float:
        each = options.get(name)
        if each is None:
            return default
        found = conversion.seconds(each.line, str(each), " ".join(each.arguments))
        return default if found is None else found

    retries = _DEFAULT_RETRIES.get(checker.name, 1)
    if "retry" in options:
        each = options["retry"]
        retries = conversion.integer(each.line, str(each), " ".join(each.arguments), 0, MAX_COUNT) or 0
    interval = seconds("delay_loop", _DEFAULT_INTERVAL)
    if checker.name == "MISC_CHECK":
        timeout = seconds("misc_timeout", interval)
    else:
        timeout = seconds("connect_timeout", _DEFAULT_TIMEOUT)
    for name, why in (("delay_before_retry", "interval"), ("warmup", "jitter")):
        if name in options:
            conversion.note(options[name].line, str(options[name]), f"{why} of the check holds here, too")
    alpha = options.get("alpha")
    healthy = alpha is None or alpha.arguments in (["false"], ["off"], ["no"])
    timing = Timing(interval, timeout, rise=1, fall=retries + 1, start=start_of(healthy))
    return conversion.timing(checker.line, str(checker), timing)


def _tcp(_: Conversion, __: Directive, ___: list[Directive], ____: str) -> Probe:
    return TcpProbe()


def _http(conversion: Conversion, checker: Directive, rest: list[Directive], host: str) -> Probe:
    urls = list(named(rest, "url"))
    rest[:] = [each for each in rest if each.name != "url"]
    # keepalived does not verify certificates.
    tls = checker.name == "SSL_GET"
    probe = HttpProbe(tls=tls, verify=not tls, host=host, status=((200, 299),))
    for place, url in enumerate(urls):
        if place:
            why = "a check asks for one path, and this is another one"
            conversion.lost(url.line, _url_text(url), why, "choose the path that says most")
            continue
        for each in usable(conversion, url.block or ()):
            if each.name == "path" and each.arguments:
                probe = replace(probe, path=each.arguments[0])
            elif each.name == "virtualhost" and each.arguments:
                probe = replace(probe, host=each.arguments[0])
            elif each.name == "status_code":
                probe = replace(probe, status=_status(conversion, each) or probe.status)
            else:
                rest.append(each)
    return probe


def _url_text(url: Directive) -> str:
    return " ".join(["url", *(str(each) for each in named(url.block or (), "path"))])


def _status(conversion: Conversion, directive: Directive) -> tuple[tuple[int, int], ...]:
    found = []
    for text in directive.arguments:
        match = re.fullmatch(r"([1-5][0-9]{2})(?:-([1-5][0-9]{2}))?", text)
        if match is None:
            conversion.lost(directive.line, str(directive), f"{text} is no status")
        else:
            found.append((int(match[1]), int(match[2] or match[1])))
    return tuple(found)


def _dns(conversion: Conversion, _: Directive, rest: list[Directive], __: str) -> Probe:
    probe = DnsProbe(type="SOA")
    for each in named(list(rest), "type", "name"):
        rest.remove(each)
        text = " ".join(each.arguments)
        if each.name == "name":
            probe = replace(probe, query=text)
        elif text.upper() in DNS_TYPES:
            probe = replace(probe, type=text.upper())
        else:
            conversion.lost(each.line, str(each), "no check asks for such records; SOA was written")
    return probe


def _udp(conversion: Conversion, checker: Directive, rest: list[Directive], _: str) -> Probe:
    probe = UdpProbe(send=b"\0")
    options = {each.name: each for each in rest}
    for name in ("payload", "require_reply"):
        if name in options:
            rest.remove(options[name])
    if "payload" in options:
        probe = replace(probe, send=_hexadecimal(conversion, options["payload"]) or probe.send)
    else:
        conversion.note(checker.line, "UDP_CHECK", "keepalived sends random bytes, vipd a zero byte")
    if "require_reply" in options:
        probe = replace(probe, expect=_hexadecimal(conversion, options["require_reply"]) or b"")
    return probe


def _hexadecimal(conversion: Conversion, directive: Directive) -> bytes | None:
    """The bytes that the arguments write: of a word with an odd number of digits the last one is a byte."""
    pairs: list[str] = []
    for word in directive.arguments:
        pairs += [word[place : place + 2] for place in range(0, len(word), 2)]
    try:
        return bytes(int(pair, 16) for pair in pairs) if all(map(str.isalnum, pairs)) else None
    except ValueError:
        conversion.lost(directive.line, str(directive), "is not hexadecimal throughout, and was left out")
        return None


def _misc(conversion: Conversion, checker: Directive, rest: list[Directive], _: str) -> Probe | None:
    options = {each.name: each for each in rest}
    for name in ("misc_path", "user"):
        if name in options:
            rest.remove(options[name])
    path = options.get("misc_path", checker)
    command = _command(" ".join(path.arguments))
    if command is None:
        why = "is no program with an absolute path and plain arguments: the backend is not checked"
        conversion.lost(path.line, str(path), why, "write a script, and check: {type: exec, command: [PATH]}")
        return None
    user = options.get("user")
    if user is not None and user.arguments:
        return ExecProbe(command=command, user=user.arguments[0])
    why = "a check runs as a user without an account, with VIPD_ADDRESS and VIPD_PORT in its environment"
    conversion.note(path.line, str(path), why)
    return ExecProbe(command=command)


def _command(text: str) -> tuple[str, ...] | None:
    """The words of a command that needs no shell."""
    try:
        words = shlex.split(text)
    except ValueError:
        return None
    plain = words and words[0].startswith("/") and not _SHELL_SIGNS.intersection(text)
    return tuple(words) if plain else None


def _smtp(conversion: Conversion, checker: Directive, _: list[Directive], __: str) -> Probe:
    why = "a check does not speak SMTP: it only connects"
    conversion.lost(checker.line, checker.name, why, "or let a program check it: type: exec")
    return TcpProbe()


def _none(conversion: Conversion, checker: Directive, rest: list[Directive], _: str) -> None:
    why = "has no counterpart: the backend is not checked"
    conversion.lost(
        checker.line, checker.name, why, "write check: tcp, or let a program check it: type: exec"
    )
    rest.clear()


_Reader: TypeAlias = Callable[[Conversion, Directive, list[Directive], str], Probe | None]

CHECKERS: dict[str, _Reader] = {
    "TCP_CHECK": _tcp,
    "HTTP_GET": _http,
    "SSL_GET": _http,
    "DNS_CHECK": _dns,
    "UDP_CHECK": _udp,
    "MISC_CHECK": _misc,
    "SMTP_CHECK": _smtp,
    "PING_CHECK": _none,
    "BFD_CHECK": _none,
    "FILE_CHECK": _none,
}
"""The checkers. Each reader takes its checker, what in it is left to read, and the virtualhost; it removes
what it reads."""
