"""Reads what `ipvsadm-save -n` prints, commands of ipvsadm, one a line; also what IPVS itself means, for
keepalived. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from vipd.declaration.conversion.directives import AT_RANDOM, Directive
from vipd.declaration.conversion.draft import Conversion, Server, ServiceDraft, server_keys
from vipd.declaration.syntax import InvalidTextError, parse_backend
from vipd.model.service import Backend, Protocol

DEFAULT_SCHEDULER = "wlc"
LOWER_THRESHOLD = "a full backend gets flows again when a twentieth of them has ended"
_BALANCES = {
    **dict.fromkeys(("rr", "wrr"), "round-robin"),
    **dict.fromkeys(("sh", "mh"), "source-hash"),
    **dict.fromkeys(("lc", "wlc"), "least-connections"),
}
_HINTS = {"fo": "give all but the first backup: true", "dh": "or write balance: round-robin"} | dict.fromkeys(
    ("sed", "nq", "ovf", "lblc", "lblcr", "twos"), "or write balance: least-connections"
)
_NO_DIRECT = "replies pass through this host, and backends see its address as the client's"
METHODS = {
    "m": "",
    "g": f"direct routing has no counterpart: {_NO_DIRECT}",
    "i": f"tunnels have no counterpart: {_NO_DIRECT}",
}
"""The forwarding methods by ipvsadm's letter, each with what is lost."""


def set_balance(draft: ServiceDraft, at: Directive, scheduler: str, flags: Iterable[str]) -> None:
    """Give a draft the balance of a scheduler with these flags; report what has no counterpart."""
    if scheduler not in _BALANCES:
        at.part(f"scheduler {scheduler}").lost(AT_RANDOM, _HINTS.get(scheduler, ""))
    draft.keys["balance"] = _BALANCES.get(scheduler, "random")
    for flag in flags:
        if flag in ("sh-port", "mh-port", "flag-2"):
            draft.keys["balance"] = "random"
            at.part(flag).lost(AT_RANDOM)
        elif flag in ("sh-fallback", "mh-fallback", "flag-1"):
            at.part(flag).note("a flow never goes to a backend that is down")
        else:
            at.part(f"flag {flag}").leave_out()
    # These schedulers do not read weights, except that 0 means none.
    for server in draft.servers if scheduler in ("rr", "lc") else ():
        if server.keys["weight"] > 1:
            reason = f"the scheduler {scheduler} does not use it, so that weight 1 was written"
            server.at.part(f"{server.at} weight {server.keys['weight']}").note(reason)
            server.keys["weight"] = 1


def set_masquerade(draft: ServiceDraft, methods: Collection[str]) -> None:
    """IPVS keeps the client's address with NAT: then the backends' replies come through this host."""
    if methods and set(methods) == {"m"}:
        draft.keys["masquerade"] = "hairpin"


_LETTERS = "AaEeDdCtufspMbrgimwxyo6n"
_LONG_NAMES = (
    *("add-service", "add-server", "edit-service", "edit-server", "delete-service", "delete-server", "clear"),
    *("tcp-service", "udp-service", "fwmark-service", "scheduler", "persistent", "netmask", "sched-flags"),
    *("real-server", "gatewaying", "ipip", "masquerading", "weight", "u-threshold", "l-threshold", "ops"),
    *("ipv6", "numeric"),
)
_LONG = dict(zip(_LONG_NAMES, _LETTERS, strict=True))
"""The letters of long options; others have none."""
_WITH_VALUE = {*"tufsMbrwxyp", "sctp-service", "pe", "tun-type", "tun-port"}
_COMMANDS = {*"AaEeDdCZ", "set", "start-daemon", "stop-daemon"}
_WITHOUT_EFFECT = {"C", "Z", "set", "stop-daemon"}
_SERVICES = {"t": Protocol.TCP, "u": Protocol.UDP, "sctp-service": Protocol.SCTP}
_OPTIONS = {
    "A": {*_SERVICES, *"fspMbo6n", "pe"},
    "a": {*_SERVICES, *"frgimwxy6n", "tun-type", "tun-port", "tun-nocsum", "tun-csum", "tun-remcsum"},
}
"""The options of the commands that are converted."""
_DEFAULT_PERSISTENCE = "300"
"""Seconds of -p without a number."""


@dataclass(slots=True)
class _Virtual:
    """A virtual service while its servers are read. Without a draft it is not converted."""

    options: dict[str, str]
    draft: ServiceDraft | None = None
    methods: set[str] = field(default_factory=set)


def read_ipvsadm(conversion: Conversion, text: str) -> None:
    """Every -A and -a of the text."""
    services: dict[tuple[str, str], _Virtual] = {}
    for number, row in enumerate(text.split("\n"), 1):
        words = row.split()
        if words and words[0].rpartition("/")[2] == "ipvsadm":
            del words[0]
        if words and not words[0].startswith("#"):
            _read_command(Directive(conversion.report, number, words), services)
    for virtual in services.values():
        if draft := virtual.draft:
            flags = filter(None, virtual.options.get("b", "").split(","))
            set_balance(draft, draft.at, virtual.options.get("s", DEFAULT_SCHEDULER), flags)
            set_masquerade(draft, virtual.methods)
            conversion.add(draft)


