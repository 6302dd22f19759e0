"""Reads what `ipvsadm-save -n` prints, commands of ipvsadm, one a line; also what IPVS itself means, for
keepalived. Pure."""

from __future__ import annotations

from typing import TypeAlias

from vipd.declaration.conversion.directives import (
    AT_RANDOM,
    Directive,
    Keys,
    Names,
    Table,
    keys_of,
    max_connections,
    split_address,
    weight,
)
from vipd.declaration.conversion.draft import Conversion, ServiceDraft
from vipd.model.service import Protocol

DEFAULT_BALANCE = "least-connections"
"""Without a scheduler IPVS uses wlc."""
_BALANCES = {
    **dict.fromkeys(("rr", "wrr"), "round-robin"),
    **dict.fromkeys(("sh", "mh"), "source-hash"),
    **dict.fromkeys(("lc", "wlc"), "least-connections"),
}
_NO_DIRECT = "replies pass through this host, and backends see its address as the client's"
METHODS = {
    "m": "",
    "g": f"direct routing has no counterpart: {_NO_DIRECT}",
    "i": f"tunnels have no counterpart: {_NO_DIRECT}",
}
"""The forwarding methods by ipvsadm's letter, each with what is lost."""


def scheduler(directive: Directive) -> Keys:
    """The balance of the scheduler that a directive names."""
    balance = _BALANCES.get(directive.first or "wlc")
    return {"balance": balance} if balance else at_random(directive)


def at_random(directive: Directive) -> Keys:
    """Report a scheduler, or a flag of one, that has no counterpart."""
    directive.lost(AT_RANDOM)
    return {"balance": "random"}


FLAGS: Table = dict.fromkeys(("sh-port", "mh-port", "flag-2"), at_random)
IGNORED_FLAGS = Names("sh-fallback, mh-fallback, flag-1")
"""Flags of schedulers: a flow never goes to a backend that is down."""


def lower_threshold(directive: Directive) -> Keys:
    """Note how the lower threshold of a server differs."""
    directive.note("a full backend gets flows again when a twentieth of them has ended")
    return {}


def add_server(draft: ServiceDraft, at: Directive, keys: Keys, method: str, scheduler: str) -> None:
    """Add a server that gets packets by a method, and by a scheduler."""
    # These schedulers do not read weights, except that 0 means none.
    if scheduler in ("rr", "lc") and keys.get("weight", 1) > 1:
        at.note(f"the scheduler {scheduler} does not use its weight, so that weight 1 was written")
        keys["weight"] = 1
    if not draft.add(at, keys):
        return
    # IPVS keeps the client's address with NAT: then the backends' replies come through this host.
    if method == "m":
        draft.keys.setdefault("masquerade", "hairpin")
    else:
        draft.keys["masquerade"] = "auto"


_LONG_NAMES = (
    *("add-service", "add-server", "edit-service", "edit-server", "delete-service", "delete-server", "clear"),
    *("tcp-service", "udp-service", "fwmark-service", "scheduler", "persistent", "netmask", "sched-flags"),
    *("real-server", "gatewaying", "ipip", "masquerading", "weight", "u-threshold", "l-threshold", "ops"),
    *("ipv6", "numeric", "zero"),
)
_LONG = {
    f"--{name}": f"-{letter}" for name, letter in zip(_LONG_NAMES, "AaEeDdCtufspMbrgimwxyo6nZ", strict=True)
}
"""The letters of long options; others have none."""
_WITHOUT_VALUE = Names("-A, -a, -E, -e, -D, -d, -C, -Z, -g, -i, -m, -o, -6, -n, --tun-nocsum, --tun-csum")
_SERVICES = {"-t": Protocol.TCP, "-u": Protocol.UDP, "--sctp-service": Protocol.SCTP}
_SERVICE_READ = Names("-A, -t, -u, --sctp-service, -b, -6, -n")
_SERVER_READ = Names("-a, -t, -u, --sctp-service, -r, -g, -i, -m, -6, -n, --tun-*")
_DEFAULT_PERSISTENCE = "300"
"""Seconds of -p without a number."""


_Services: TypeAlias = dict[tuple[str, str], tuple[ServiceDraft | None, str]]
"""The drafts by option and address, each with its scheduler; None if it is not converted."""


