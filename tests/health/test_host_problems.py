"""What only the host can tell about a check."""

from __future__ import annotations

import os
import pwd
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vipd.health import host_problems as asked
from vipd.health.probes.tls import MOST_CA_BYTES
from vipd.host import accounts
from vipd.host.accounts import CheckUsers
from vipd.model.check import Check, ExecProbe, HttpProbe, TcpProbe


def problems_of_program(path: Path | str) -> tuple[str, ...]:
    found = host_problems(Check(ExecProbe(command=(str(path),), user="nobody")))
    return tuple(problem for problem in found if not problem.startswith("user"))


def test_a_sound_check_has_none() -> None:
    assert host_problems(Check()) == ()
    assert host_problems(Check(TcpProbe())) == ()
    assert host_problems(Check(HttpProbe(tls=True))) == ()
    assert problems_of_program("/bin/true") == ()


def test_a_program_must_be_there_and_executable(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    missing = tmp_path / "none"
    assert problems_of_program(missing) == (
        f"{missing}: no such file; hint: install it on this host, or correct the path",
    )
    assert problems_of_program(plain) == (f"{plain}: not executable; hint: chmod a+rx {plain}",)
    assert problems_of_program(tmp_path) == (f"{tmp_path}: not a file; hint: name the program itself",)


def test_every_problem_is_told_at_once() -> None:
    found = host_problems(Check(ExecProbe(command=("/none",), user="nobody-of-that-name")))
    assert [problem.partition(":")[0] for problem in found] == ["/none", "user nobody-of-that-name"]


MAKE_ONE = "adduser --system --group --no-create-home vipd-check, and leave user out"


def host_problems(check: Check) -> tuple[str, ...]:
    return asked.host_problems(check, CheckUsers())


def of_user(user: str) -> tuple[str, ...]:
    return host_problems(Check(ExecProbe(command=("/bin/true",), user=user)))


def test_a_user_must_exist_and_not_be_root() -> None:
    assert of_user("root") == (f"user root: checks never run as root; hint: {MAKE_ONE}",)


def test_a_user_must_not_be_the_daemons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever name: the API lets that number change services."""
    monkeypatch.setattr(os, "geteuid", lambda: pwd.getpwnam("daemon").pw_uid)
    (found,) = of_user("daemon")
    assert found.startswith("user daemon: vipd itself runs as this user")
    assert found.endswith(f"; hint: {MAKE_ONE}")


class Accounts:
    """The account database as a test wants it: names of users with uid, gid and further groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **users: tuple[int, int, tuple[int, ...]]) -> None:
        def entry(name: str) -> pwd.struct_passwd:
            uid, gid, _ = users[name]
            return pwd.struct_passwd((name, "x", uid, gid, "", "/", "/bin/sh"))

        numbers = {"vipd-admin": 700, "others": 800}
        members: accounts.CachedLookup[str, frozenset[int]] = accounts.CachedLookup(
            lambda name: frozenset((users[name][1], *users[name][2]))
        )
        monkeypatch.setattr(accounts, "users", accounts.CachedLookup(entry))
        monkeypatch.setattr(accounts, "memberships", members)
        monkeypatch.setattr(accounts, "groups", accounts.CachedLookup(lambda name: numbers[name]))