def _read_command(line: Directive, services: dict[tuple[str, str], _Virtual]) -> None:
    command, options = _read_line(line)
    if not command:
        return
    kind = next((name for name in options if name in {*_SERVICES, "f"}), "")
    service = (kind, options.get(kind, ""))
    at = line.part(f"-{command} {_written(kind)} {service[1]}")
    if command == "a" and service not in services:
        at.lost("no -A before it adds this service")
    elif command == "a":
        _read_server(at, services[service], options)
    elif service in services:
        at.lost("stands already in this file; the first one was used")
    else:
        services[service] = _Virtual(options, _read_service(at, *service, options))


def _read_line(line: Directive) -> tuple[str, dict[str, str]]:
    """The command of a line, and its options with their values, by ipvsadm's letters. No command after
    reporting one that adds nothing."""
    command, options = "", dict[str, str]()
    for name, value in _options(line.words):
        if name in _COMMANDS and not command:
            command = name
        elif name in options:
            line.part(_written(name)).lost("stands twice on this line; the first one was used")
        else:
            options[name] = value
    if command in _WITHOUT_EFFECT:
        line.part(_written(command)).leave_out(without_effect=True)
        return "", {}
    if command not in _OPTIONS:
        hint = "" if command == "start-daemon" else "ipvsadm-save -n prints the table as -A and -a"
        line.part(*line.words[:3]).leave_out(hint=hint)
        return "", {}
    for name in sorted(options.keys() - _OPTIONS[command]):
        line.part(_written(name)).leave_out()
    return command, {name: value for name, value in options.items() if name in _OPTIONS[command]}


def _written(name: str) -> str:
    """The option of this name, as ipvsadm takes it."""
    return f"--{name}" if len(name) > 1 else f"-{name}"


def _options(words: list[str]) -> Iterator[tuple[str, str]]:
    """Each option by its letter, else by its long name, and its value."""
    rest = iter([*words, "-"])
    word = next(rest)
    for following in rest:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = _LONG.get(name, name)
        else:
            # popt takes -p360 for -p 360.
            name, value = (word[1:2], word[2:]) if word.startswith("-") and len(word) > 1 else (word, "")
            equals = value
        if not equals and name in _WITH_VALUE and not following.startswith("-"):
            value, following = following, next(rest)
        yield name, value
        word = following


def _read_service(at: Directive, kind: str, text: str, options: dict[str, str]) -> ServiceDraft | None:
    """A virtual service; None after a report."""
    if kind not in _SERVICES:
        reason = "a mark of packets has no counterpart" if kind == "f" else "names no address"
        hint = "declare the addresses and ports that the mark stands for" if kind == "f" else ""
        at.lost(f"is not converted: {reason}", hint)
        return None
    socket = _socket(at, text)
    if socket is None:
        return None
    if not socket.port:
        reason = "is not converted: a service needs its ports, and this is every port"
        at.lost(reason, "declare the ports that are in use")
        return None
    draft = ServiceDraft(at)
    draft.listen(at, _SERVICES[kind], socket.address, str(socket.port))
    _read_options(draft, options)
    return draft


def _read_options(draft: ServiceDraft, options: dict[str, str]) -> None:
    if "p" in options:
        persistence = options["p"] or _DEFAULT_PERSISTENCE
        seconds = draft.at.part("-p").seconds(persistence)
        if seconds is not None:
            draft.keys["affinity"] = draft.at.part("-p", persistence).affinity(seconds)
    if options.get("M", "") not in ("", "255.255.255.255", "128"):
        draft.at.part("-M", options["M"]).leave_out(hint="or write balance: source-hash")
    for name in sorted({"o", "pe"} & options.keys()):
        draft.at.part(f"{_written(name)} {options[name]}".rstrip()).leave_out()


def _socket(at: Directive, text: str) -> Backend | None:
    """An address and its port; port None or 0: any."""
    address, colon, port = text.rpartition(":")
    if colon and port == "0" and (address.startswith("[") or ":" not in address):
        text = address.strip("[]")
    try:
        return parse_backend(text)
    except InvalidTextError as error:
        at.lost(f"is not converted: {error.what}", "ipvsadm-save -n prints numbers alone")
        return None


def _read_server(command: Directive, virtual: _Virtual, options: dict[str, str]) -> None:
    draft = virtual.draft
    if draft is None:
        return  # reported with the service
    at = command.part(f"-r {options.get('r', '')}")
    method = next((letter for letter in "gim" if letter in options), "g")
    socket = _socket(at, options.get("r", ""))
    address = at.server_address(socket.address) if socket else None
    if socket is None or address is None:
        draft.lost_servers = True
        return
    if METHODS[method]:
        at.part(f"{at} -{method}").lost(METHODS[method])
    virtual.methods.add(method)
    most = options.get("x", "0")
    if options.get("y", "0") != "0":
        at.part(f"{at} -y {options['y']}").note(LOWER_THRESHOLD)
    keys = server_keys(
        address=address,
        # Without a port, a server has that of the virtual service.
        port=socket.port or draft.listeners[0].port.port,
        max_connections=at.part(f"{at} -x {most}").max_connections(most),
        weight=at.part(f"{at} -w").weight(options.get("w", "1")),
    )
    draft.servers.append(Server(at, keys))
