"""Reading what iptables-save prints. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from vipd.dataplane.iptables.names import TABLES, ChainId, Names, Rules
from vipd.dataplane.iptables.plan import Installed

_PROBABILITY = re.compile(r"--probability (\d\.\d+)")
_PROBABILITY_SCALE = 1 << 31
"""xt_statistic keeps a probability as a whole number of 1/2^31 (contract 1.8)."""


def read_saved(text: str, names: Names) -> Installed:
    """The chains in a dump: ours, and the built-in ones (those with a policy), but not others'."""
    installed = Installed()
    rules: dict[ChainId, list[str]] = {}
    table = ""
    for line in text.splitlines():
        if line.startswith("*") or table not in TABLES:
            table = line[1:].strip() if line.startswith("*") else ""
        elif line.startswith(":"):
            name, policy = line[1:].split(" ", 2)[:2]
            chain = ChainId(table, name)
            if policy != "-" or names.owns(chain):
                rules[chain] = []
                (installed.chains if policy == "-" else installed.builtins)[chain] = ()
        elif line.startswith("-A "):
            name, _, rule = line[3:].partition(" ")
            rules.get(ChainId(table, name), []).append(rule)
    for chain, found in rules.items():
        (installed.chains if chain in installed.chains else installed.builtins)[chain] = tuple(found)
    return installed


def recognise(installed: Installed, wanted: Mapping[ChainId, Rules]) -> None:
    """Take our own spelling for chains that the kernel holds as wanted.

    The kernel prints a probability as it stored it (0.3333333333 comes back as 0.33333333349); after this,
    equal rules are equal text.
    """
    for chain, rules in wanted.items():
        found = installed.chains.get(chain)
        if found is not None and found != rules and found == tuple(map(stored_spelling, rules)):
            installed.chains[chain] = rules


def stored_spelling(rule: str) -> str:
    """A rule as iptables-save prints it after the kernel has stored it."""
    return _PROBABILITY.sub(_stored_probability, rule)


def _stored_probability(match: re.Match[str]) -> str:
    stored = round(float(match[1]) * _PROBABILITY_SCALE)
    return f"--probability {stored / _PROBABILITY_SCALE:.11f}"
