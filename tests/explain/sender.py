"""Makes flows on request, many requests in one process; ends when its standard input closes.

Each line on standard input is a JSON object with `to`, `port`, `protocol`, `timeout` and `sources`, one flow
for each of those addresses. Printed is one line: a JSON object with how often each outcome came, keyed by the
answer or the kind of failure.
"""

from __future__ import annotations

import asyncio
import collections
import json
import sys
from argparse import Namespace
from typing import Any

from tests.lab.client import exchange

PARALLEL = 32


async def made(asked: dict[str, Any]) -> collections.Counter[str]:
    """The outcomes of all flows of one request; a source port stands in no outcome."""
    outcomes: collections.Counter[str] = collections.Counter()
    left = iter(asked.pop("sources"))

    async def work() -> None:
        for source in left:
            outcome = await exchange(Namespace(source=source, source_port=0, **asked))
            outcomes[outcome.get("answer", "").rpartition(":")[0] or outcome["failure"]] += 1

    await asyncio.gather(*(work() for _ in range(PARALLEL)))
    return outcomes


def main() -> None:
    """Serve requests until standard input closes."""
    print("READY", flush=True)
    for line in sys.stdin:
        print(json.dumps(asyncio.run(made(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
