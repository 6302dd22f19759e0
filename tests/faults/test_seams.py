"""Every seam of `seams.py` fails in every way: the daemon lives, others are served, and status names the
culprit."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.faults.dataplanes import Equipment
from tests.faults.seams import BESIDE, MODES, Seam
from tests.lab.daemon import Daemon
from tests.lab.topology import Lab

pytestmark = [pytest.mark.root, pytest.mark.slow]

WATCHED = "  - {name: watched, address: 10.96.7.1, ports: [80/tcp], backends: [10.244.0.11]}\n"
ASKED = """\
  - {name: asked, address: 10.96.7.2, ports: [80/tcp], backends: [10.244.0.11],
     check: {type: exec, command: [/bin/true], user: nobody}}
"""


class FaultyDaemon(Daemon):
    """A daemon with seams that fail when told to."""

    module = "tests.faults.faulty_vipd"

    def fail(self, mode: str, *seams: Seam) -> None:
        """These fail from now on, in this way, and no others."""
        (self.directory / "faults").write_text("".join(f"{mode} {seam.name}\n" for seam in seams))

    def touch(self, number: int) -> None:
        """Declare something else, so that seams are passed."""
        self.write(WATCHED.replace("0.11", f"0.{20 + number % 100}"), "watched.yaml")
        self.write(ASKED.replace("/bin/true", f"/bin/true, x{number}"), "asked.yaml")


@pytest.fixture(scope="module")
def daemon(lab: Lab, equipment: Equipment) -> Iterator[FaultyDaemon]:
    with FaultyDaemon(lab.host, **equipment.settings) as running:
        running.touch(0)
        running.vipctl("reload")
        yield running


@pytest.mark.parametrize("seams", [BESIDE[:1], BESIDE[1:]], ids=["files", "others"])
@pytest.mark.parametrize("mode", MODES)
def test_what_fails_beside_holds_up_nobody_and_is_named(
    daemon: FaultyDaemon, equipment: Equipment, mode: str, seams: tuple[Seam, ...]
) -> None:
    number, pid = 1 + MODES.index(mode) + len(MODES) * len(seams), daemon.status()["pid"]
    daemon.fail(mode, *seams)
    daemon.touch(number)
    daemon.host.run(
        "sh",
        "-c",
        equipment.deeds[
            "rule ahead of ours" if equipment.dataplane == "nftables" else "rule ahead of our jump"
        ],
    )
    added = daemon.vipctl("add", f"10.96.8.{number}:80/tcp", "10.244.0.11", check=False)
    assert added.returncode == 0, (added.stderr, daemon.log)
    loud = [seam for seam in seams if mode not in seam.quiet]
    daemon.wait_until(lambda: [seam.name for seam in loud if seam.culprit not in told(daemon)], [])
    assert daemon.log.count("Traceback") <= 12 * number, "each is logged once"
    daemon.fail(mode)
    daemon.wait_until(lambda: [seam.name for seam in seams if seam.culprit in told(daemon)], [], 180.0)
    daemon.wait_in_sync(180.0)
    assert daemon.status()["pid"] == pid


def told(daemon: FaultyDaemon) -> str:
    """What status says is wrong."""
    status = daemon.status()
    return json.dumps(
        [status.get(key) for key in ("warnings", "problems", "fault", "sources", "quarantined")]
    )
