"""`vipctl announce`: tells a program what stands in vipd's routing table, as it changes. Needs no daemon."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from ipaddress import ip_address

import click

from vipd.cli.errors import FAILED, OK, USAGE, CliError
from vipd.host.announced_routes import DEFAULT_TABLE, RouteEvents, read_table
from vipd.model.service import Family, family_of

POLL_SECONDS = 5.0
"""Longest time until a change is told if the kernel does not report it."""
FORMATS = ("text", "exabgp")


@click.command()
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="text",
    help="text: + or - and the address; exabgp: as the process of ExaBGP.",
)
@click.option(
    "--table",
    "number",
    type=click.IntRange(1, 252),
    default=DEFAULT_TABLE,
    show_default=True,
    help="The routing table; as announce_table in vipd.yaml.",
)
@click.option(
    "--next-hop",
    "next_hops",
    multiple=True,
    metavar="ADDR",
    help="exabgp: this host's address for routes of its family; repeatable. Without one: self, which ExaBGP "
    "knows only in the family of its session.",
)
@click.option("--once", is_flag=True, help="Print what stands there now, and end.")
def announce(form: str, number: int, next_hops: tuple[str, ...], once: bool) -> int:
    """Print the addresses that this host announces by routes, then each change, until it is ended.

    They are those in vipd's routing table: while vipd restarts, none of them is withdrawn.

    \b
    vipctl announce --once
    vipctl announce --format exabgp --next-hop 192.0.2.2
    """
    hops = _next_hops(next_hops)
    if next_hops and form != "exabgp":
        raise CliError("--next-hop is for --format exabgp", code=USAGE)
    line = {"text": _text, "exabgp": lambda address, there: _exabgp(address, there, hops)}[form]
    try:
        asyncio.run(_follow(number, line, once=once))
    except OSError as error:
        raise CliError("the routes cannot be read", str(error.strerror or error), code=FAILED) from None
    return OK


async def _follow(number: int, line: Callable[[str, bool], str], *, once: bool) -> None:
    """Print changes, for ever unless `once`. A later reading that fails changes nothing: a program that is
    told nothing announces what it has been told. Raises OSError when the first one fails."""
    told: frozenset[str] | None = None
    fault = ""
    events = RouteEvents()
    try:
        await events.wait()  # open before the first reading, so that no change is missed
        while True:
            try:
                now, failed = await read_table(number), ""
            except OSError as error:
                if told is None:
                    raise
                now, failed = told, str(error.strerror or error)
            if failed and failed != fault:
                print(f"vipctl: {failed}; nothing is withdrawn", file=sys.stderr, flush=True)
            fault, before = failed, told or frozenset()
            lines = [line(address, True) for address in _sorted(now - before)]
            lines += [line(address, False) for address in _sorted(before - now)]
            told = now
            if lines:
                print("\n".join(lines))
                sys.stdout.flush()
            if once:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await events.wait()
    finally:
        events.close()


def _sorted(addresses: frozenset[str]) -> list[str]:
    return sorted(addresses, key=lambda address: (family_of(address), int(ip_address(address))))


def _next_hops(words: tuple[str, ...]) -> dict[Family, str]:
    hops: dict[Family, str] = {}
    for word in words:
        try:
            address = str(ip_address(word))
        except ValueError:
            hint = "an address such as 192.0.2.2"
            raise CliError(f"{word} is no address", hint=hint, code=USAGE) from None
        if family_of(address) in hops:
            raise CliError(f"two next hops of {family_of(address)}", code=USAGE)
        hops[family_of(address)] = address
    return hops


def _text(address: str, there: bool) -> str:
    return f"{'+' if there else '-'} {address}"


def _exabgp(address: str, there: bool, hops: dict[Family, str]) -> str:
    family = family_of(address)
    verb = "announce" if there else "withdraw"
    return f"{verb} route {address}/{family.bits} next-hop {hops.get(family, 'self')}"
