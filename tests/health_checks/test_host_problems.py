"""What only the host can tell about a check."""

from __future__ import annotations

import getpass
from pathlib import Path

from vipd.checks import Check, ExecProbe, HttpProbe, TcpProbe
from vipd.health.host_problems import host_problems


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


def test_a_user_must_exist_and_not_be_root() -> None:
    root = host_problems(Check(ExecProbe(command=("/bin/true",), user="root")))
    assert root == ("user root: checks never run as root; hint: use nobody",)
    me = getpass.getuser()
    if me != "root":
        assert host_problems(Check(ExecProbe(command=("/bin/true",), user=me))) == ()


def test_a_ca_file_must_hold_certificates(tmp_path: Path) -> None:
    empty, none = tmp_path / "empty.pem", tmp_path / "none.pem"
    empty.write_text("")
    (found,) = host_problems(Check(HttpProbe(tls=True, ca=str(none))))
    assert found == f"ca {none}: No such file or directory; hint: name a file that vipd can read"
    (found,) = host_problems(Check(HttpProbe(tls=True, ca=str(empty))))
    assert found.startswith(f"ca {empty}: no certificates: ")
    assert found.endswith("; hint: it must be a PEM file")
    assert host_problems(Check(HttpProbe(tls=True, verify=False, ca=str(none)))) == ()
