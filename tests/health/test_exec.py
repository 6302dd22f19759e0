"""Programs as probes: real ones, that hang, shout, fork and fail."""

from __future__ import annotations

import asyncio
import getpass
import os
import platform
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.health.servers import PATIENCE, answer, good_and_reason, run, target
from tests.lab.waiting import wait_until
from vipd.health.probes.exec import ExecProber
from vipd.health.result import ProbeResult
from vipd.host import program_runner as keeper
from vipd.host import unprivileged
from vipd.host.accounts import CheckUsers
from vipd.model.check import ExecProbe

ME = getpass.getuser()
KERNEL = tuple(int(part) for part in platform.release().split(".")[:2])
Program = Callable[[str], str]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Makes an executable script of some shell lines; the test's own user may run it."""

    def make(lines: str) -> str:
        path = tmp_path / "check"
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture(autouse=True)
def _as_oneself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run programs as their own user, which a daemon never does."""
    monkeypatch.setattr(CheckUsers, "_privileged", lambda *_: "")


def probe(*command: str, user: str = ME, timeout: float = 60.0) -> ProbeResult:
    async def ask() -> ProbeResult:
        with ExecProber(asyncio.get_running_loop(), CheckUsers()) as prober:
            return await answer(prober, target(8080, ExecProbe(command=command, user=user), timeout))

    return run(ask())


def gone(pid: int) -> bool:
    """Whether a process ends soon; one that nobody reaps yet counts as ended."""
    for _ in range(1200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.05)
    return False


def wait_for_text(path: Path) -> None:
    wait_until(lambda: path.exists() and path.read_text(), f"{path} has content")


def test_zero_is_good_and_what_it_says_is_kept(program: Program) -> None:
    result = probe(program("echo; echo all is well; echo more"))
    assert result.good
    assert result.reason.endswith("; all is well")


def test_another_code_is_bad(program: Program) -> None:
    assert good_and_reason(probe(program("echo too slow >&2; exit 3"))) == (False, "exit code 3: too slow")
    assert good_and_reason(probe(program("exit 1"))) == (False, "exit code 1")
    assert good_and_reason(probe(program("kill -9 $$"))) == (False, "killed by SIGKILL")


def test_it_gets_its_arguments_and_nothing_of_a_shell(program: Program) -> None:
    result = probe(program('printf "%s|" "$@"'), "a b", "$HOME", "; exit 1")
    assert result.reason.endswith("; a b|$HOME|; exit 1|")


@pytest.mark.skipif(KERNEL < (6, 12), reason="Landlock scopes signals since Linux 6.12")
def test_it_ends_no_other_program_of_its_user(program: Program, tmp_path: Path) -> None:
    """Not one of another check either, while both run as the same user."""
    lines = f"echo $$ > {tmp_path}/pid; while [ ! -e {tmp_path}/tried ]; do sleep 0.05; done; exit 0"
    victim = ExecProbe(command=("/bin/sh", "-c", lines), user=ME)
    attack = f"sleep 60 & kill $! && ! kill -9 $(cat {tmp_path}/pid) && ! cat /proc/$(cat {tmp_path}/pid)/mem"

    async def story() -> list[ProbeResult]:
        with ExecProber(asyncio.get_running_loop(), CheckUsers()) as prober:
            other = asyncio.create_task(answer(prober, target(8080, victim, 60.0)))
            await asyncio.to_thread(wait_for_text, tmp_path / "pid")
            attacking = ExecProbe(command=(program(attack),), user=ME)
            tried = await answer(prober, target(8080, attacking, 60.0))
            (tmp_path / "tried").touch()
            return [tried, await other]

    tried, other = run(story())
    assert tried.good, tried.reason
    assert other.good, other.reason


def test_its_environment_is_only_what_is_promised(program: Program, tmp_path: Path) -> None:
    os.environ["VIPD_SECRET_OF_TEST"] = "x"
    try:
        assert probe(program(f"env > {tmp_path}/env; pwd >> {tmp_path}/env")).good
    finally:
        del os.environ["VIPD_SECRET_OF_TEST"]
    lines = set((tmp_path / "env").read_text().splitlines())
    own = {line for line in lines if line.startswith("VIPD_")}
    assert own == {"VIPD_ADDRESS=127.0.0.1", "VIPD_PORT=8080", "VIPD_PROTOCOL=tcp"}
    names = {line.partition("=")[0] for line in lines - own}
    assert names <= {"PATH", "PWD", "OLDPWD", "SHLVL", "_", "/"}


def test_no_descriptor_of_the_daemon_is_open_in_it(tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        reading, writing = os.pipe()
        os.set_inheritable(writing, True)
        said = probe("/bin/sh", "-c", "cd /proc/$$/fd && readlink 0 2>&1 && echo *").reason
        listed = probe("/bin/sh", "-c", "cd /proc/$$/fd && echo *").reason
        os.close(reading)
        os.close(writing)
    assert said.endswith("; /dev/null")
    assert set(listed.rpartition("; ")[2].split()) <= {"0", "1", "2", "3", "10"}, (
        "from 3 on: of the shell itself"
    )


def test_it_begins_in_the_root_directory_in_a_session_of_its_own(program: Program) -> None:
    said = probe("/bin/sh", "-c", "echo $(pwd) $(umask) $(cut -d' ' -f6 /proc/$$/stat) $$").reason
    where, mask, session, pid = said.rpartition("; ")[2].split()
    assert (where, mask, session) == ("/", "0077", pid)


def test_at_the_timeout_all_that_it_started_is_killed(program: Program, tmp_path: Path) -> None:
    child, command = tmp_path / "child", program(f"sleep 300 & echo $! > {tmp_path}/child; sleep 300")
    for seconds in (0.7, 5, 30):  # a busy machine may need more until there is a child
        began = time.monotonic()
        result = probe(command, timeout=seconds)
        assert good_and_reason(result) == (False, f"timeout after {seconds:g} s")
        assert time.monotonic() - began < PATIENCE
        if child.exists() and child.read_text():
            break
    assert gone(int(child.read_text()))


def test_children_that_it_leaves_delay_nothing_and_are_killed(program: Program, tmp_path: Path) -> None:
    began = time.monotonic()
    result = probe(program(f"sleep 300 & echo $! > {tmp_path}/child; echo fine"))
    assert result.good
    assert time.monotonic() - began < PATIENCE
    assert gone(int((tmp_path / "child").read_text()))


def test_a_program_that_closes_its_output_is_waited_for(program: Program) -> None:
    assert good_and_reason(probe(program("exec >&- 2>&-; sleep 0.3; exit 4"))) == (False, "exit code 4")


def test_megabytes_are_thrown_away(program: Program) -> None:
    result = probe(program("echo first; head -c 20000000 /dev/zero"))
    assert result.good
    assert result.reason.endswith("; first")
    assert len(probe(program("head -c 20000000 /dev/zero | tr '\\0' x")).reason) < 200


def test_what_it_says_is_shown_safely(program: Program) -> None:
    assert good_and_reason(probe(program("printf '\\033[31mred\\a\\377'; exit 1"))) == (
        False,
        r"exit code 1: \x1b[31mred\x07�",
    )


def test_what_cannot_be_started_blames_no_backend(tmp_path: Path) -> None:
    missing = probe("/nonexistent/check")
    assert good_and_reason(missing) == (
        None,
        "cannot be asked: /nonexistent/check: no such file or directory",
    )
    plain = tmp_path / "plain"
    plain.write_text("no program")
    assert probe(str(plain)).reason == f"cannot be asked: {plain}: permission denied"
    plain.chmod(0o755)
    assert probe(str(plain)).reason == f"cannot be asked: {plain}: exec format error"
    unknown = probe("/bin/true", user="nobody-of-that-name")
    assert good_and_reason(unknown) == (None, "cannot be asked: there is no user nobody-of-that-name")


@pytest.mark.parametrize("user", [ME, pwd.getpwuid(0).pw_name])
def test_nothing_runs_as_root_or_as_the_daemon(
    user: str, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the user's number has changed since the declaration was looked at."""
    monkeypatch.undo()
    found = good_and_reason(probe(program(f"touch {tmp_path}/ran"), user=user))
    assert found[0] is None
    assert f"user {user}: " in found[1]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("command", [(), ("",), ("/bin/true", "a\0b"), ("/bin/\0",), ("/bin/true", "\ud800")])
