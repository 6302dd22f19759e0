"""What differs between the dataplanes where tests of faults are concerned: their tool, and their rules.

The tests ask an `Equipment` and name no dataplane themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from tests.lab.node import Node

Rules = dict[str, list[str]]
"""What the kernel holds, in order where order matters, by a name for each part."""

LEGACY_TOOL = "iptables-legacy -w"
"""It waits for the lock that all namespaces of the machine share."""

LEARNT = ("pins", "flows")
"""Holders of the nftables table that packets fill."""


@dataclass(frozen=True)
class Equipment:
    dataplane: Literal["iptables", "nftables"]
    programs: tuple[str, ...]
    asks: str
    """Options with which those programs write nothing; these never fail."""
    complaint: str
    """How the program `{name}` says that it does not take line `{line}`, in the words `{refusal}`."""
    affinity: str
    """Text that is in each rule of affinity, and in no other."""
    lacking: str
    """What status names as missing where such rules are refused."""
    rules_of: Callable[[Node], Rules]
    """Everything in a namespace, without counters and what packets have left."""
    foreign_changes: Mapping[str, str]
    """Changes that another process may make to its rules: shell commands by name."""
    bent: Callable[[Node], str]
    """A command that sends one endpoint's flows elsewhere."""
    constant: str
    """A command that takes everything away; somebody may say it again and again."""

    legacy: bool = False

    def __str__(self) -> str:
        return f"{self.dataplane}-legacy" if self.legacy else self.dataplane

    @property
    def settings(self) -> dict[str, Any]:
        return {"dataplane": self.dataplane, **({"iptables_variant": "legacy"} if self.legacy else {})}


def saved_rules(node: Node, variant: str = "") -> Rules:
    """Every chain of iptables, by `TOOL TABLE CHAIN`."""
    found: Rules = {}
    for tool in ("iptables", "ip6tables"):
        table = ""
        for line in node.run(f"{tool}{variant}-save").stdout.splitlines():
            if line.startswith("*"):
                table = line[1:]
            elif line.startswith(":") and " - " in line:  # the kernel's own are there as long as their table
                found[f"{tool} {table} {line[1:].split()[0]}"] = []
            elif line.startswith("-A "):
                found.setdefault(f"{tool} {table} {line.split()[1]}", []).append(line)
    return found


def listed_tables(node: Node) -> Rules:
    """Every chain, map and set of vipd's tables, by `FAMILY TABLE KIND NAME`; elements sorted."""
    found: Rules = {}
    table = name = ""
    for line in node.run("nft", "list", "ruleset").stdout.splitlines():
        if line.startswith("table "):
            table = line.removeprefix("table ").removesuffix(" {")
            found[table] = []
        elif line.startswith("\t\t"):
            found[name].append(line.strip())
        elif line.endswith(" {"):
            name = f"{table} {line.strip().removesuffix(' {')}"
            found[name] = []
        elif line.startswith("\tcomment"):
            found[table].append(line.strip())
    return {n: _elements_sorted(n, lines) for n, lines in found.items() if n.split()[1] == "vipd"}


def _elements_sorted(name: str, lines: list[str]) -> list[str]:
    """A holder's lines with its elements sorted, for they come in any order; a chain's as they are."""
    start = next((at for at, line in enumerate(lines) if line.startswith("elements = {")), None)
    if start is None:
        return lines
    elements = " ".join(lines[start:]).removeprefix("elements = {").removesuffix("}").split(",")
    kept = [] if name.split()[-1] in LEARNT else sorted(" ".join(element.split()) for element in elements)
    return [*lines[:start], *kept]


def _bent_rule(node: Node, variant: str = "") -> str:
    lines = [line for chain in saved_rules(node, variant).values() for line in chain if "-j DNAT" in line]
    chain = lines[0].split()[1]
    return f"iptables{variant} -w -t nat -R {chain} 2 -p tcp -j DNAT --to-destination 10.244.0.99:1"


def _bent_element(node: Node) -> str:
    element = listed_tables(node)["ip vipd map endpoints"][-1]
    key = element.partition(" : ")[0]
    other = f"add element ip vipd endpoints {{ {key} : 10.244.0.99 . 1 }}"
    return f"nft 'delete element ip vipd endpoints {{ {key} }}; {other}'"


IPTABLES = Equipment(
    "iptables",
    ("iptables-restore", "ip6tables-restore"),
    "--version",
    "{name}: line {line} {refusal}",
    "-m recent",
    "xt_recent",
    saved_rules,
    {
        "nat flushed": "iptables -t nat -F",
        "nat flushed, chains deleted": "iptables -t nat -F; iptables -t nat -X",
        "filter flushed, chains deleted": "iptables -F; iptables -X",
        "jump deleted": "iptables -t nat -D PREROUTING 1",
        "dispatch emptied": "iptables -t nat -F VIPD-SERVICES",
        "ruleset flushed": "nft flush ruleset",
    },
    _bent_rule,
    "iptables -t nat -F",
)
NFTABLES = Equipment(
    "nftables",
    ("nft",),
    "--version",
    "/dev/stdin:{line}:1-2: Error: {refusal}",
    "update @pins",
    "dynamic maps",
    listed_tables,
    {
        "dispatch emptied": "nft flush chain ip vipd dispatch",
        "rule ahead of ours": "nft insert rule ip vipd dispatch accept",
        "rule deleted": "nft flush chain ip vipd postrouting",
        "foreign chain": "nft add chain ip vipd theirs",
        "map emptied": "nft flush map ip vipd frontends",
        "element added": "nft add element ip vipd claimed '{ 10.9.9.9 }'",
        "element deleted": "nft delete element ip vipd claimed '{ 10.96.0.1 }'",
        "map deleted": "nft delete map ip vipd node_endpoints",
        "table deleted": "nft delete table ip vipd",
        "ruleset flushed": "nft flush ruleset",
    },
    _bent_element,
    "nft flush ruleset",
)
LEGACY = replace(
    IPTABLES,
    rules_of=partial(saved_rules, variant="-legacy"),
    # nft does not touch legacy tables.
    foreign_changes={
        n: d.replace("iptables", LEGACY_TOOL) for n, d in IPTABLES.foreign_changes.items() if "nft" not in d
    },
    bent=partial(_bent_rule, variant="-legacy"),
    constant=f"{LEGACY_TOOL} -t nat -F",
    legacy=True,
)
EQUIPMENTS = (IPTABLES, NFTABLES)
