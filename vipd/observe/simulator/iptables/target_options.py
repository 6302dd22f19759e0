"""Targets (`-j NAME`): their options as values, and the table each belongs to."""

from __future__ import annotations

from vipd.model.service import Family
from vipd.observe.simulator.iptables.options import (
    ALL_BITS,
    Extension,
    GivenOptions,
    address,
    masked,
    number,
    port,
)
from vipd.observe.simulator.iptables.targets import (
    Dnat,
    End,
    Jump,
    Masquerade,
    Redirect,
    Return,
    SetMark,
    Target,
)
from vipd.observe.simulator.outcome import RuleVerdict

_REJECTIONS = {
    Family.IPV4: frozenset(
        {
            "icmp-net-unreachable",
            "icmp-host-unreachable",
            "icmp-proto-unreachable",
            "icmp-port-unreachable",
            "icmp-net-prohibited",
            "icmp-host-prohibited",
            "icmp-admin-prohibited",
        }
    ),
    Family.IPV6: frozenset(
        {"icmp6-no-route", "icmp6-adm-prohibited", "icmp6-addr-unreachable", "icmp6-port-unreachable"}
    ),
}
_MARKS = ("--set-xmark", "--set-mark", "--or-mark", "--xor-mark", "--and-mark")


def _marking(of_connection: bool) -> Extension[Target]:
    def build(given: GivenOptions) -> Target:
        if len(given.plain()) != 1:
            raise ValueError(f"one of {', '.join(_MARKS)} is wanted")
        look_up = given.options[0]
        if look_up.name == "--set-xmark":
            return SetMark(*masked(look_up.value), of_connection)
        if look_up.name == "--set-mark":
            value, mask = masked(look_up.value)
            # The mask includes the value: `--set-mark 6/2` reads back as 0x6/0x6 (measured, iptables 1.8.9).
            return SetMark(value, mask | value, of_connection)
        bits = number(look_up.value, ALL_BITS)
        value, mask = {
            "--or-mark": (bits, bits),
            "--xor-mark": (bits, 0),
            "--and-mark": (0, ALL_BITS & ~bits),
        }[look_up.name]
        return SetMark(value, mask, of_connection)

    return Extension(build, with_value=_MARKS)


def _dnat(given: GivenOptions) -> Target:
    text = given.value("--to-destination") or ""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or rest[:1] not in ("", ":"):
            raise ValueError(f"destination {text} is not known")
        return Dnat(address(host, given.family), port(rest[1:]) if rest else None)
    if given.family is Family.IPV6:
        return Dnat(address(text, given.family), None)
    host, colon, number_text = text.partition(":")
    return Dnat(address(host, given.family), port(number_text) if colon else None)


def _redirect(given: GivenOptions) -> Target:
    to = given.value("--to-ports")
    return Redirect(None if to is None else port(to))


def _reject(given: GivenOptions) -> Target:
    tcp_only = "tcp-reset"
    default = "icmp-port-unreachable" if given.family is Family.IPV4 else "icmp6-port-unreachable"
    answer = given.value("--reject-with") or default
    if answer == tcp_only and given.protocol not in ("tcp", "6"):
        raise ValueError("--reject-with tcp-reset needs -p tcp")
    if answer != tcp_only and answer not in _REJECTIONS[given.family]:
        raise ValueError(f"--reject-with {answer} is not known")
    return End(RuleVerdict.REJECT, answer)


EXTENSIONS: dict[str, Extension[Target]] = {
    "ACCEPT": Extension(lambda _: End(RuleVerdict.ACCEPT)),
    "DROP": Extension(lambda _: End(RuleVerdict.DROP)),
    "RETURN": Extension(lambda _: Return()),
    "REJECT": Extension(_reject, ("--reject-with",)),
    "MARK": _marking(of_connection=False),
    "CONNMARK": _marking(of_connection=True),
    "DNAT": Extension(_dnat, ("--to-destination",)),
    "REDIRECT": Extension(_redirect, ("--to-ports",)),
    "MASQUERADE": Extension(lambda given: Masquerade(given.plain()), flags=("--random-fully", "--random")),
}
"""The known targets, by name. Any other name is a user chain if the table has one."""

OWN_TABLE = {"DNAT": "nat", "REDIRECT": "nat", "MASQUERADE": "nat", "REJECT": "filter", "DROP": "filter"}
"""The only table for each of these; iptables rejects it elsewhere."""


def chain_target(name: str, goto: bool) -> Extension[Target]:
    """A jump to a user chain: it has no options."""
    return Extension(lambda _: Jump(name, goto))
