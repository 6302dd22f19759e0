"""A day in simulated time of every row of the table of seams: the daemon lives, what it writes and keeps has
bounds, and when the fault ends it is in sync, without help.

For the night: each time `test_seams` has every row fail once.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.seams import BESIDE, DISK, ETCD, FILES, MEANINGLESS, PROGRAMS, Seam

pytestmark = [pytest.mark.root, pytest.mark.nightly, pytest.mark.timeout(1000)]

LINES_A_CHANGE = 8
"""A file is changed each hour: what the log says of services, rules and problems then."""
CHANGES = 24
LINES_A_SEAM = 10
"""What may be said of one that fails all day, its end included."""
EVENTS_BEFORE = 10
"""Those of the start, which is no part of the day."""
MOST_GROWN_BYTES = 400_000
"""Of memory between noon and midnight: what events and reports keep has its own bounds, which fill up."""
MOST_FILES = 40
MOST_BYTES = 2_000_000
"""In the state directory, the kept events among them."""
MOST_TOLD = 5
"""Lines of `vipctl register`."""
PATIENCE_SECONDS = 900.0

GROUPS = {"beside": BESIDE, "files": (*FILES, *DISK), "programs": PROGRAMS} | {
    seam.name: (seam,) for seam in ETCD
}
"""What fails together: a seam behind one that fails first would never be passed."""
MODES = ("oserror", "garbage", "nothing", "unexpected")
WITHOUT = {("files", "nothing"), ("programs", "nothing")} | MEANINGLESS.keys()
# A time-out is an OSError, and takes real time besides.
DAYS = [
    pytest.param(*day, id="-".join(day)) for day in itertools.product(GROUPS, MODES) if day not in WITHOUT
]


def day(directory: Path, mode: str, seams: tuple[Seam, ...]) -> dict[str, Any]:
    """What `day_of_faults` finds, in a network namespace of its own."""
    command = [sys.executable, "-m", "tests.faults.day_of_faults", str(directory), mode]
    ended = subprocess.run(
        ["unshare", "--net", *command, *(seam.name for seam in seams)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize(("group", "mode"), DAYS)
def test_a_day_of_faults_has_bounds_and_an_end(group: str, mode: str, tmp_path: Path) -> None:
    seams = GROUPS[group]
    found = day(tmp_path, mode, seams)
    print(json.dumps(found, indent=1))
    assert found["before"] == "in-sync"
    assert found["alive"]
    assert found["lines"] <= LINES_A_CHANGE * CHANGES + LINES_A_SEAM * len(seams)
    assert found["lines"] - found["lines_by_noon"] <= LINES_A_CHANGE * CHANGES / 2 + 2 * len(seams)
    assert found["events"] <= found["lines"] + EVENTS_BEFORE
    assert found["grown"] <= MOST_GROWN_BYTES
    assert found["files"] <= MOST_FILES
    assert found["bytes"] <= MOST_BYTES
    assert len(found["warned"]) <= 4 * len(seams) + len(found["warned_before"])
    assert found["after"] == "in-sync"
    assert "10.244.0.99:80" in found["serves"], "what was declared last"
    assert found["still_warned"] == found["warned_before"]
    if set(seams) <= set(ETCD):
        assert found["warned"] != found["warned_before"], "status names it"
        assert found["registered"], "what keeps a backend in a service gets over it"
        assert len(found["told"]) <= 2 * MOST_TOLD, found["told"]
        assert {"10.244.9.99:80", "10.244.8.8:80"} <= set(found["serves"])
