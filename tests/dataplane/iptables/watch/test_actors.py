"""Who is behind a change of rules, from what /proc and systemd's control groups still show."""

from __future__ import annotations

from pathlib import Path

import pytest

from vipd.dataplane.iptables.watch.actors import Actors
from vipd.dataplane.iptables.watch.external_change import Actor, named
from vipd.dataplane.iptables.watch.messages import Generation
from vipd.dataplane.iptables.watch.repair_backoff import REPAIRS_WITHOUT_PAUSE, RepairBackoff

PID = 9
RESTORE = Generation(PID, PID, "iptables-restor")


class FakeProc:
    """Processes and services below a directory."""

    def __init__(self, place: Path) -> None:
        self._proc, self._groups = place / "proc", place / "cgroup"
        self.actors = Actors(self._proc, (self._groups,))

    def run(self, pid: int, words: str, parent: int, comm: str = "") -> None:
        directory = self._proc / str(pid)
        directory.mkdir(parents=True, exist_ok=True)
        name = (comm or words.split()[0].rpartition("/")[2])[:15]
        (directory / "comm").write_text(f"{name}\n")
        (directory / "cmdline").write_text("\0".join([*words.split(), ""]))
        (directory / "status").write_text(f"Name:\t{name}\nPid:\t{pid}\nPPid:\t{parent}\nUid:\t0\n")

    def end(self, pid: int) -> None:
        for file in (self._proc / str(pid)).iterdir():
            file.unlink()
        (self._proc / str(pid)).rmdir()

    def service(self, name: str, pid: int) -> None:
        directory = self._groups / f"system.slice/{name}.service"
        directory.mkdir(parents=True)
        (directory / "cgroup.procs").write_text(f"{pid}\n")


@pytest.fixture
def host(tmp_path: Path) -> FakeProc:
    made = FakeProc(tmp_path)
    made.run(1, "/sbin/init", 0, "systemd")
    made.run(8, "/usr/bin/python3 /usr/sbin/firewalld --nofork", 1, "firewalld")
    return made


def test_the_parent_is_named_and_the_tool_in_full(host: FakeProc) -> None:
    host.run(PID, "/usr/sbin/iptables-restore -w -n", 8)
    actor = host.actors.of(RESTORE)
    assert actor == Actor("iptables-restore", PID, "firewalld", 8)
    assert actor.offender == ("firewalld", 8)


@pytest.mark.parametrize(
    "words", ["sh -c iptables", "/usr/bin/sudo -n iptables", "ip netns exec a iptables", "timeout 5 nft"]
)
def test_what_only_passes_on_is_passed_over(host: FakeProc, words: str) -> None:
    host.run(10, words, 8)
    host.run(PID, "/usr/sbin/iptables-restore", 10)
    assert host.actors.of(RESTORE).offender == ("firewalld", 8)


def test_a_shell_that_somebody_types_into_is_named_itself(host: FakeProc) -> None:
    host.run(10, "-bash", 1, "bash")
    host.run(PID, "/usr/sbin/iptables-restore", 10)
    assert host.actors.of(RESTORE).offender == ("bash", 10)


def test_a_pid_that_is_somebody_elses_by_now_names_nobody(host: FakeProc) -> None:
    host.run(PID, "/usr/bin/sleep 5", 8)
    assert host.actors.of(RESTORE) == Actor("iptables-restore", PID)
    assert host.actors.of(Generation(7, 7, "nft")) == Actor("nft", 7)


def test_who_ran_it_before_has_probably_run_it_again(host: FakeProc) -> None:
    host.run(PID, "/usr/sbin/iptables-restore", 8)
    host.actors.of(RESTORE)
    host.end(PID)
    again = host.actors.of(Generation(11, 11, "iptables-restor"))
    assert again == Actor("iptables-restore", 11, "firewalld", 8, guessed=True)
    assert named([again]) == ["iptables-restore (pid 11), probably of firewalld (pid 8)"]
    assert host.actors.of(Generation(11, 11, "nft")) == Actor("nft", 11), "that it has not been seen to run"
    host.end(8)
    assert host.actors.of(RESTORE) == Actor("iptables-restore", PID)


def test_the_one_service_that_runs_such_programs_is_probably_it(host: FakeProc) -> None:
    host.service("firewalld", 8)
    assert host.actors.of(RESTORE) == Actor("iptables-restore", PID, "firewalld", 8, guessed=True)
    host.run(12, "/usr/bin/dockerd", 1)
    host.service("docker", 12)
    assert host.actors.of(RESTORE).parent == "firewalld", "dockerd runs iptables only"
    assert host.actors.of(Generation(PID, PID, "iptables")) == Actor("iptables", PID), "one of two"
    assert host.actors.of(Generation(PID, PID, "sleep")) == Actor("sleep", PID), "no tool of anybody"


def test_a_guess_is_called_one_until_it_is_confirmed() -> None:
    peace = RepairBackoff()
    for number in range(REPAIRS_WITHOUT_PAUSE):
        peace.record_change([Actor("iptables-restore", number, "firewalld", 8, guessed=True)], float(number))
        peace.record_repair(True, float(number))
    (warning,) = peace.warnings(float(REPAIRS_WITHOUT_PAUSE))
    assert warning.startswith("probably firewalld (pid 8) has undone vipd's rules")
    assert "FlushAllOnReload" in warning
    peace.record_change([Actor("iptables-restore", 9, "firewalld", 8)], 6.0)
    peace.record_repair(True, 6.0)
    assert peace.warnings(7.0)[0].startswith("firewalld (pid 8) has undone")
