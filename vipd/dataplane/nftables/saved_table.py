"""Reads the output of `nft list` for tables, as text and with `-j` as JSON. Pure.

All readers of such output use it, except the simulator, which must understand every word, including sets and
elements. For 10,000 services vipd reads the kernel over netlink instead (`reader.py`): nft takes seconds, and
nft itself runs libnftables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_OPENED = re.compile(r"\s*(?P<kind>\w+) (?P<name>\S+) \{")
_HANDLE = re.compile(r"(?P<text>.*?)\s+# handle (?P<handle>\d{1,18})\s*")


class MalformedListingError(ValueError):
    """Output of nft that is not understood."""


class ListedRule(NamedTuple):
    """A rule as nft prints it."""

    text: str
    handle: int
    """0 if nft was called without `-a`."""


@dataclass(slots=True)
class ListedChain:
    """A chain as nft prints it."""

    hook: str = ""
    """`type filter hook forward priority filter; policy accept;` of a base chain."""
    rules: list[ListedRule] = field(default_factory=list)


def read_chains(listing: str) -> dict[str, ListedChain]:
    """The chains in the output of `nft list table`. Lines that are not understood are left out."""
    chains: dict[str, ListedChain] = {}
    chain: ListedChain | None = None
    for line in listing.splitlines():
        numbered = _HANDLE.fullmatch(line)
        line, handle = (numbered["text"], int(numbered["handle"])) if numbered else (line, 0)
        text = line.strip()
        if line.startswith("\t\t"):
            if chain is None or not text:
                continue
            if text.startswith("type "):
                chain.hook = text
            else:
                chain.rules.append(ListedRule(text, handle))
        elif opened := _OPENED.fullmatch(line):
            chain = ListedChain() if opened["kind"] == "chain" else None
            if chain is not None:
                chains[opened["name"]] = chain
        elif text == "}":
            chain = None
    return chains


def read_objects(output: str) -> list[Mapping[str, Any]]:
    """The objects in the output of `nft -j list`. Raises MalformedListingError."""
    try:
        return list(json.loads(output)["nftables"])
    except (ValueError, LookupError, TypeError) as error:
        raise MalformedListingError("what nft prints is not understood") from error
