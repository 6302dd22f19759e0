"""A backend of limited capacity: so many requests at once, each takes so long, others wait in a line.

Stand-alone program, standard library only. Prints READY once its port is bound. When its standard
input closes it says in one JSON object how many connections were open to it on average and at most, since the
first one.

    server.py PORT SLOTS SECONDS
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time


class Gauge:
    def __init__(self) -> None:
        self.now, self.most, self._area = 0, 0, 0.0
        self._began = self._last = 0.0

    def add(self, change: int) -> None:
        at = time.monotonic()
        self._began = self._began or at
        self._area += self.now * (at - (self._last or at))
        self._last = at
        self.now += change
        self.most = max(self.most, self.now)

    def mean(self) -> float:
        return self._area / max(self._last - self._began, 0.001)


async def serve(port: int, slots: int, seconds: float) -> None:
    free, gauge = asyncio.Semaphore(slots), Gauge()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gauge.add(1)
        try:
            if await reader.readline():
                async with free:
                    await asyncio.sleep(seconds)
                writer.write(b"done\n")
                await writer.drain()
            await reader.read()
        except OSError:
            pass
        finally:
            gauge.add(-1)
            writer.close()

    server = await asyncio.start_server(answer, "0.0.0.0", port, backlog=4096)
    async with server:
        print("READY", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        with contextlib.suppress(BrokenPipeError):  # only the slow one is asked
            os.write(1, json.dumps({"mean": gauge.mean(), "most": gauge.most}).encode() + b"\n")


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
