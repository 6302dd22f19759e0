"""Connects to an address without a pause, and says when that began and ceased to fail.

For each line `ADDRESS PORT QUIET PATIENCE` on standard input it says PROBING, and in the end one JSON object
with times of the monotonic clock, which all processes share:
`first_success`, `first_failure`, `last_failure`, `recovered`, which is the first success after that (null if
there was none). It ends QUIET seconds after the last failure, not before there has been one; with QUIET 0 at
the first success; in any case after PATIENCE seconds.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass

from tests.lab.steady_client import connect_once

ONE_TRY_SECONDS = 0.2
PAUSE_SECONDS = 0.0003


@dataclass
class Seen:
    first_success: float | None = None
    first_failure: float | None = None
    last_failure: float | None = None
    recovered: float | None = None

    def enough(self, quiet: float) -> bool:
        if not quiet:
            return self.first_success is not None
        return self.last_failure is not None and time.monotonic() - self.last_failure > quiet


def probe(address: str, port: int, quiet: float, patience: float) -> Seen:
    seen = Seen()
    end = time.monotonic() + patience
    while time.monotonic() < end and not seen.enough(quiet):
        began = time.monotonic()
        good = not connect_once(address, port, ONE_TRY_SECONDS)
        now = time.monotonic()
        if good:
            seen.first_success = seen.first_success or now
            if seen.last_failure is not None:
                seen.recovered = seen.recovered or now
        else:
            seen.first_failure = seen.first_failure or began
            seen.last_failure, seen.recovered = now, None
        time.sleep(PAUSE_SECONDS)
    return seen


def main() -> None:
    for line in sys.stdin:
        address, port, quiet, patience = line.split()
        print("PROBING", flush=True)
        print(json.dumps(asdict(probe(address, int(port), float(quiet), float(patience)))), flush=True)


if __name__ == "__main__":
    main()
