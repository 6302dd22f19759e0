"""Match extensions (`-m NAME`): their options as conditions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vipd.model.service import Family
from vipd.observe.simulator.iptables.matches import (
    Always,
    AtRandom,
    FirstSegment,
    IcmpType,
    InState,
    IsLocal,
    Marked,
    Match,
    NotSimulated,
    OverLimit,
    PortIn,
    RecentlySeen,
    Remember,
    Side,
)
from vipd.observe.simulator.iptables.options import (
    Extension,
    GivenOptions,
    masked,
    number,
    port_range,
    protocol_number,
)

Matches = tuple[Match, ...]

STATES = frozenset({"NEW", "ESTABLISHED", "RELATED", "INVALID", "UNTRACKED", "DNAT", "SNAT"})
PROBABILITY_STEPS = 2**31
"""xt_statistic stores a probability as a multiple of 1/2^31 (contract 1.8)."""

_PORTS = {
    "--sport": Side.SOURCE,
    "--source-port": Side.SOURCE,
    "--dport": Side.DESTINATION,
    "--destination-port": Side.DESTINATION,
}
_TCP_FLAGS = "--tcp-flags"
FIRST_SEGMENT = "FIN,SYN,RST,ACK SYN"
"""The flags that are compared, and the one that is set: the meaning of `--syn`."""
_ICMP_NAMES = {
    Family.IPV4: {"echo-reply": 0, "echo-request": 8, "ping": 8, "pong": 0},
    Family.IPV6: {"echo-request": 128, "ping": 128, "echo-reply": 129, "pong": 129},
}
_FULL_MASK = {Family.IPV4: "255.255.255.255", Family.IPV6: "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"}


def _transport(name: str) -> Extension[Matches]:
    def build(given: GivenOptions) -> Matches:
        _needs_protocol(given, name)
        return tuple(PortIn(_PORTS[o.name], *port_range(o.value), negated=o.negated) for o in given.options)

    return Extension(build, with_value=_PORTS)


def _tcp(given: GivenOptions) -> Matches:
    _needs_protocol(given, "tcp")
    ports = (o for o in given.options if o.name in _PORTS)
    flags = (o for o in given.options if o.name == _TCP_FLAGS)
    if wrong := [o.value for o in flags if o.value != FIRST_SEGMENT]:
        raise ValueError(f"{_TCP_FLAGS} {wrong[0]} is not known")
    return (
        *(PortIn(_PORTS[o.name], *port_range(o.value), negated=o.negated) for o in ports),
        *(FirstSegment(o.negated) for o in given.options if o.name == _TCP_FLAGS),
    )


def _icmp(family: Family, protocol: str, option: str) -> Extension[Matches]:
    def build(given: GivenOptions) -> Matches:
        if given.family is not family:
            raise ValueError(f"{option} is not known for {given.family}")
        _needs_protocol(given, protocol)
        look_up = given.required(option)
        if look_up.value == "any":
            return (Always("icmp any"),) if not look_up.negated else _refuse("! any")
        named = _ICMP_NAMES[family].get(look_up.value)
        return (IcmpType(number(look_up.value, 255) if named is None else named, look_up.negated),)

    return Extension(build, with_value=(option,))


def _needs_protocol(given: GivenOptions, name: str) -> None:
    if not given.protocol or protocol_number(given.protocol) != protocol_number(name):
        raise ValueError(f"-m {name} needs -p {name}")


def _refuse(what: str) -> Matches:
    raise ValueError(f"{what} is not known")


def _comment(given: GivenOptions) -> Matches:
    given.required("--comment")
    return (Always("comment", given.value("--comment") or ""),)


def _counter(given: GivenOptions) -> Matches:
    return (Always("nfacct", given.required("--nfacct-name").value),)


def _address_type(given: GivenOptions) -> Matches:
    given.required("--src-type", "--dst-type")
    wrong = next((o.value for o in given.options if o.value != "LOCAL"), None)
    if wrong is not None:
        raise ValueError(f"address type {wrong} is not known")
    sides = {"--src-type": Side.SOURCE, "--dst-type": Side.DESTINATION}
    return tuple(IsLocal(sides[o.name], o.negated) for o in given.options)


def _mark(given: GivenOptions) -> Matches:
    look_up = given.required("--mark")
    return (Marked(*masked(look_up.value), negated=look_up.negated),)


def _connection_mark(given: GivenOptions) -> Matches:
    look_up = given.required("--mark")
    return (Marked(*masked(look_up.value), of_connection=True, negated=look_up.negated),)


def _conntrack(given: GivenOptions) -> Matches:
    look_up = given.required("--ctstate")
    states = frozenset(look_up.value.split(","))
    if not states <= STATES:
        raise ValueError(f"state {','.join(sorted(states - STATES))} is not known")
    return (InState(states, look_up.negated),)


def _state(given: GivenOptions) -> Matches:
    option = given.required("--state")
    return _conntrack(replace(given, options=(option._replace(name="--ctstate"),)))


def _multiport(given: GivenOptions) -> Matches:
    if not given.protocol:
        raise ValueError("-m multiport needs -p")
    option = given.required("--sports", "--dports", "--ports")
    for ports in option.value.split(","):
        port_range(ports)
    return (NotSimulated(option.name),)


def _statistic(given: GivenOptions) -> Matches:
    if given.value("--mode") == "nth":
        return (_in_turn(given),)
    if given.value("--mode") != "random" or given.find("--every") or given.find("--packet"):
        raise ValueError("only --mode random and nth are known, each with its own options")
    look_up = given.required("--probability")
    probability = float(look_up.value)
    if not 0 <= probability <= 1:
        raise ValueError(f"probability {look_up.value} is not within 0..1")
    exact = round(probability * PROBABILITY_STEPS) / PROBABILITY_STEPS
    return (AtRandom(1 - exact if look_up.negated else exact),)


def _in_turn(given: GivenOptions) -> AtRandom:
    """Every n-th packet: the current count is unknown, so it counts as one in n."""
    look_up = given.required("--every")
    every = int(look_up.value)
    packet = int(given.value("--packet") or 0)
    if given.find("--probability") or not 0 <= packet < every:
        raise ValueError("--mode nth needs --every and a --packet below it")
    return AtRandom(1 - 1 / every if look_up.negated else 1 / every)


def _recent(given: GivenOptions) -> Matches:
    name = given.value("--name") or "DEFAULT"
    if (given.value("--mask") or _FULL_MASK[given.family]) != _FULL_MASK[given.family]:
        raise ValueError("--mask is known for whole addresses only")
    look_up = given.required("--set", "--rcheck")
    if look_up.name == "--rcheck" and not given.find("--set"):
        return (RecentlySeen(name, look_up.negated),)
    if look_up.negated or given.find("--rcheck") or given.find("--seconds"):
        raise ValueError("--set is known by itself only")
    return (Remember(name),)


def _limit(name: str) -> Callable[[GivenOptions], Matches]:
    def build(given: GivenOptions) -> Matches:
        if given.required(f"--{name}-above").negated:
            raise ValueError(f"! --{name}-above is not known")
        return (OverLimit(name),)

    return build


EXTENSIONS: dict[str, Extension[Matches]] = {
    "comment": Extension(_comment, ("--comment",)),
    "nfacct": Extension(_counter, ("--nfacct-name",)),
    "tcp": Extension(_tcp, (*_PORTS, _TCP_FLAGS), with_two=(_TCP_FLAGS,)),
    "udp": _transport("udp"),
    "sctp": _transport("sctp"),
    "icmp": _icmp(Family.IPV4, "icmp", "--icmp-type"),
    "icmp6": _icmp(Family.IPV6, "icmpv6", "--icmpv6-type"),
    "addrtype": Extension(_address_type, ("--src-type", "--dst-type")),
    "mark": Extension(_mark, ("--mark",)),
    "connmark": Extension(_connection_mark, ("--mark",)),
    "conntrack": Extension(_conntrack, ("--ctstate",)),
    "state": Extension(_state, ("--state",)),
    "multiport": Extension(_multiport, ("--sports", "--dports", "--ports")),
    "statistic": Extension(_statistic, ("--mode", "--probability", "--every", "--packet")),
    "recent": Extension(
        _recent, ("--name", "--seconds", "--mask"), ("--set", "--rcheck", "--reap", "--rsource")
    ),
    "connlimit": Extension(
        _limit("connlimit"), ("--connlimit-above", "--connlimit-mask"), ("--connlimit-saddr",)
    ),
    "hashlimit": Extension(
        _limit("hashlimit"),
        (
            "--hashlimit-above",
            "--hashlimit-burst",
            "--hashlimit-mode",
            "--hashlimit-name",
            "--hashlimit-srcmask",
            "--hashlimit-htable-max",
            "--hashlimit-htable-expire",
        ),
    ),
}
"""The known match extensions, by name."""

IMPLIED = {
    "tcp": "tcp",
    "udp": "udp",
    "sctp": "sctp",
    "icmp": "icmp",
    "icmpv6": "icmp6",
    "ipv6-icmp": "icmp6",
}
"""`-p NAME` makes the options of this extension available without `-m`."""
