"""A vipd in this process with its page and metrics, asked over HTTP."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.lab.inside import Vipd
from tests.observe.asking import PATIENCE_SECONDS, Series, samples

QUICK = "{type: tcp, interval: 100ms, timeout: 100ms, rise: 1, fall: 1}"


class Reply(NamedTuple):
    """What was answered over TCP."""

    status: int
    headers: dict[str, str]
    text: str


def free_address() -> str:
    """`ADDRESS:PORT` that nobody has, at an address of loopback that is this process's alone: no other one
    takes the port before it is used."""
    number = os.getpid()
    address = f"127.{64 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"
    with socket.socket() as probe:
        probe.bind((address, 0))
        return f"{address}:{probe.getsockname()[1]}"


async def get(url: str, method: str = "GET", **headers: str) -> Reply:
    """One request over a connection of its own; `Accept_Language` is `Accept-Language`."""
    from aiohttp import ClientSession

    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with ClientSession() as session, session.request(method, url, headers=named) as reply:
        return Reply(reply.status, dict(reply.headers), await reply.text())


async def listening(vipd: Vipd, setting: str) -> str:
    """`http://ADDRESS:PORT/` of a setting of an address, once it is open."""
    host, _, port = str(vipd.settings[setting]).rpartition(":")

    async def opened() -> bool:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return False
        writer.close()
        return True

    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await opened():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.01)
    return f"http://{host}:{port}/"


async def state(vipd: Vipd) -> dict[str, Any]:
    """What the status page shows."""
    url = await listening(vipd, "status_page")
    from aiohttp import ClientSession

    async with ClientSession() as session, session.get(f"{url}state") as reply:
        assert reply.status == 200
        document: dict[str, Any] = await reply.json()
        return document


async def until_state(vipd: Vipd, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The first document of the page of which a condition holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition(document := await state(vipd)):  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.05)
    return document


async def scrape(vipd: Vipd) -> Series:
    """Every sample of `/metrics`."""
    async with vipd.session.get("http://vipd/metrics") as reply:
        assert reply.status == 200
        return samples(await reply.read())


async def until_scrape(vipd: Vipd, condition: Callable[[Series], object]) -> Series:
    """The first samples of `/metrics` of which a condition holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition(series := await scrape(vipd)):  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.05)
    return series


def block(name: str, number: int, *backends: str, more: str = "", ports: str = "80/tcp") -> str:
    """One item of `services:`."""
    text = f"name: {name}, address: 10.96.0.{number}, ports: [{ports}], backends: [{', '.join(backends)}]"
    return f"  - {{{text}{', ' if more else ''}{more}}}\n"
