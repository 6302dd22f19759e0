"""Addresses that are announced beyond this host reach a routing daemon, and their packets this host. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vipd.observe.doctor.facts import Facts
from vipd.observe.doctor.finding import Check, CheckResult, listed, problem, warning

GROUP = "Announced addresses"
NAME = "vipd"
_EXAMPLES = "docs/announce.md has examples for BIRD, FRR and ExaBGP"


def check_import(facts: Facts) -> Iterator[CheckResult]:
    """A routing daemon imports vipd's table. Of BIRD and ExaBGP this host shows only whether they run."""
    found = facts.announcing
    if not found.addresses or found.importers is None:
        return
    where = f"{listed(found.addresses)} in table {found.table}"
    if not found.importers:
        cause = f"no routing daemon runs here that could import {where}: no other host learns where they are"
        yield problem("nobody announces the addresses", cause, hint=f"install and set up one: {_EXAMPLES}")
        return
    ipv4 = [address for address in found.addresses if ":" not in address]
    if found.importers & {"zebra"} and not found.importers & {"bird", "exabgp", "gobgpd"} and ipv4:
        missing = [address for address in ipv4 if address not in found.in_main]
        if missing:
            cause = f"FRR runs, and has no route for {listed(missing)}, which it has for what it imports"
            hint = f"ip import-table {found.table} in FRR, and redistribute table {found.table} in router bgp"
            yield problem("FRR does not import vipd's table", cause, hint=f"{hint}; {_EXAMPLES}")


def check_table(facts: Facts) -> Iterator[CheckResult]:
    """The table is vipd's alone, and no packet is looked up in it."""
    found = facts.announcing
    if not found.routes:
        return
    others = [name for name in found.names if name != NAME]
    if others:
        cause = (
            f"{', '.join(others)} is table {found.table} in /etc/iproute2: a routing daemon may write to it"
        )
        yield warning("vipd's routing table has another name", cause, hint="set announce_table to a free one")
    if found.foreign:
        cause = (
            f"{listed(found.foreign)} in table {found.table} are not vipd's: they are announced with its own"
        )
        hint = "delete them, or set announce_table to a free one"
        yield warning("others have routes in vipd's routing table", cause, hint=hint)
    if found.looked_up:
        cause = (
            f"a rule looks up table {found.table}: packets for announced addresses that no rule of vipd "
            "translates are dropped there"
        )
        hint = f"ip rule show table {found.table} shows it; the table is for routing daemons alone"
        yield warning("packets are looked up in vipd's routing table", cause, hint=hint)


def check_others(facts: Facts) -> Iterator[CheckResult]:
    """No announced address is kept only because no other host has it."""
    for found in facts.announcing.kept:
        cause = f"no backend can serve {found}, and no other host of the fleet announces it"
        hint = "vipctl describe shows what the checks say; announce_last: withdraw withdraws it"
        yield problem(f"{found} is announced without a backend", cause, hint=hint)


def _unread(facts: Facts) -> str:
    return facts.announcing_fault


CHECKS = (
    Check("announce-import", GROUP, "a routing daemon can import announced addresses", check_import, _unread),
    Check("announce-table", GROUP, "vipd's routing table is its own", check_table, _unread),
    Check("announce-kept", GROUP, "every announced address has a backend", check_others, _unread),
)
