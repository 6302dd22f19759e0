"""vipd that waits for programs for two seconds and no longer: `python -m tests.faults.hurried_vipd`."""

from __future__ import annotations

from vipd.__main__ import main
from vipd.daemon import daemon

PROGRAM_SECONDS = 2.0

if __name__ == "__main__":
    vars(daemon)["program_seconds"] = lambda _: PROGRAM_SECONDS
    main()
