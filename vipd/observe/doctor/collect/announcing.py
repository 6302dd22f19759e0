"""What stands in vipd's routing table, who may import it, and which rules look it up."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vipd.host.announced_routes import DEFAULT_TABLE
from vipd.host.process import Runner
from vipd.host.processes import Processes
from vipd.host.route_table import PROTOCOL
from vipd.observe.doctor.facts import Announcing

ROUTING_DAEMONS = ("bird", "bird6", "zebra", "exabgp", "gobgpd", "bgpd", "ospfd", "babeld")
NAME = "vipd"
_TABLE_NAME = re.compile(r"^\s*(\d+)\s+(\S+)", re.MULTILINE)
_NAME_FILES = ("etc/iproute2/rt_tables", "usr/share/iproute2/rt_tables")


async def read_announcing(status: Mapping[str, Any], run: Runner, root: Path) -> Announcing:
    """Facts for the addresses that the daemon announces by routes; none if it announces none. Raises OSError
    and ValueError."""
    announcements = status.get("announcements") or {}
    routed = tuple(
        a["address"] for a in announcements.get("addresses", ()) if a["by"] == "routes" and a["announced"]
    )
    kept = tuple(a["address"] for a in announcements.get("addresses", ()) if a["reason"] == "last-host")
    table = int(status.get("settings", {}).get("announce_table", DEFAULT_TABLE))
    if not announcements.get("routes"):
        return Announcing()
    routes, rules, imported = [], [], set[str]()
    for family in ("-4", "-6"):
        routes += await _ip([family, "route", "show", "table", str(table)], run)
        rules += await _ip([family, "rule", "show"], run)
        imported |= {str(r["dst"]) for r in await _ip([family, "route", "show", "proto", "zebra"], run)}
    named = _names_of(table, root)
    return Announcing(
        announcements["routes"],
        table,
        routed,
        kept,
        foreign=tuple(
            str(r.get("dst")) for r in routes if str(r.get("protocol")) not in (str(PROTOCOL), NAME)
        ),
        looked_up=any(str(rule.get("table")) in (str(table), *named) for rule in rules),
        names=named,
        importers=Processes(root).running(ROUTING_DAEMONS),
        in_main=frozenset(imported),
    )


def _names_of(table: int, root: Path) -> tuple[str, ...]:
    """The names that iproute2 has for a table."""
    files = [root / name for name in _NAME_FILES]
    for name in _NAME_FILES:
        files += sorted((root / f"{name}.d").glob("*.conf"))
    found = []
    for file in files:
        try:
            text = file.read_text(errors="replace")
        except OSError:
            continue
        found += [name for number, name in _TABLE_NAME.findall(text) if number == str(table)]
    return tuple(dict.fromkeys(found))


async def _ip(words: list[str], run: Runner) -> list[Mapping[str, Any]]:
    """Objects in the output of `ip`; none for a table that was never used."""
    said = await run(["ip", "-j", *words], "")
    found = json.loads(said.stdout or "[]") if not said.exit_code else []
    return [item for item in found if isinstance(item, dict)]
