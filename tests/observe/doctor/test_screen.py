from __future__ import annotations

import shlex
import subprocess

import pytest

from tests.observe.doctor.facts import KERNEL, PROGRAMS, STATUS, well
from vipd.observe.doctor.diagnosis import Diagnosis, diagnose
from vipd.observe.doctor.facts import Daemon, Facts, Kernel, Programs, StateDir
from vipd.observe.doctor.finding import problem
from vipd.observe.doctor.text import folded, lines_of

LOST = {"drop": 7, "insert_failed": 2}


def plain(text: str, colour: str) -> str:
    return text


def coloured(text: str, colour: str) -> str:
    return f"<{colour}>{text}</>"


def ill() -> Facts:
    """One problem, two warnings, and what a user cannot see."""
    store = "/var/lib/vipd/services.yaml:1: cannot be read, because somebody has written much into it"
    return well(
        state=StateDir("/var/lib/vipd", store_faults=(store,), has_copy=True),
        kernel=Kernel(KERNEL, LOST, LOST, 1.0, affinity_limit=4095),
        daemon=Daemon(STATUS, prefix_in_use=True, vipctl=str(STATUS["version"])),
        programs=Programs("6.1", PROGRAMS.iptables, "", "no such program"),
    )


def shown(diagnosis: Diagnosis, width: int = 80, **options: bool) -> list[str]:
    return list(lines_of(diagnosis, plain, width, **options))


def test_problems_come_first_then_warnings_then_the_sum() -> None:
    lines = shown(diagnose(ill()))
    heads = [line for line in lines if line and not line.startswith(" ")]
    assert heads[:3] == ["Problems", "Warnings", "Not checked"]
    assert heads[-1].startswith("1 problem, 2 warnings, 1 not checked, ")
    assert heads[-1].endswith(" in order (--all lists them)")
    assert "      # cp -p /var/lib/vipd/services.yaml /var/lib/vipd/services.yaml.broken" in lines


def test_what_it_quotes_writes_to_no_terminal_and_fits() -> None:
    evil = "\x1b[2J\u202e\n  Problems\r\x9b" * 4
    state = StateDir("/var/lib/vipd", store_faults=(f"/var/lib/vipd/services.yaml:1: {evil}",), has_copy=True)
    lines = shown(diagnose(well(state=state)), width=80)
    assert all(line.isprintable() and len(line) <= 80 for line in lines)
    assert [line for line in lines if line.strip() == "Problems"] == ["Problems"]


def test_all_and_quiet() -> None:
    found = diagnose(ill())
    assert "In order" in shown(found, everything=True)
    assert shown(found, everything=True)[-1].endswith("in order")
    quiet = shown(found, quiet=True)
    assert quiet[0] == "Problems"
    assert not any("in order" in line for line in quiet)
    assert shown(diagnose(well()), quiet=True) == []
    assert len(shown(diagnose(well()))) == 1


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_it_fits_the_screen(width: int) -> None:
    """But for a single word that is longer."""
    for line in shown(diagnose(ill()), width, everything=True):
        assert len(line) <= min(width, 80) or len(line.split()) <= 3


def test_colours_are_the_screens() -> None:
    text = "\n".join(lines_of(diagnose(ill()), coloured, 80))
    assert "<red>Problems</>" in text
    assert "<yellow>Warnings</>" in text
    assert "\033" not in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["a"] * 60,
        ["with blanks in it that go on for long", "and 'quotes' in it", 'and "others"', "$HOME", "\\"],
        ["x" * 100, "y", "z" * 100],
        [""],
    ],
)
def test_a_folded_command_is_the_same_command(arguments: list[str]) -> None:
    command = f"printf '[%s]' {shlex.join(arguments)}"
    lines = folded(command, 30)
    assert len(lines) > 1 or len(command) <= 30
    ran = [
        subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True).stdout
        for text in (command, "\n".join(["\n".join(lines[:1]), *(f"      {line}" for line in lines[1:])]))
    ]
    assert ran[0] == ran[1]


def test_the_view_holds_what_the_screen_shows() -> None:
    view = diagnose(ill()).view()
    assert view["healthy"] is False
    assert view["counts"] == {
        "problem": 1,
        "warning": 2,
        "unchecked": 1,
        "ok": len(view["findings"]) - 4,  # type: ignore[arg-type]  # a list, as JSON
    }
    assert problem("x", "y", "a", "b").fix == ("a", "b")
