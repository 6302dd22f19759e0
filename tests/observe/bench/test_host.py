"""`vipctl bench`: a short measurement that leaves the host as it was, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.dataplane.namespace import Namespace
from vipd.observe.bench.host import LIMIT_SECONDS, Measurement, measure_host
from vipd.observe.bench.namespace import TrialError
from vipd.observe.bench.trial import Outcome, Trial
from vipd.observe.bench.usage import Usage

BENCH = [sys.executable, "-m", "vipd.cli.main", "bench"]
RULES = "*nat\n:OTHERS - [0:0]\n-A OTHERS -d 192.0.2.1/32 -j RETURN\nCOMMIT\n"
USAGE = Usage(0.5, 0.1, 100, 1, 5.0, 40.0)


@pytest.fixture
def host() -> Iterator[Namespace]:
    """A namespace that stands for the host, with somebody's rules in it."""
    with Namespace() as made:
        inside(made, "iptables-restore", text=RULES)
        yield made


def inside(host: Namespace, *argv: str, text: str | None = None) -> str:
    command = ["ip", "netns", "exec", host.name, *argv]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=250).stdout


def state(host: Namespace) -> tuple[str, ...]:
    """All that a measurement could leave behind: rules, devices, processes, settings."""
    return (
        inside(host, "nft", "list", "ruleset"),
        inside(host, "iptables-legacy-save"),
        inside(host, "ip", "-o", "address"),
        inside(host, "cat", "/proc/sys/net/ipv4/ip_forward"),
    )


def processes_in(session: int) -> list[str]:
    """The command lines of what runs in a session."""
    listed = subprocess.run(["ps", "-eo", "sid=,args="], capture_output=True, text=True, check=True).stdout
    found = (line.split(maxsplit=1) for line in listed.splitlines())
    return [args for sid, args in found if int(sid) == session]


def pids_in(session: int) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "sid=,pid="], capture_output=True, text=True, check=True).stdout
    found = (map(int, line.split()) for line in listed.splitlines())
    return [pid for sid, pid in found if sid == session]


def workers_in(session: int) -> list[str]:
    return [args for args in processes_in(session) if "vipd.observe.bench.worker" in args]


def until(question: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not question() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(question())


@pytest.mark.nightly
@pytest.mark.root
def test_it_measures_and_leaves_the_host_alone(host: Namespace) -> None:
    before = state(host)
    said = json.loads(inside(host, *BENCH, "--services", "10", "--dataplane", "nftables", "-o", "json"))
    found = said["bench"]["measured"]
    assert [each["subject"] for each in found] == ["vipd nftables"]
    for what in ("load_seconds", "change_seconds", "memory_mib", "direct", "vip"):
        assert all(value > 0 for value in found[0][what]), what
        assert found[0][what], what
    assert state(host) == before


@pytest.mark.root
@pytest.mark.parametrize(
    ("ending", "code", "complaint"), [(signal.SIGINT, 130, "vipctl: interrupted"), (signal.SIGKILL, -9, "")]
)
def test_nothing_is_left_when_it_is_ended(
    host: Namespace, ending: signal.Signals, code: int, complaint: str
) -> None:
    before = state(host)
    began = time.monotonic()
    with running_bench(host) as process:
        assert until(lambda: workers_in(process.pid), 120), "it never began"
        starting = time.monotonic() - began
        if ending == signal.SIGINT:
            os.killpg(process.pid, ending)  # as a terminal does
        else:
            process.kill()
        _, complained = process.communicate(timeout=120)
        assert (process.returncode, complained.strip()) == (code, complaint)
        # Left to itself the worker would not end before its limit, and not before it has prepared all these
        # services, which takes many times as long as the start of a program.
        patience = max(LIMIT_SECONDS - 3, 5 * starting)
        assert until(lambda: not processes_in(process.pid), patience), processes_in(process.pid)
    assert state(host) == before


@contextmanager
def running_bench(host: Namespace) -> Iterator[subprocess.Popen[str]]:
    """A measurement that takes long, in a session of its own; nothing of that runs on afterwards."""
    process = subprocess.Popen(
        ["ip", "netns", "exec", host.name, *BENCH, "--services", "30000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for pid in pids_in(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def test_rounds_end_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def carried_out(trial: Trial) -> Outcome:
        now[0] += 10.0
        return Outcome((USAGE,), (USAGE,), (USAGE,), {}, {"direct": 100.0, "vip": 90.0})

    monkeypatch.setattr("vipd.observe.bench.host.run_trial", carried_out)
    rounds = [number for number, _ in measure_host(("a", "b"), 10, clock=lambda: now[0])]
    assert rounds == [1, 1, 2, 2], "a third round would end at 60 s"


def test_who_fails_or_takes_too_long_is_left_out_of_further_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def carried_out(trial: Trial) -> Outcome:
        asked.append(trial.subject)
        if trial.subject == "broken":
            raise TrialError("it broke")
        return Outcome() if trial.subject == "slow" else Outcome((USAGE,), (USAGE,), (USAGE,))

    monkeypatch.setattr("vipd.observe.bench.host.run_trial", carried_out)
    last: dict[str, Measurement] = {}
    for _, each in measure_host(("slow", "broken", "good"), 10, clock=lambda: 0.0):
        last[each.subject] = each
    assert last["slow"].problem == f"more than {LIMIT_SECONDS:.0f} s"
    assert last["broken"].problem == "it broke"
    assert asked.count("good") == len(last["good"].load_seconds) == 5
    assert asked.count("slow") == asked.count("broken") == 1


def test_the_table_fits_a_screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from vipd.cli.main import run

    def measured(subjects: object, services: int) -> Iterator[tuple[int, Measurement]]:
        yield (
            1,
            Measurement(
                "vipd iptables-legacy", [12.3, 14.9], [0.123, 0.156], [120.0], [10123.0], [10456.0, 9999.0]
            ),
        )
        yield 1, Measurement("vipd iptables-nft", problem="more than 15 s")

    monkeypatch.setattr("vipd.cli.bench.measure_host", measured)
    monkeypatch.setattr("vipd.cli.bench.os.geteuid", lambda: 0)
    monkeypatch.setattr("vipd.cli.bench.subjects_here", lambda dataplane: ("any",))
    assert run(["bench", "--services", "100000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    assert lines[-1] == "iptables-nft: more than 15 s"
    assert any("14.9 s" in line for line in lines)
    assert any("12.3-14.9" in line for line in lines)


def test_it_needs_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from vipd.cli.main import run

    monkeypatch.setattr("vipd.cli.bench.os.geteuid", lambda: 1000)
    assert run(["bench"]) == 4
    assert "hint: sudo vipctl bench" in capsys.readouterr().err
