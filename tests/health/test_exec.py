"""Programs as checks: real ones, that hang, shout, fork, fail and attack each other.

Programs of different authors run as different users: neither reaches the other, whatever the kernel.
"""

from __future__ import annotations

import os
import platform
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.health.servers import PATIENCE, as_wanted, checked, seen
from tests.lab.daemon import Daemon
from tests.lab.inside import Verdict, probed
from tests.lab.waiting import wait_until
from tests.sources.host import namespace
from vipd.model.check_target import check_targets
from vipd.model.service import Service

pytestmark = pytest.mark.root

KERNEL = tuple(int(part) for part in platform.release().split(".")[:2])


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory like /tmp."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


def shell(script: str, author: str = "a", *arguments: str, **keys: Any) -> Service:
    """An author's service whose backend a script checks."""
    return checked("exec", 8080, author=author, command=["/bin/sh", "-c", script, "sh", *arguments], **keys)


def run(script: str, *arguments: str, author: str = "a", **keys: Any) -> Verdict:
    return probed(shell(script, author, *arguments, **keys))[0]


def output(found: Verdict) -> str:
    """What a program that is content says."""
    assert found.healthy, found
    return found.reason.partition("; ")[2]


def wait_for_text(path: Path, lines: int = 1) -> list[str]:
    wait_until(lambda: path.exists() and len(path.read_text().split()) >= lines, f"{path} has content")
    return path.read_text().split()


def alive(pid: str) -> bool:
    """Whether a process runs; one that nobody reaps yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_program_is_content_or_says_why_not() -> None:
    scripts = {
        "exit 0": "good",
        "echo too slow >&2; exit 3": "bad: exit code 3: too slow",
        "exit 1": "bad: exit code 1",
        "kill -9 $$": "bad: killed by SIGKILL",
        **{f"kill -{number} $$": "bad: killed by …" for number in (31, 34, 40, 64)},
        "exec >&- 2>&-; sleep 0.3; exit 4": "bad: exit code 4",
        "printf '\\033[31mred\\a\\377'; exit 1": "bad: exit code 1: \\x1b[31mred\\x07\ufffd",
        "sleep 300": "bad: timeout after 2 s",
    }
    checks = [shell(script, timeout="2s" if script == "sleep 300" else "60s") for script in scripts]
    shown = {script: seen(found) for script, found in zip(scripts, probed(*checks), strict=True)}
    assert {s: text for s, text in shown.items() if not as_wanted(text, scripts[s])} == {}


def test_the_first_line_that_it_says_is_kept() -> None:
    assert output(run("echo; echo all is well; echo more")) == "all is well"
    assert output(run("echo first; head -c 20000000 /dev/zero")) == "first"
    assert len(run("head -c 20000000 /dev/zero | tr '\\0' x").reason) < 200


def test_it_gets_its_arguments_and_nothing_of_a_shell() -> None:
    assert output(run('printf "%s|" "$@"', "a b", "$HOME", "; exit 1")) == "a b|$HOME|; exit 1|"


def test_its_environment_is_only_what_is_promised(shared: Path) -> None:
    os.environ["VIPD_SECRET_OF_TEST"] = "x"
    try:
        assert run(f"env > {shared}/env").healthy
    finally:
        del os.environ["VIPD_SECRET_OF_TEST"]
    lines = set((shared / "env").read_text().splitlines())
    own = {line for line in lines if line.startswith("VIPD_")}
    assert own == {"VIPD_ADDRESS=127.0.0.1", "VIPD_PORT=8080", "VIPD_PROTOCOL=tcp"}
    assert {line.partition("=")[0] for line in lines - own} <= {"PATH", "PWD", "OLDPWD", "SHLVL", "_"}


def test_no_descriptor_of_the_daemon_is_open_in_it(shared: Path) -> None:
    with (shared / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        reading, writing = os.pipe()
        os.set_inheritable(writing, True)
        said = output(run("cd /proc/$$/fd && readlink 0 2>&1"))
        listed = output(run("cd /proc/$$/fd && echo *"))
        os.close(reading)
        os.close(writing)
    assert said == "/dev/null"
    assert set(listed.split()) <= {"0", "1", "2", "3", "10"}, "from 3 on: of the shell itself"


def test_it_begins_in_the_root_directory_in_a_session_of_its_own() -> None:
    said = output(run("echo $(pwd) $(umask) $(cut -d' ' -f6 /proc/$$/stat) $$"))
    directory, mask, session, pid = said.split()
    assert (directory, mask, session) == ("/", "0077", pid)


def test_all_that_it_started_ends_with_the_check(shared: Path) -> None:
    """At the timeout and at its own end, also what left its session, or its parent."""
    pids = shared / "pids"
    child = f"sh -c 'echo $$ >> {pids}; exec sleep 300'"
    late = {"timeout": "3s"}
    checks = (
        shell(f"{child} & echo fine; sleep 0.5"),
        shell(f"setsid {child} & sleep 0.5; exit 0"),
        shell(f"(setsid {child} &); sleep 0.5; exit 0"),
        shell(f"{child} & sleep 300", **late),
        shell(f"setsid {child} & exec sleep 300", **late),
    )
    began = time.monotonic()
    shown = [seen(found) for found in probed(*checks)]
    assert shown == ["good"] * 3 + ["bad: timeout after 3 s"] * 2
    assert time.monotonic() - began < PATIENCE
    children = wait_for_text(pids)
    assert len(children) == 5
    assert not [pid for pid in children if alive(pid)], "their end is waited for"


def test_what_cannot_be_started_blames_no_backend(shared: Path) -> None:
    plain, empty = shared / "plain", shared / "empty"
    for path, mode in ((plain, 0o644), (empty, 0o755)):
        path.write_text("no program")
        path.chmod(mode)
    root = pwd.getpwuid(0).pw_name
    commands = {
        "/nonexistent/check": "/nonexistent/check: no such file or directory",
        str(plain): f"{plain}: permission denied",
        str(empty): f"{empty}: exec format error",
    }
    checks = [checked("exec", command=[command]) for command in commands]
    assert [found[:2] for found in probed(*checks)] == [
        (None, f"cannot be asked: {reason}") for reason in commands.values()
    ]
    unknown = run("exit 0", user="nobody-of-that-name")
    assert unknown[:2] == (None, "cannot be asked: there is no user nobody-of-that-name")
    # Also where the user's number has changed since the declaration was looked at.
    refused = run(f"touch {shared}/ran", user=root)
    assert refused.healthy is None
    assert f"user {root}: checks never run as root" in refused.reason
    assert not (shared / "ran").exists()


def test_it_runs_as_its_user_without_any_privilege() -> None:
    entry = pwd.getpwnam("nobody")
    none = "0" * 16
    wanted = {
        "Uid|Gid|Groups": f"Uid:{' %d' * 4} Gid:{' %d' * 4} Groups:"
        % (*[entry.pw_uid] * 4, *[entry.pw_gid] * 4),
        "CapPrm|CapEff|CapAmb": f"CapPrm: {none} CapEff: {none} CapAmb: {none}",
        "NoNewPrivs": "NoNewPrivs: 1",
    }
    for keys, line in wanted.items():
        assert output(run(f"echo $(grep -E '^({keys}):' /proc/self/status)", user="nobody")) == line
    # Only the threads that start them gave something up.
    assert "NoNewPrivs:\t0" in Path("/proc/self/status").read_text(encoding="ascii")


AS_ANOTHER_USER = """
import sys
from tests.health.test_exec import probed, seen, shell
limits = range(300, 300 + int(sys.argv[1]))
for found in probed(*(shell("exec sleep 300", user="nobody", timeout=f"{limit}ms") for limit in limits)):
    print(seen(found))
