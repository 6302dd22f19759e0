"""A daemon of this tree starts with the state directory of each release: it knows all that the other knew,
warns of nothing in it, and serves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import vipd
from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.upgrade.folder import STATE, folders, kinds_of_files, place
from tests.upgrade.scene import (
    DEAD_PORT,
    FILES,
    GONE,
    SERVED_PORT,
    VIPS,
    assert_known,
    daemon_on,
    host,
    knowledge,
)

pytestmark = [pytest.mark.root, pytest.mark.slow]

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
OF_THE_TRIAL = re.compile(
    r"web\.internal"  # no name server
    r"|127\.0\.0\.1:2379|etcd"  # no etcd
    r"|late\.yaml"  # spoilt
    r"|is taken back unless"  # the change that waits for its confirmation
)
"""What is wrong on the host of a trial; nothing else may be."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with host() as lab:
        lab.backends[1].serve(tcp=[DEAD_PORT])  # only the recorded verdict keeps flows from it
        yield lab


@pytest.fixture(params=folders(), ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest) -> Path:
    found = request.param
    assert isinstance(found, Path)
    return found


def faults(daemon: Daemon) -> list[str]:
    """Warnings of the log and of status that are not those of the trial."""
    lines = [line for line in daemon.log.splitlines() if re.search(r" (WARNING|ERROR|CRITICAL) ", line)]
    return [line for line in (*lines, *daemon.status()["warnings"]) if not OF_THE_TRIAL.search(line)]


def flows_to(lab: Lab, address: str) -> str:
    return lab.host.run("conntrack", "-L", "-d", address).stdout


def test_the_newest_folder_is_of_this_version_and_has_every_file_that_is_documented() -> None:
    table = OPERATIONS.read_text().partition("## The state directory\n")[2].partition("\nAn unusable file")[0]
    rows = [row.split(" | ")[0] for row in table.splitlines() if row.startswith("| `")]
    newest = folders()[-1]
    assert newest.name == vipd.__version__, "run: python -m tests.upgrade.recording"
    assert kinds_of_files(newest / STATE) == {name for row in rows for name in re.findall("`(.*?)`", row)}


def test_nothing_is_lost(lab: Lab, folder: Path) -> None:
    daemon = daemon_on(lab)
    before = place(folder, daemon)
    daemon.write(FILES["shop.yaml"], "shop.yaml")
    daemon.write("  - {spoilt\n", "late.yaml")
    lab.host.run("sysctl", "-qw", "net.ipv4.ip_forward=1")  # the record alone knows that vipd did so
    # A flow of a service whose file was deleted while vipd was down.
    lab.host.run(
        *("conntrack", "-I", "-p", "udp", "-s", "10.10.0.2", "-d", GONE, "--sport", "4000", "--dport", "53"),
        *("-r", lab.backends[0].ipv4, "-q", "10.10.0.2", "--reply-port-src", str(SERVED_PORT)),
        *("--reply-port-dst", "4000", "-t", "600"),
    )
    assert flows_to(lab, GONE)
    with daemon:
        after = knowledge(daemon)
        assert set(before.pop("events")) <= set(after.pop("events"))
        del before["backends"]["gone"], before["new flows"]["gone"]
        assert_known(before, after)
        assert after["backends"].keys() == before["backends"].keys()
        for vip in VIPS.values():
            lab.client.send(vip, 80, count=4).all_answered()
        daemon.wait_until(lambda: flows_to(lab, GONE), "")
        assert not faults(daemon)
        assert not list(daemon.state_dir.rglob("*.unreadable*"))
        daemon.stop()
        new = kinds_of_files(daemon.state_dir) - kinds_of_files(folders()[-1] / STATE)
        assert not new, "record and document it, and have its loss noticed here"
        daemon.cleanup()
        assert lab.host.run("sysctl", "-n", "net.ipv4.ip_forward").stdout == "0\n"
