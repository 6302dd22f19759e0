"""Backends that answer checks as a story says, and what a vipd shows of them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from tests.lab.inside import Backends, Vipd

REFUSED = "connection refused"


def service(name: str, *backends: str, check: str = "", number: int = 1, more: str = "") -> str:
    """A service whose backends are checked by TCP each second, unless `check` says otherwise."""
    plain = "type: tcp, interval: 1s, timeout: 1s, jitter: 0%"
    keys = check if check.startswith("type:") else ", ".join(filter(None, (plain, check)))
    listed = ", ".join(backends)
    return (
        f"  - {{name: {name}, address: 10.96.{number >> 8}.{number & 255}, ports: [80/tcp], "
        f"backends: [{listed}], check: {{{keys}}}{more and f', {more}'}}}\n"
    )


class Answering(Backends):
    """What each backend answers to each question: `answer` says it. Remembers when it was asked."""

    def __init__(self, answer: Callable[[str, int], object] = lambda address, number: True) -> None:
        super().__init__()
        self._answer = answer
        self.given: dict[str, list[object]] = defaultdict(list)
        self.times: dict[str, list[float]] = defaultdict(list)

    def get(self, key: str, default: object = None) -> object:
        """One question to a backend, of which this gets its `address:port`."""
        if ":" not in key:
            return default
        answer = self._answer(key, len(self.given[key]))
        self.given[key].append(answer)
        self.times[key].append(asyncio.get_running_loop().time())
        return answer

    def pauses(self, address: str) -> list[float]:
        """Seconds between the questions to a backend."""
        return [after - before for before, after in pairwise(self.times[address])]


async def asked(vipd: Vipd, answer: object, address: str = "10.244.0.1") -> dict[str, Any]:
    """What is shown of a backend once it has given this answer to one question."""
    number = len(vipd.asked)
    vipd.backends[address] = answer
    await vipd.until(lambda: f"{address}:80" in vipd.asked[number:])
    await asyncio.sleep(0.01)
    return (await shown(vipd))[f"{address}:80"]


async def shown(vipd: Vipd, name: str = "web") -> dict[str, dict[str, Any]]:
    (forwarding,) = (await vipd.service(name))["forwardings"]
    return {endpoint["endpoint"]: endpoint for endpoint in forwarding["endpoints"]}


def shares(vipd: Vipd) -> dict[str, int]:
    """The backends of the only service that get new flows, with their shares."""
    (serving,) = vipd.kernel.serving().values()
    return serving


def told(vipd: Vipd, words: str) -> list[str]:
    """Lines of the log with these words."""
    return [record.getMessage() for record in vipd.journal if words in record.getMessage()]
