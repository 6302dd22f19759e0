"""Clients that come at random, whether those before them were answered or not.

Stand-alone program, standard library only. Prints one JSON object: the seconds that each answer took, from
the begin of the connection, and the number of clients that got none. Clients of the first SKIPPED seconds do
not count.

    client.py ADDRESS PORT CLIENTS_PER_SECOND SECONDS SKIPPED SEED
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

PATIENCE = 60.0


async def ask(address: str, port: int) -> float | None:
    began = time.monotonic()
    try:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(address, port)
            writer.write(b"ask\n")
            answer = await reader.readline()
            writer.close()
    except OSError:
        return None
    return time.monotonic() - began if answer else None


async def come(address: str, port: int, rate: float, seconds: float, skipped: float, seed: int) -> None:
    dice, began = random.Random(seed), time.monotonic()
    asked: list[tuple[float, asyncio.Task[float | None]]] = []
    at = 0.0
    while (at := at + dice.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        asked.append((at, asyncio.create_task(ask(address, port))))
    answers = [(at, await each) for at, each in asked]
    counted = [answer for at, answer in answers if at >= skipped]
    took = [answer for answer in counted if answer is not None]
    print(json.dumps({"took": took, "unanswered": len(counted) - len(took)}), flush=True)


if __name__ == "__main__":
    of_second, for_seconds, not_counted = map(float, sys.argv[3:6])
    asyncio.run(come(sys.argv[1], int(sys.argv[2]), of_second, for_seconds, not_counted, int(sys.argv[6])))