@pytest.mark.parametrize(
    ("account", "why"),
    [
        ((0, 100, ()), "checks never run as root"),
        ((500, 0, ()), "it is in root's group"),
        ((500, 100, (0,)), "it is in root's group"),
        ((500, 700, ()), "it is in the group vipd-admin, which the API lets change services"),
        ((500, 100, (800, 700)), "it is in the group vipd-admin, which the API lets change services"),
        ((4000, 100, ()), "it owns /state, where vipd keeps what it does"),
        ((500, 100, (800,)), ""),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_no_user_who_may_change_services_runs_programs(
    account: tuple[int, int, tuple[int, ...]],
    why: str,
    named: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the declaration names it, or it is the one for those that name none."""
    name = "toor" if named else "vipd-check"
    Accounts(monkeypatch, **{name: account})
    monkeypatch.setattr(asked, "_may_change_user", lambda: True)
    os.chown(tmp_path, 4000, -1)
    checks = CheckUsers("vipd-admin", tmp_path)
    found = asked.host_problems(Check(ExecProbe(command=("/bin/true",), user=name if named else "")), checks)
    told = [problem.replace(str(tmp_path), "/state").partition("; hint: ")[0] for problem in found]
    assert told == ([f"user {name}: {why}"] if why else [])


def test_who_runs_a_program_that_names_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody, check = (65534, 65534, ()), (500, 500, ())
    Accounts(monkeypatch, nobody=nobody, **{"vipd-check": check})
    assert CheckUsers("vipd-admin").account("").pw_name == "vipd-check"
    assert CheckUsers("vipd-admin").account("nobody").pw_name == "nobody"
    Accounts(monkeypatch, nobody=nobody)
    assert CheckUsers("vipd-admin").account("").pw_name == "nobody", "as before there was another one"
    Accounts(monkeypatch)
    (found,) = of_user("")
    assert found.startswith("user vipd-check: there is none; hint: adduser --system")


def test_an_unknown_group_admits_nobody_and_one_that_is_not_told_everybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Accounts(monkeypatch, web=(500, 500, ()))
    assert CheckUsers("no-such-group").account("web").pw_uid == 500

    def hangs(_: str) -> int:
        raise TimeoutError("the account database does not answer")

    monkeypatch.setattr(accounts, "groups", accounts.CachedLookup(hangs))
    with pytest.raises(TimeoutError):
        CheckUsers("vipd-admin").account("web")


@pytest.mark.parametrize("user", ["0", "1000", "+0", "0x0", "root\n"])
def test_a_number_names_no_user(user: str) -> None:
    (found,) = of_user(user)
    assert ": there is none; hint: " in found


@pytest.mark.parametrize(
    "check",
    [
        Check(ExecProbe()),
        Check(ExecProbe(command=("",))),
        Check(ExecProbe(command=("/bin/a\0b",))),
        Check(ExecProbe(command=("/bin/\ud800",))),
        Check(ExecProbe(command=("/" + "x" * 5000,))),
        Check(ExecProbe(command=("/" + "x/" * 5000,))),
        Check(ExecProbe(command=("/bin/true/x",))),
        Check(ExecProbe(command=("/bin/true",), user="a\0b")),
        Check(ExecProbe(command=("/bin/true",), user="\ud800")),
        Check(ExecProbe(command=(None,))),  # type: ignore[arg-type]
        Check(ExecProbe(command=None)),  # type: ignore[arg-type]
        Check(ExecProbe(command=("/bin/true",), user=["x"])),  # type: ignore[arg-type]
        Check(HttpProbe(tls=True, ca="/a\0b")),
        Check(HttpProbe(tls=True, ca="/\ud800")),
        Check(HttpProbe(tls=True, ca="/" + "x" * 5000)),
        Check(HttpProbe(tls=True, ca=7)),  # type: ignore[arg-type]
        None,
    ],
)
def test_nothing_raises_and_what_is_malformed_is_a_problem(check: Check) -> None:
    found = host_problems(check)
    assert found
    assert all("; hint: " in problem for problem in found)


def test_an_error_that_nobody_expects_is_a_problem_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("by chance")

    monkeypatch.setattr("vipd.health.host_problems._user_problems", fails)
    for _ in range(3):
        (found,) = of_user("nobody")
        assert (
            "internal error while looking at a check: ZeroDivisionError: by chance; hint: please report it"
            in found
        )
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info


def test_a_directory_of_accounts_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "LOOKUP_TIMEOUT_SECONDS", 0.1)
    free = threading.Event()
    monkeypatch.setattr(accounts, "users", accounts.CachedLookup(lambda _: free.wait(60)))
    (found,) = of_user("someone")
    free.set()
    assert found.startswith("user someone: cannot be looked up: the account database does not answer; hint:")


@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "large", "endless"])
def test_a_ca_that_is_no_plain_file_neither_hangs_nor_fills_memory(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path = Path("/dev/zero")
        case "directory":
            path.mkdir()
        case "large":
            path.write_bytes(b"x" * (MOST_CA_BYTES + 1))
        case "endless":
            path = Path("/proc/self/pagemap")
    found = host_problems(Check(HttpProbe(tls=True, ca=str(path))))
    assert len(found) == 1
    assert found[0].startswith(f"ca {path}: ")


def test_threads_may_ask_at_once() -> None:
    checks = [Check(ExecProbe(command=("/bin/true",), user=f"none-{n % 5}")) for n in range(200)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(host_problems, checks))
    assert {len(problems) for problems in found} == {1}


def test_a_ca_file_must_hold_certificates(tmp_path: Path) -> None:
    empty, none = tmp_path / "empty.pem", tmp_path / "none.pem"
    empty.write_text("")
    (found,) = host_problems(Check(HttpProbe(tls=True, ca=str(none))))
    assert found == f"ca {none}: No such file or directory; hint: name a file that vipd can read"
    (found,) = host_problems(Check(HttpProbe(tls=True, ca=str(empty))))
    assert found.startswith(f"ca {empty}: no certificates: ")
    assert found.endswith("; hint: it must be a PEM file")
    assert host_problems(Check(HttpProbe(tls=True, verify=False, ca=str(none)))) == ()
