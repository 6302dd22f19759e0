"""Makes flows on request, many requests in one process; ends when its standard input closes.

Each line on standard input is a JSON list of requests that are done at the same time: objects with `to`,
`port`, `protocol`, `timeout` and `sources`, one flow for each of those addresses. Printed is one line: for
each request how often each outcome came, keyed by the answer or the kind of failure.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
import sys
from argparse import Namespace
from typing import Any

from tests.lab.client import exchange

PARALLEL = 32

UDP_PORTS = itertools.cycle(range(20000, 60000))
"""Left to itself the kernel gives two sockets that share an address the same port now and then."""


async def made(asked: dict[str, Any]) -> collections.Counter[str]:
    """The outcomes of all flows of one request; a source port stands in no outcome."""
    outcomes: collections.Counter[str] = collections.Counter()
    left = iter(asked.pop("sources"))

    async def work() -> None:
        for source in left:
            port = next(UDP_PORTS) if asked["protocol"] == "udp" else 0
            outcome = await exchange(Namespace(source=source, source_port=port, **asked))
            outcomes[outcome.get("answer", "").rpartition(":")[0] or outcome["failure"]] += 1

    await asyncio.gather(*(work() for _ in range(PARALLEL)))
    return outcomes


async def all_made(requests: list[dict[str, Any]]) -> list[collections.Counter[str]]:
    """The outcomes of each request."""
    return await asyncio.gather(*map(made, requests))


def main() -> None:
    """Serve requests until standard input closes."""
    print("READY", flush=True)
    for line in sys.stdin:
        print(json.dumps(asyncio.run(all_made(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
