"""Reads what `ipvsadm-save -n` prints: commands of ipvsadm, one a line. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from vipd.declaration.conversion.draft import Conversion, Listener, ServiceDraft
from vipd.declaration.conversion.ipvs import (
    DEFAULT_SCHEDULER,
    LOWER_THRESHOLD,
    METHODS,
    set_balance,
    set_masquerade,
)
from vipd.declaration.fields import Located
from vipd.declaration.syntax import InvalidTextError, parse_backend
from vipd.model.service import Backend, Protocol

_LONG = {
    "add-service": "A",
    "add-server": "a",
    "edit-service": "E",
    "edit-server": "e",
    "delete-service": "D",
    "delete-server": "d",
    "clear": "C",
    "tcp-service": "t",
    "udp-service": "u",
    "fwmark-service": "f",
    "scheduler": "s",
    "persistent": "p",
    "netmask": "M",
    "sched-flags": "b",
    "real-server": "r",
    "gatewaying": "g",
    "ipip": "i",
    "masquerading": "m",
    "weight": "w",
    "u-threshold": "x",
    "l-threshold": "y",
    "ops": "o",
    "ipv6": "6",
    "numeric": "n",
}
_WITH_VALUE = {*"tufsMbrwxyp", "sctp-service", "pe", "tun-type", "tun-port"}
_COMMANDS = {*"AaEeDdCZ", "set", "start-daemon", "stop-daemon"}
_SERVICES = {"t": Protocol.TCP, "u": Protocol.UDP, "sctp-service": Protocol.SCTP}
_SERVICE_OPTIONS = {*_SERVICES, *"fspMbo6n", "pe"}
_SERVER_OPTIONS = {*_SERVICES, *"frgimwxy6n", "tun-type", "tun-port", "tun-nocsum", "tun-csum", "tun-remcsum"}
_IGNORED = {
    "C": "the table is not cleared",
    "Z": "no counters are reset",
    "set": "the kernel's settings nf_conntrack_*_timeout end idle flows",
    "stop-daemon": "vipd synchronizes no flows",
}
_LOST = {
    "o": "every packet of a UDP flow goes to the backend of the first one",
    "pe": "affinity goes by the client's address alone",
}
_DEFAULT_PERSISTENCE = 300
"""Seconds of -p without a number."""


@dataclass(slots=True)
class _Command:
    """One line: the command, and its options with their values, by ipvsadm's letters."""

    line: int
    name: str = ""
    options: dict[str, str] = field(default_factory=dict)

    def service(self) -> tuple[str, str]:
        """The option that names the virtual service, and its value."""
        named = ((key, value) for key, value in self.options.items() if key in {*_SERVICES, "f"})
        return next(named, ("", ""))

    def __str__(self) -> str:
        kind, place = self.service()
        return f"-{self.name} {_written(kind)} {place}"


@dataclass(slots=True)
class _Virtual:
    """A virtual service while its servers are read. Without a draft it is not converted."""

    command: _Command
    draft: ServiceDraft | None
    methods: set[str] = field(default_factory=set)


def read_ipvsadm(conversion: Conversion, text: str) -> None:
    """Every -A and -a of the text."""
    services: dict[tuple[str, str], _Virtual] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        if words and words[0].rpartition("/")[2] == "ipvsadm":
            del words[0]
        if not words or words[0].startswith("#"):
            continue
        command = _command(conversion, number, words)
        if command is None:
            continue
        if command.name == "A":
            _add_service(conversion, services, command)
        else:
            _add_server(conversion, services, command)
    for virtual in services.values():
        if virtual.draft is not None:
            _finish(conversion, virtual, virtual.draft)


def _command(conversion: Conversion, line: int, words: list[str]) -> _Command | None:
    """The command of a line; None after reporting one that adds nothing."""
    command = _Command(line)
    for name, value in _options(words):
        if name in _COMMANDS and not command.name:
            command.name = name
        elif name in command.options:
            conversion.lost(line, _written(name), "stands twice on this line; the first one was used")
        else:
            command.options[name] = value
    if command.name in _IGNORED:
        conversion.note(line, _written(command.name), _IGNORED[command.name])
        return None
    allowed = {"A": _SERVICE_OPTIONS, "a": _SERVER_OPTIONS}.get(command.name)
    if allowed is None:
        why = "flows end when another host takes over" if command.name == "start-daemon" else ""
        hint = "" if why else "ipvsadm-save -n prints the table as -A and -a"
        conversion.lost(line, " ".join(words[:3]), why or "only the commands -A and -a are converted", hint)
        return None
    for name in sorted(command.options.keys() - allowed):
        conversion.lost(line, _written(name), "is not known, and was left out")
        del command.options[name]
    return command


