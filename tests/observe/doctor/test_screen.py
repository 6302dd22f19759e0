"""What `vipctl doctor` prints: the worst first, within 80 columns, commands that can be pasted."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator

import pytest

from tests.observe.doctor.deceived import Deceived
from tests.observe.terminal import on_terminal

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def ill(deceived: Deceived) -> Iterator[Deceived]:
    """A host with one problem, two warnings, and what cannot be looked at."""
    daemon = deceived.patient.daemon
    assert deceived.doctor.run("add", "10.96.0.20:80/tcp", "10.244.0.11:8080", "--name", "stored")[0] == 0
    (daemon.state_dir / "state.db").write_text("garbage")
    files = {"sys/netfilter/nf_conntrack_count": "85\n", "sys/netfilter/nf_conntrack_max": "100\n"}
    with (
        deceived.files(files | {"recent/ip_list_tot": "100\n"}),
        deceived.programs({"nft --version": "failing"}),
    ):
        yield deceived


def argv(ill: Deceived, *words: str) -> list[str]:
    place = f"--target={ill.doctor.pid}"
    program = (sys.executable, "-m", "vipd.cli.main", "--socket", str(ill.doctor.socket), "doctor")
    return ["nsenter", "--mount", "--net", place, *program, *words]


def heads(lines: list[str]) -> list[str]:
    return [line for line in lines if line and not line.startswith(" ")]


def commands(lines: list[str]) -> list[list[str]]:
    """The commands of a screen, as a shell reads them."""
    text = "\n".join(lines).replace("\\\n", " ")
    return [shlex.split(line.strip()[2:]) for line in text.splitlines() if line.startswith("      # ")]


def test_a_host_that_is_well_takes_one_line(deceived: Deceived) -> None:
    """Before it falls ill."""
    code, text = deceived.doctor.run("doctor")
    assert (code, len(text.splitlines())) == (0, 1)


def test_problems_come_first_then_warnings_then_the_sum(ill: Deceived) -> None:
    code, text = ill.doctor.run("doctor")
    lines = text.splitlines()
    found = json.loads(ill.doctor.run("doctor", "-o", "json")[1])["diagnosis"]
    counts = found["counts"]
    assert (code, found["healthy"]) == (1, False)
    assert (counts["problem"], counts["warning"], counts["unchecked"]) == (1, 2, 1)
    assert len(found["findings"]) == sum(counts.values())
    assert heads(lines) == [
        "Problems",
        "Warnings",
        "Not checked",
        f"1 problem, 2 warnings, 1 not checked, {counts['ok']} in order (--all lists them)",
    ]
    mend = [command for finding in found["findings"] for command in finding["mend"]]
    assert commands(lines) == list(map(shlex.split, mend))
    everything = ill.doctor.run("doctor", "--all")[1].splitlines()
    assert "In order" in everything
    assert everything[-1].endswith(" in order")
    quiet = ill.doctor.run("doctor", "--quiet")[1]
    assert quiet.startswith("Problems")
    assert "in order" not in quiet


def quoted(line: str) -> bool:
    """Whether it is one word for a shell."""
    return line.endswith(" \\") and len(shlex.split(line[:-2])) == 1


def test_it_fits_any_terminal_and_its_commands_stay_the_same(ill: Deceived) -> None:
    """But for a single word that is longer. No screen is used beyond 80 columns."""
    wide = on_terminal(argv(ill, "--all"), 200).splitlines()
    narrow = on_terminal(argv(ill, "--all"), 40, colours=True)
    assert "\x1b[31mProblems\x1b[0m" in narrow
    plain = narrow.replace("\x1b[0m", "")
    for code in ("1", "2", "31", "32", "33"):
        plain = plain.replace(f"\x1b[{code}m", "")
    for lines, width in ((wide, 80), (plain.splitlines(), 40)):
        assert [
            line for line in lines if len(line) > width and len(line.split()) > 3 and not quoted(line)
        ] == []
    assert commands(plain.splitlines()) == commands(wide)
    assert any(line.endswith(" \\") for line in plain.splitlines()), "some command is folded"


def test_what_it_quotes_writes_to_no_terminal_and_fits(ill: Deceived) -> None:
    evil = "\x1b[2J\u202e\n  Problems\r\x9b" * 4
    (ill.patient.daemon.services_dir / "evil.yaml").write_text(
        f"services:\n  - {{name: {json.dumps(evil)}}}\n"
    )
    ill.patient.reload()
    text = ill.doctor.run("doctor")[1]
    (ill.patient.daemon.services_dir / "evil.yaml").unlink()
    assert "evil.yaml" in text
    assert all(line.isprintable() and len(line) <= 80 for line in text.splitlines())
    assert [line for line in text.splitlines() if line.strip() == "Problems"] == ["Problems"]
