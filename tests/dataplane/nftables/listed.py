"""What nft lists, in an order that does not depend on history."""

from __future__ import annotations

from tests.dataplane.namespace import Namespace


def tables(namespace: Namespace) -> str:
    """Everything in a namespace's nftables, as nft lists it, each holder's elements sorted."""
    found = []
    for table in namespace.do("nft", "list", "ruleset").split("\ntable "):
        whole = table.replace("table ", "", 1).rstrip().removesuffix("}")
        head, *parts = whole.split("\n\n")
        opening, _, first = head.partition("{\n")
        objects = sorted(_sorted_elements(part.strip()) for part in (first, *parts))
        found.append("\n".join([opening, *objects]))
    return "\n".join(sorted(found))


def _sorted_elements(part: str) -> str:
    before, marker, rest = part.partition("elements = { ")
    inside, _, after = rest.partition(" }")
    return before + marker + ", ".join(sorted(" ".join(e.split()) for e in inside.split(","))) + after