def _written(name: str) -> str:
    """The option of this name, as ipvsadm takes it."""
    return f"--{name}" if len(name) > 1 else f"-{name}"


def _options(words: list[str]) -> Iterator[tuple[str, str]]:
    """Each option by its letter, else by its long name, and its value."""
    place = 0
    while place < len(words):
        word, place = words[place], place + 1
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = _LONG.get(name, name)
        else:
            # popt takes -p360 for -p 360.
            name, value = (word[1:2], word[2:]) if word.startswith("-") and len(word) > 1 else (word, "")
            equals = value
        if not equals and name in _WITH_VALUE and place < len(words) and not words[place].startswith("-"):
            value, place = words[place], place + 1
        yield name, value


def _add_service(
    conversion: Conversion, services: dict[tuple[str, str], _Virtual], command: _Command
) -> None:
    kind, place = command.service()
    if (kind, place) in services:
        conversion.lost(command.line, str(command), "stands already in this file; the first one was used")
        return
    draft = ServiceDraft(command.line, str(command))
    services[kind, place] = virtual = _Virtual(command, None)
    if kind not in _SERVICES:
        why = "a mark of packets has no counterpart" if kind == "f" else "names no address"
        hint = "declare the addresses and ports that the mark stands for" if kind == "f" else ""
        conversion.lost(command.line, draft.what, f"is not converted: {why}", hint)
        return
    found = _socket(conversion, command.line, draft.what, place)
    if found is None:
        return
    if not found.port:
        why = "is not converted: a service needs its ports, and this is every port"
        conversion.lost(command.line, draft.what, why, "declare the ports that are in use")
        return
    draft.listeners.append(Listener(found.address, found.port, _SERVICES[kind], command.line, draft.what))
    virtual.draft = draft
    _read_persistence(conversion, draft, command)
    for name, why in _LOST.items():
        if name in command.options:
            conversion.lost(command.line, f"{_written(name)} {command.options[name]}".rstrip(), why)


def _read_persistence(conversion: Conversion, draft: ServiceDraft, command: _Command) -> None:
    if "p" in command.options:
        text = command.options["p"] or str(_DEFAULT_PERSISTENCE)
        seconds = conversion.seconds(command.line, "-p", text)
        if seconds is not None:
            draft.affinity = conversion.affinity(command.line, f"-p {text}", seconds)
    mask = command.options.get("M", "")
    if mask not in ("", "255.255.255.255", "128"):
        why = "affinity is that of a client address, not of a network"
        conversion.lost(command.line, f"-M {mask}", why, "or write balance: source-hash")


def _socket(conversion: Conversion, line: int, what: str, text: str) -> Backend | None:
    """An address and its port; port None or 0: any."""
    address, colon, port = text.rpartition(":")
    if colon and port == "0" and (address.startswith("[") or ":" not in address):
        text = address.strip("[]")
    try:
        return parse_backend(text)
    except InvalidTextError as error:
        conversion.lost(line, what, f"is not converted: {error.what}", "ipvsadm-save -n prints numbers alone")
        return None


def _add_server(conversion: Conversion, services: dict[tuple[str, str], _Virtual], command: _Command) -> None:
    virtual = services.get(command.service())
    if virtual is None:
        conversion.lost(command.line, str(command), "no -A before it adds this service")
        return
    draft = virtual.draft
    if draft is None:
        return  # reported with the service
    text = command.options.get("r", "")
    what = f"-r {text}"
    method = next((each for each in "gim" if each in command.options), "g")
    found = _socket(conversion, command.line, what, text)
    backend = found and conversion.backend(command.line, what, found.address, found.port)
    if backend is None:
        draft.lost_backends = True
        return
    if METHODS[method]:
        conversion.lost(command.line, f"{what} -{method}", METHODS[method])
    virtual.methods.add(method)
    most = command.options.get("x", "0")
    backend = conversion.max_connections(command.line, f"{what} -x {most}", backend, most)
    if command.options.get("y", "0") != "0":
        conversion.note(command.line, f"{what} -y {command.options['y']}", LOWER_THRESHOLD)
    weight = conversion.weight(command.line, f"{what} -w", command.options.get("w", "1"))
    # Without a port, a server has that of the virtual service.
    port = backend.port or draft.listeners[0].port
    backend = replace(backend, weight=weight, port=port)
    draft.backends.append(Located(backend, command.line, what))


def _finish(conversion: Conversion, virtual: _Virtual, draft: ServiceDraft) -> None:
    flags = filter(None, virtual.command.options.get("b", "").split(","))
    scheduler = virtual.command.options.get("s", DEFAULT_SCHEDULER)
    set_balance(conversion, virtual.command.line, draft, scheduler, flags)
    set_masquerade(draft, virtual.methods)
    conversion.add(draft)
