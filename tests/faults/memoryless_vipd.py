"""vipd whose event loop has no memory left once there is a file `no-memory` beside the settings:
`python -m tests.faults.memoryless_vipd --config FILE`."""

from __future__ import annotations

import asyncio
import runpy
import sys
from pathlib import Path
from typing import Any

FILE = "no-memory"

if __name__ == "__main__":
    _file = Path(sys.argv[sys.argv.index("--config") + 1]).with_name(FILE)
    _loop: Any = asyncio.BaseEventLoop
    _turn = _loop._run_once

    def _turn_or_fail(loop: asyncio.AbstractEventLoop) -> None:
        if _file.exists():
            raise MemoryError
        _turn(loop)

    _loop._run_once = _turn_or_fail
    runpy.run_module("vipd", run_name="__main__", alter_sys=True)
