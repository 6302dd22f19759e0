"""Whatever keeps programs from their work right after a change, while vipd clears away what that has left:
the same daemon goes on, and makes up for it."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.faults.dataplanes import Equipment
from tests.faults.equipment import as_from_a_cold_start
from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.packets.services import backend_text

pytestmark = pytest.mark.root

SBIN = "/usr/sbin:/sbin:/usr/bin:/bin"
VIP = "10.96.8.1"
IDLE_SECONDS = 10.0
"""So long a program may do nothing."""
COMPLAINTS = ("cannot be run", "hangs", "Too many open files")


@pytest.fixture(scope="module")
def daemon(lab: Lab, equipment: Equipment) -> Iterator[Daemon]:
    with Daemon(lab.host, **equipment.settings) as running:
        running.vipctl("add", f"{VIP}:80/tcp", backend_text(lab.backends[0]), "--name", "kept")
        yield running


@contextmanager
def replaced(
    daemon: Daemon, equipment: Equipment, path: Path, text: str, mode: int = 0o755
) -> Iterator[Path]:
    """A script stands in the place of the programs that write rules, for the daemon alone; `{real}` in it is
    the program, and `{calls}` a file."""
    calls, inside = path / "calls", ["nsenter", "--mount", f"--target={daemon.status()['pid']}"]
    calls.touch()
    found = {os.path.realpath(shutil.which(name, path=SBIN) or name) for name in equipment.programs}
    for number, place in enumerate(found):
        real, script = path / f"real{number}", path / f"script{number}"
        shutil.copy(place, real)
        script.write_text(text.format(real=real, calls=calls))
        script.chmod(mode)
        subprocess.run([*inside, "mount", "--bind", str(script), place], check=True)
    try:
        yield calls
    finally:
        for place in found:
            subprocess.run([*inside, "umount", "--lazy", place], check=True)


def complains(daemon: Daemon) -> Callable[[], bool]:
    """Asks whether the log says from now on that something cannot be done."""
    begin = len(daemon.log)
    return lambda: any(words in daemon.log[begin:] for words in COMPLAINTS)


@contextmanager
def not_executable(daemon: Daemon, equipment: Equipment, path: Path) -> Iterator[None]:
    """As while a package is upgraded."""
    complained = complains(daemon)
    with replaced(daemon, equipment, path, "", 0o644):
        yield
        daemon.wait_until(complained, True)


@contextmanager
def hanging(daemon: Daemon, equipment: Equipment, path: Path) -> Iterator[None]:
    """Nothing ends by itself."""
    complained = complains(daemon)
    with replaced(daemon, equipment, path, "#!/bin/sh\nexec sleep 1000\n"):
        yield
        daemon.wait_until(complained, True)


@contextmanager
def without_descriptors(daemon: Daemon, _: Equipment, __: Path) -> Iterator[None]:
    """The daemon can open nothing more."""
    process, complained = int(daemon.status()["pid"]), complains(daemon)
    before = resource.prlimit(process, resource.RLIMIT_NOFILE)
    resource.prlimit(process, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
        daemon.wait_until(complained, True)
    finally:
        resource.prlimit(process, resource.RLIMIT_NOFILE, before)


@contextmanager
def stopped(daemon: Daemon, equipment: Equipment, path: Path) -> Iterator[None]:
    """The daemon stands still for longer than a program may do nothing. It need not complain: the program may have
    ended in time, or none may run at that moment."""
    process = int(daemon.status()["pid"])
    slowly = '#!/bin/bash\necho >>{calls}\nsleep 1\nexec -a "${{0##*/}}" {real} "$@"\n'
    with replaced(daemon, equipment, path, slowly) as calls:
        yield
        daemon.wait_until(lambda: calls.stat().st_size > 0, True)
        os.kill(process, signal.SIGSTOP)
        time.sleep(IDLE_SECONDS + 1)
        os.kill(process, signal.SIGCONT)


Fault = Callable[[Daemon, Equipment, Path], AbstractContextManager[None]]


@pytest.mark.nightly(each_time="nftables")
@pytest.mark.parametrize("fault", [not_executable, hanging, without_descriptors, stopped])
def test_the_daemon_outlives_it(
    lab: Lab, daemon: Daemon, equipment: Equipment, fault: Fault, tmp_path: Path
) -> None:
    process, backend = daemon.status()["pid"], backend_text(lab.backends[0])
    daemon.write(f"- {{name: left, address: 10.96.8.2, ports: [80/tcp], backends: ['{backend}']}}")
    daemon.wait_until(lambda: "left" in daemon.vipctl("list").stdout, True)
    daemon.wait_in_sync()
    begin = len(daemon.log)
    daemon.write("")
    daemon.wait_until(lambda: daemon.endpoints("left"), [])
    with fault(daemon, equipment, tmp_path):
        daemon.write(f"- {{name: late, address: 10.96.8.3, ports: [80/tcp], backends: ['{backend}']}}")
    daemon.wait_until(lambda: daemon.endpoints("late"), [backend])
    daemon.wait_in_sync()
    as_from_a_cold_start(equipment, daemon)
    assert daemon.status()["pid"] == process
    assert "Traceback" not in daemon.log[begin:]
    assert len(daemon.log) - begin < 20_000
    for address in (VIP, "10.96.8.3"):
        lab.client.send(address, 80, count=10).all_answered()
