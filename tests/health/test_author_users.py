"""Programs of different authors run as different users: neither reaches the other, whatever the kernel."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.health.servers import answer, run, until
from vipd.health.probes.exec import ExecProber
from vipd.health.result import ProbeResult
from vipd.host import program_runner
from vipd.host.accounts import AuthorUids
from vipd.host.settings.settings import Settings
from vipd.model.check import Check, ExecProbe, Timing
from vipd.model.check_target import CheckTarget, check_targets
from vipd.model.service import Backend, Origin, Protocol, Service, ServicePort

pytestmark = pytest.mark.root

USERS = Settings().check_users
ATTACK = r"""
import ctypes, os, resource, signal, sys
pid, file = int(open(sys.argv[1]).read()), sys.argv[2]
libc = ctypes.CDLL(None, use_errno=True)
def ptrace():
    if libc.ptrace(16, pid, None, None):  # PTRACE_ATTACH
        raise OSError(ctypes.get_errno(), "ptrace")
    libc.ptrace(17, pid, None, None)
for name, attempt in {
    "kill": lambda: os.kill(pid, 0),
    "prlimit": lambda: resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0)),
    "renice": lambda: os.setpriority(os.PRIO_PROCESS, pid, 5),
    "ptrace": ptrace,
    "environ": lambda: open(f"/proc/{pid}/environ").read(),
    "write": lambda: open(file, "a").close(),
    "remove": lambda: os.unlink(file),
}.items():
    try:
        attempt()
        print(name, end=" ")
    except OSError:
        pass
print(end=".")
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory like /tmp."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def without_landlock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel knows no such system call, as before Linux 5.13."""
    source = Path(program_runner.__file__).read_text()
    older = tmp_path / "runner.py"
    older.write_text(
        source.replace(
            "_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446", "_RULESET, _LANDLOCK_RESTRICT_SELF = 5000, 5001"
        )
    )
    assert older.read_text() != source
    monkeypatch.setattr(program_runner, "__file__", str(older))


def service(author: str, *command: str, address: str = "192.0.2.77", user: str = "") -> Service:
    """One whose backend a program checks."""
    check = Check(ExecProbe(command=command, user=user), Timing(interval=60.0, timeout=60.0))
    return Service(
        f"{author}-{command[-1]}"[-60:],
        ("10.96.0.1",),
        (ServicePort(80, Protocol.TCP),),
        (Backend(address),),
        check=check,
        origin=Origin("file", f"/etc/vipd/services.d/{author}.yaml", 1),
    )


def shell(author: str, script: str) -> Service:
    return service(author, "/bin/sh", "-c", script)


def checked(first: Service, then: Callable[[], bool], *more: Service) -> list[ProbeResult]:
    """The results of `more`, which are checked once `then` is true, while `first` may still run."""

    async def story() -> list[ProbeResult]:
        with ExecProber(asyncio.get_running_loop(), USERS) as prober:
            running = prober.start(target_of(first), lambda _: None)
            await until(then)
            results = [await answer(prober, target_of(other)) for other in more]
            running.cancel()
            return results

    return run(story())


def target_of(declared: Service) -> CheckTarget:
    (target,) = check_targets(declared).values()
    return target


def attack(shared: Path, author: str) -> str:
    """What a program of this author can do to one of `victim`."""
    victim = shell(
        "victim",
        f"cd {shared}; touch file; echo $$ > p; chmod 644 p; mv p pid; exec sleep 300",
    )
    (shared / "attack.py").write_text(ATTACK)
    attacker = service(
        author, "/usr/bin/python3", "-I", f"{shared}/attack.py", f"{shared}/pid", f"{shared}/file"
    )
    (result,) = checked(victim, (shared / "pid").exists, attacker)
    assert result.good, result.reason
    return result.reason.rpartition("; ")[2]


@pytest.mark.usefixtures("without_landlock")
def test_an_authors_program_reaches_none_of_another(shared: Path) -> None:
    assert attack(shared, "attacker") == "."


@pytest.mark.usefixtures("without_landlock")
def test_programs_of_one_author_work_together(shared: Path) -> None:
    assert attack(shared, "victim").split()[:3] == ["kill", "prlimit", "renice"]


def test_a_program_has_its_environment_its_directory_and_the_groups_files(shared: Path) -> None:
    """Those of the default user, whose group it has."""
    group = USERS.account("").pw_gid
    secret = shared / "secret"
    secret.write_text("of the group")
    os.chown(secret, 0, group)
    secret.chmod(0o640)
    script = f"echo $(cat {secret}), $VIPD_ADDRESS:$VIPD_PORT/$VIPD_PROTOCOL in $(pwd), $(id -G)"
    one, two = (shell(author, f"{script}, $(id -u)") for author in ("one", "two"))
    said = [result.reason.rpartition("; ")[2] for result in checked(one, lambda: True, one, two)]
    uids = [text.rpartition(", ")[2] for text in said]
    assert [text.rpartition(", ")[0] for text in said] == [
        f"of the group, 192.0.2.77:80/tcp in /, {group}"
    ] * 2
    assert len({*uids, str(USERS.account("").pw_uid)}) == 3


def test_processes_of_one_author_leave_room_for_those_of_another() -> None:
    forks = "for n in $(seq 300); do sleep 300 & done"
    result, other, own = checked(
        shell("many", "exit 0"),
        lambda: True,
        shell("many", forks),
        shell("other", "sleep 0 & sleep 0; exit 0"),
        shell("many", "exit 0"),
    )
    assert "ork" in result.reason, "the kernel refuses a fork"
    assert other.good
    assert own.good, "what it has left behind has ended"


def test_a_program_named_by_two_authors_runs_for_each_and_once_for_one() -> None:
    one, same, other = (service(author, "/bin/true") for author in ("one", "one", "other"))
    assert target_of(one) == target_of(same) != target_of(other)


def test_numbers_of_authors_differ_and_stay() -> None:
    names = [f"file:/etc/vipd/services.d/{n}.yaml" for n in range(400)]
    uids = AuthorUids(USERS.author_uids)
    numbers = [uids.of(name) for name in names]
    assert len({*numbers, None}) == 401
    assert [AuthorUids(USERS.author_uids).of(name) for name in reversed(names)] == numbers[::-1]
    few = AuthorUids(range(60706, 61106))
    assert {few.of(name) for name in names} == set(range(60706, 61106))
    assert few.of("one more") is None


def test_where_the_kernel_lacks_the_numbers_or_they_are_off_the_default_user_runs_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert AuthorUids(Settings(check_uids="off").check_users.author_uids).of("one") is None
    assert not caplog.records
    assert AuthorUids(range(2**32 - 3, 2**32 + 3)).of("one") is None
    assert "this container has no users 4294967293-" in caplog.text