def test_a_malformed_command_is_trouble_alone(command: tuple[str, ...]) -> None:
    assert probe(*command).good is None


def test_a_daemon_that_may_not_change_user_says_so() -> None:
    program = unprivileged.Program(("/bin/true",), 1.0, user="nobody")
    told = unprivileged.start_failure(program, PermissionError(1, "Not permitted"))
    assert told.startswith("vipd may not become nobody; hint: it needs CAP_SETUID, CAP_SETGID and CAP_KILL")


@pytest.mark.root
def test_it_runs_as_its_user_without_any_privilege() -> None:
    entry = pwd.getpwnam("nobody")
    script = (
        "grep -E '^(Uid|Gid|Groups|CapPrm|CapEff|CapAmb|NoNewPrivs):' /proc/self/status | tr '\\t\\n' ' ;'"
    )
    said = probe("/bin/sh", "-c", script, user="nobody").reason
    for wanted in (
        f"Uid: {' '.join([str(entry.pw_uid)] * 4)};",
        f"Gid: {' '.join([str(entry.pw_gid)] * 4)};",
        "Groups: ;",
        "CapPrm: 0000000000000000;",
    ):
        assert wanted in " ".join(said.replace(";", "; ").split()).replace(" ;", " ;"), said


@pytest.mark.root
def test_no_program_gains_or_inherits_a_privilege() -> None:
    script = "grep -E '^(CapEff|CapAmb|NoNewPrivs):' /proc/self/status | tr -d '\\n\\t '"
    said = probe("/bin/sh", "-c", script, user="nobody").reason
    assert said.endswith("; CapEff:0000000000000000CapAmb:0000000000000000NoNewPrivs:1")
    # Only the threads that start them gave something up.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    assert "NoNewPrivs:\t0" in status


