"""The nftables table of the fast path: its text, and what of it is in the kernel. Pure.

It is a table of its own, so that a kernel that cannot do it refuses nothing else, and so that both dataplanes
can use it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass

FLOWTABLE, CHAIN = "flows", "forward"
PRIORITY = 300
"""After all usual chains of other programs, at the ingress hook and at the forward hook: what these drop is
never offloaded, and chains at the ingress hook still see every packet."""
MAX_DEVICES = 256
"""NFT_NETDEVICE_MAX of the kernel's nf_tables_api.c."""
_SAFE_NAME = re.compile(r"[A-Za-z0-9_.:@-]{1,15}")


@dataclass(frozen=True, slots=True)
class FoundTable:
    """A table of this name in the kernel."""

    devices: frozenset[str]
    """Those of the flowtable. The kernel takes a device out when it vanishes."""
    complete: bool
    """It has the flowtable, and the rule that adds flows."""


def fast_path_table(prefix: str) -> str:
    """The table's name, as nft commands have it: `inet vipd-fast-path`."""
    return f"inet {prefix.lower()}-fast-path"


def table_text(prefix: str, flow_mark: int, devices: Collection[str]) -> str:
    """The transaction that writes the table, in place of one that may be there.

    Only TCP: a removed UDP backend must get no further datagram, and most UDP flows are shorter than it takes
    to offload them. Only between Ethernet devices: the kernel builds the packet's link header itself.
    """
    table, mark = fast_path_table(prefix), f"{flow_mark:#x}"
    flowtable = f"hook ingress priority {PRIORITY}; devices = {{ {_listed(devices)} }}; counter;"
    chain = f"type filter hook forward priority {PRIORITY}; policy accept;"
    rule = (
        f"ct mark and {mark} == {mark} ct state established meta l4proto tcp"
        f" meta iiftype ether meta oiftype ether flow add @{FLOWTABLE}"
    )
    return "\n".join(
        (
            f"add table {table}",
            f"delete table {table}",
            f"add table {table}",
            f"add flowtable {table} {FLOWTABLE} {{ {flowtable} }}",
            f"add chain {table} {CHAIN} {{ {chain} }}",
            f"add rule {table} {CHAIN} {rule}",
            "",
        )
    )


def devices_text(prefix: str, devices: Collection[str]) -> str:
    """The transaction that adds devices to the flowtable; flows in it stay there."""
    table = fast_path_table(prefix)
    added = f"hook ingress priority {PRIORITY}; devices = {{ {_listed(devices)} }}; counter;"
    return f"add flowtable {table} {FLOWTABLE} {{ {added} }}\n"


def removal_text(prefix: str) -> str:
    """The transaction that removes the table; its flows pass the rules again from their next packet."""
    return f"delete table {fast_path_table(prefix)}\n"


def read_table(listed: str) -> FoundTable:
    """What `nft -j list table` shows. Raises ValueError."""
    items = json.loads(listed)["nftables"]
    flowtables = [item["flowtable"] for item in items if "flowtable" in item]
    rules = sum("rule" in item for item in items)
    devices = flowtables[0].get("dev", []) if flowtables else []
    devices = [devices] if isinstance(devices, str) else devices
    return FoundTable(frozenset(devices), complete=len(flowtables) == 1 and rules == 1)


def usable_devices(names: Collection[str], own: str) -> tuple[str, ...]:
    """Those of these devices that a flowtable can have, without vipd's own device; at most MAX_DEVICES."""
    return tuple(sorted(n for n in names if n != own and _SAFE_NAME.fullmatch(n)))[:MAX_DEVICES]


def _listed(devices: Collection[str]) -> str:
    return ", ".join(f'"{device}"' for device in sorted(devices))