"""


def seen_by_daemon(count: int, *rights: str) -> list[str]:
    """What a vipd that is the user `daemon` with these capabilities sees of so many programs that hang."""
    given = ",".join(f"+{right}" for right in rights) or "-all"
    argv = ["setpriv", "--reuid=daemon", "--regid=daemon", "--clear-groups"]
    argv += [
        f"--inh-caps={given}",
        f"--ambient-caps={given}",
        sys.executable,
        "-c",
        AS_ANOTHER_USER,
        str(count),
    ]
    with tempfile.TemporaryFile("w+") as file:  # a pipe would stay open as long as the programs
        subprocess.run(argv, stdout=file, check=True, timeout=PATIENCE)
        file.seek(0)
        return file.read().splitlines()


def of_nobody() -> set[str]:
    listed = subprocess.run(
        ["pgrep", "-u", "nobody", "-x", "sleep"], capture_output=True, text=True, check=False
    )
    return set(listed.stdout.split())


@pytest.mark.parametrize("count", [1, pytest.param(70, marks=pytest.mark.nightly)])
def test_a_daemon_that_lacks_rights_says_which(count: int) -> None:
    """Without CAP_KILL it may not signal the processes of another user; they hold up nobody, and are few."""
    (lacks,) = seen_by_daemon(1)
    assert lacks.startswith(
        "not asked: cannot be asked: vipd may not become nobody; hint: it needs CAP_SETUID,"
    )
    before = of_nobody()
    texts = seen_by_daemon(count, "setuid", "setgid")
    for pid in of_nobody() - before:
        os.kill(int(pid), signal.SIGKILL)
    told = {text.removeprefix("not asked: cannot be asked: ").partition(";")[0] for text in texts}
    more = {text for text in told if text.endswith(" programs that should have ended run on")}
    assert told - more == {"/bin/sh cannot be ended"}
    assert bool(more) == (count > 64)
    assert all("hint: give vipd CAP_KILL" in text for text in texts)


HANGING = """
from tests.health.test_exec import probed, shell
import sys
child = f"echo $$ >> {sys.argv[1]}; exec sleep 300"
probed(*(shell(f"setsid sh -c '{child}' & {child}", timeout=f"{100 + n}s") for n in range(3)))
"""


def test_kill_9_of_vipd_leaves_no_program(shared: Path) -> None:
    vipd_process = subprocess.Popen([sys.executable, "-c", HANGING, str(shared / "pids")])
    try:
        pids = wait_for_text(shared / "pids", 6)
    finally:
        vipd_process.kill()
        vipd_process.wait()
    wait_until(lambda: not any(map(alive, pids)), "all have ended")


def test_what_runs_programs_may_be_killed(shared: Path) -> None:
    """The next one is run by a new process."""
    command = f"[/bin/sh, -c, 'test ! -e {shared}/down']"
    check = f"{{type: exec, command: {command}, interval: 1s, timeout: 1s, fall: 1}}"
    services = f"  - {{name: web, address: 10.96.0.1, ports: [80], backends: [10.244.0.1], check: {check}}}\n"
    with namespace() as node, Daemon(node, services) as daemon:

        def health() -> str:
            (forwarding,) = daemon.get("services/web")["service"]["forwardings"]
            return str(forwarding["endpoints"][0]["health"])

        daemon.wait_until(health, "healthy")
        for pid in map(int, subprocess.check_output(["pgrep", "-P", str(daemon.status()["pid"])]).split()):
            if b"program_runner" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                break
        else:
            raise AssertionError("no process runs programs")
        (shared / "down").touch()
        daemon.wait_until(health, "unhealthy")
        assert "exit code 1" in daemon.vipctl("describe", "web").stdout


@pytest.mark.skipif(KERNEL < (6, 12), reason="Landlock scopes signals since Linux 6.12")
def test_it_ends_no_other_program_of_its_user(shared: Path) -> None:
    """Not one of another check either, while both run as the same user."""
    pid = shared / "pid"
    victim = f"echo $$ > {pid}; until [ -e {shared}/tried ]; do sleep 0.05; done"
    attack = f"until [ -s {pid} ]; do sleep 0.05; done; sleep 60 & kill $! && ! kill -9 $(cat {pid})"
    attack += f" && ! cat /proc/$(cat {pid})/mem; code=$?; touch {shared}/tried; exit $code"
    assert [seen(found) for found in probed(shell(victim), shell(attack))] == ["good", "good"]


def test_a_program_has_its_environment_its_directory_and_the_groups_files(shared: Path) -> None:
    """Those of the default user, whose group it has; its number is its author's own."""
    entry = next(entry for entry in pwd.getpwall() if entry.pw_name in ("vipd-check", "nobody"))
    secret = shared / "secret"
    secret.write_text("of the group")
    os.chown(secret, 0, entry.pw_gid)
    secret.chmod(0o640)
    script = f"echo $(cat {secret}) $(id -G) $(id -u)"
    said = [
        output(found).rpartition(" ") for found in probed(*(shell(script, f"author {n}") for n in range(5)))
    ]
    assert [text for text, _, _ in said] == [f"of the group {entry.pw_gid}"] * 5
    assert len({uid for _, _, uid in said} | {str(entry.pw_uid)}) == 6
    again = output(run(script, author="author 3")).rpartition(" ")
    assert again == said[3], "it stays"


def test_processes_of_one_author_leave_room_for_those_of_another() -> None:
    forks = "for n in $(seq 300); do sleep 300 & done; sleep 1"
    many, other = probed(shell(forks, "many"), shell("sleep 0.5; sleep 0 & sleep 0; exit 0", "other"))
    assert "ork" in many.reason, "the kernel refuses a fork"
    assert other.healthy
    assert run("sleep 0 & sleep 0", author="many").healthy, "what it has left behind has ended"


def test_a_program_named_by_two_authors_runs_for_each_and_once_for_one() -> None:
    one, same, other = (check_targets(shell("exit 0", author)) for author in ("one", "one", "other"))
    assert one == same != other