WITHOUT_RIGHTS = """
import errno, os, runpy, signal
def kill(pid, number):
    raise PermissionError(errno.EPERM, "Operation not permitted")
os.kill = os.killpg = kill
keeper = runpy.run_path({keeper!r}, run_name="keeper")
keeper["main"].__globals__["KILLED_SECONDS"] = 0.2
keeper["main"]()
"""


def test_a_program_that_vipd_may_not_end_holds_up_nobody(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user of its own without CAP_KILL it may not signal the processes of another one."""
    command = program(f"echo $$ >> {tmp_path}/pids; exec sleep 300")
    pids, powerless = tmp_path / "pids", tmp_path / "powerless.py"
    powerless.write_text(WITHOUT_RIGHTS.format(keeper=keeper.__file__))
    monkeypatch.setattr(unprivileged, "MAX_UNENDED", 2)
    monkeypatch.setattr(keeper, "__file__", str(powerless))

    async def ask() -> list[ProbeResult]:
        found: list[ProbeResult] = []
        with ExecProber(asyncio.get_running_loop(), CheckUsers()) as prober:
            asked = target(80, ExecProbe(command=(command,), user=ME), 0.3)
            found += [await answer(prober, asked) for _ in range(3)]
            for pid in pids.read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            found.append(await answer(prober, asked))
            while " should have ended " in found[-1].reason:
                await asyncio.sleep(0.05)
                found[-1] = await answer(prober, asked)
        os.kill(int(pids.read_text().split()[-1]), signal.SIGKILL)
        return found

    results = run(ask())
    assert [result.good for result in results] == [None] * 4
    assert " cannot be ended; hint: " in results[0].reason
    assert "2 programs that should have ended run on" in results[2].reason
    assert " cannot be ended; hint: " in results[3].reason


def test_a_child_that_leaves_its_session_ends_with_the_check(program: Program, tmp_path: Path) -> None:
    """Also one that made itself a child of somebody else, and one that outlives its parent."""
    child = f"setsid sh -c 'echo $$ >> {tmp_path}/children; exec sleep 300'"
    for lines in (
        f"{child} & sleep 0.3; exit 0",
        f"({child} &); sleep 0.3; exit 0",
        f"{child} & exec sleep 300",
    ):
        result = probe(program(lines), timeout=10 if "exit" in lines else 2)
        assert result.good is ("exit" in lines)
    children = (tmp_path / "children").read_text().split()
    assert len(children) == 3
    for pid in children:
        assert not alive(int(pid)), "its end is waited for"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


DAEMON = """
import asyncio, sys
from tests.health.servers import target
from vipd.host.accounts import CheckUsers
from vipd.model.check import ExecProbe
from vipd.health.probes.exec import ExecProber
CheckUsers._privileged = lambda *_: ""
async def main():
    with ExecProber(asyncio.get_running_loop(), CheckUsers()) as prober:
        for number in range(3):
            prober.start(target(80, ExecProbe(command=(sys.argv[1],), user=sys.argv[2])), print)
        await asyncio.sleep(300)
asyncio.run(main())
"""


def test_kill_9_of_vipd_leaves_no_program(program: Program, tmp_path: Path) -> None:
    command = program(
        f"setsid sh -c 'echo $$ >> {tmp_path}/pids; exec sleep 300' &\n"
        f"echo $$ >> {tmp_path}/pids; exec sleep 300"
    )
    daemon = subprocess.Popen([sys.executable, "-c", DAEMON, command, ME])
    pids = tmp_path / "pids"
    try:
        end = time.monotonic() + PATIENCE / 2
        while not pids.exists() or len(pids.read_text().split()) < 6:
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        daemon.kill()
        daemon.wait()
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def test_what_runs_programs_may_be_killed(program: Program, tmp_path: Path) -> None:
    """Programs that run go on to their end, or their time's; the next one is run by a new process."""
    command = program("exit 0")

    async def ask() -> list[ProbeResult]:
        with ExecProber(asyncio.get_running_loop(), CheckUsers()) as prober:
            asked = target(80, ExecProbe(command=(command,), user=ME))
            found = [await answer(prober, asked)]
            process = prober._runners._process
            assert process is not None
            process.kill()
            await asyncio.to_thread(process.wait)
            return [*found, await answer(prober, asked)]

    assert [result.good for result in run(ask())] == [True, True]


def test_so_many_run_at_once_and_the_others_wait(program: Program) -> None:
    command = program("sleep 0.4")

    async def ask() -> tuple[list[ProbeResult], float]:
        with ExecProber(asyncio.get_running_loop(), CheckUsers(), at_once=2) as prober:
            asked = target(80, ExecProbe(command=(command,), user=ME))
            began = time.monotonic()
            results = await asyncio.gather(*(answer(prober, asked) for _ in range(4)))
            return list(results), time.monotonic() - began

    results, seconds = run(ask())
    assert all(result.good for result in results)
    assert seconds >= 0.8


def test_a_cancelled_program_is_killed_and_one_in_the_queue_never_starts(
    program: Program, tmp_path: Path
) -> None:
    command = program(f"echo $$ >> {tmp_path}/pids; exec sleep 300")

    async def ask() -> list[ProbeResult]:
        told: list[ProbeResult] = []
        with ExecProber(asyncio.get_running_loop(), CheckUsers(), at_once=1) as prober:
            asked = target(80, ExecProbe(command=(command,), user=ME))
            attempts = [prober.start(asked, told.append) for _ in range(2)]
            await asyncio.to_thread(wait_for_text, tmp_path / "pids")
            for attempt in attempts:
                attempt.cancel()
        await asyncio.sleep(0.05)
        return told

    assert run(ask()) == []
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 1
    assert gone(int(pids[0]))
