"""What goes on, on standard error, for whoever waits."""

from __future__ import annotations

import sys
import time

_BEGAN = time.monotonic()


def say(what: str) -> None:
    minutes, seconds = divmod(int(time.monotonic() - _BEGAN), 60)
    print(f"{minutes:3}:{seconds:02}  {what}", file=sys.stderr, flush=True)