def read_ipvsadm(conversion: Conversion, text: str) -> None:
    """Every -A and -a of the text."""
    services: _Services = {}
    for number, row in enumerate(text.split("\n"), 1):
        words = row.split()
        if words and words[0].rpartition("/")[2] == "ipvsadm":
            del words[0]
        if words and not words[0].startswith("#"):
            _read_command(conversion, Directive(conversion.report, number, words), services)
    for draft, _ in services.values():
        if draft:
            conversion.add(draft)


def _options(line: Directive) -> list[Directive]:
    """Each option by its letter, if it has one, with its value; a word that belongs to none is reported."""
    options: list[Directive] = []
    for word in line.words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            options.append(line.part(_LONG.get(name, name), *([value] if equals else ())))
        elif word.startswith("-") and word != "-":
            # popt takes -p360 for -p 360.
            options.append(line.part(word[:2], *filter(None, [word[2:]])))
        elif options and len(options[-1].words) == 1 and options[-1].name not in _WITHOUT_VALUE:
            options[-1].words.append(word)
        else:
            line.part(word).lost()
    return options


def _read_command(conversion: Conversion, line: Directive, services: _Services) -> None:
    options: dict[str, Directive] = {}
    for option in _options(line):
        if options.setdefault(option.name, option) is not option:
            option.lost("stands twice on this line; the first one was used")
    command = next(iter(options), "")
    if command in ("-C", "-Z", "--set", "--stop-daemon"):
        line.note()
        return
    if command not in ("-A", "-a"):
        line.lost()
        return
    kind = next((name for name in options if name in {*_SERVICES, "-f"}), "")
    service = (kind, options[kind].first if kind else "")
    at = line.part(command, *filter(None, service))
    if command == "-a" and service not in services:
        at.lost("no -A before it adds this service")
    elif command == "-a":
        _read_server(at, *services[service], options)
    elif service in services:
        at.lost("stands already in this file; the first one was used")
    else:
        name = options["-s"].first if "-s" in options else ""
        services[service] = (_read_service(conversion, at, kind, options), name)


def _read_service(
    conversion: Conversion, at: Directive, kind: str, options: dict[str, Directive]
) -> ServiceDraft | None:
    """A virtual service; None after a report."""
    draft = ServiceDraft(conversion, at, keys={"balance": DEFAULT_BALANCE})
    host, port = _split_address(options[kind].first) if kind in _SERVICES else ("", "")
    if not port.strip("0"):
        at.lost("is not converted: declare the addresses and ports that it stands for")
        return None
    draft.listen(at, _SERVICES[kind], host, port)
    draft.keys |= keys_of(options.values(), _SERVICE, (), _SERVICE_READ)
    if flags := options.get("-b"):
        parts = [flags.part(flag) for flag in filter(None, flags.first.split(","))]
        draft.keys |= keys_of(parts, FLAGS, IGNORED_FLAGS)
    return draft


def _split_address(text: str) -> tuple[str, str]:
    """Address and port; without brackets an IPv6 address has no port."""
    return (text, "") if text.count(":") > 1 and text[0] != "[" else split_address(text)


def _persistence(option: Directive) -> Keys:
    seconds = option.part("-p", option.first or _DEFAULT_PERSISTENCE).time()
    return {} if seconds is None else option.affinity(seconds)


def _netmask(option: Directive) -> Keys:
    if option.first not in ("255.255.255.255", "128"):
        option.lost()
    return {}


_SERVICE: Table = {"-s": scheduler, "-p": _persistence, "-M": _netmask}
_SERVER: Table = {
    "-w": weight,
    "-x": max_connections,
    "-y": lambda option: {} if option.first == "0" else lower_threshold(option),
}


def _read_server(
    command: Directive, draft: ServiceDraft | None, scheduler: str, options: dict[str, Directive]
) -> None:
    if draft is None:
        return  # reported with the service
    real = options.get("-r", command.part("-r", ""))
    at = command.part(*real.words)
    host, port_text = _split_address(real.first)
    port = at.port(port_text) if port_text.strip("0") else draft.only_port
    keys = keys_of(options.values(), _SERVER, (), _SERVER_READ)
    if port is None:
        draft.lost_servers = True
        return
    method = next((letter for letter in "gim" if f"-{letter}" in options), "g")
    if METHODS[method]:
        at.part(*at.words, f"-{method}").lost(METHODS[method])
    add_server(draft, at, {**keys, "address": host, "port": port}, method, scheduler)
