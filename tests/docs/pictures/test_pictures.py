"""The pictures of README.md are drawn anew and compared; at night the recorded minute is run anew, too."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.docs.commands import calls_of_ours, fault_of
from tests.docs.markdown import ROOT, Block, prose
from tests.docs.pictures import terminal
from tests.docs.pictures.__main__ import CAST, PICTURES, drawings
from tests.docs.pictures.cast import Output, Recording, rows
from tests.docs.pictures.session import STEPS, VARIES, record
from tests.docs.transcript import mismatch
from tests.lab.topology import CLIENT_SOURCES

MOST_BYTES = 60_000
RECORDED = Recording.read(CAST.read_text(encoding="utf-8"))
PATHS = sorted(drawings(RECORDED))
SVG = "{http://www.w3.org/2000/svg}"
ELEMENTS = {"svg", "title", "style", "rect", "path", "text", "g", "marker", "clipPath"}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_a_picture_is_the_one_that_is_drawn_now(path: Path) -> None:
    drawn = drawings(RECORDED)[path]
    assert path.read_text(encoding="utf-8") == drawn, "stale; run: python -m tests.docs.pictures"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_a_picture_is_small_and_needs_nothing_else(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_BYTES
    drawn = ET.fromstring(text)  # noqa: S314 (drawn here)
    assert {each.tag.removeprefix(SVG) for each in drawn.iter()} <= ELEMENTS
    assert re.findall(r"href|@import|url\((?!#)|\son\w+=", text) == []


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_every_colour_of_a_picture_has_a_light_and_a_dark_form(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    light, _, dark = text.partition("prefers-color-scheme: dark")
    used = set(re.findall(r"var\((--\w+)\)", text))
    assert used
    for theme in (light, dark):
        assert used <= set(re.findall(r"(--\w+): #", theme.partition("}")[0]))


def test_the_readme_shows_every_picture_and_each_has_a_text() -> None:
    shown = dict(
        found[::-1]
        for line in prose(ROOT / "README.md")
        for found in re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", line.text)
    )
    assert shown.keys() == {str(path.relative_to(ROOT)) for path in PATHS}
    assert {path.name for path in PICTURES.iterdir()} == {path.name for path in PATHS}
    assert all(len(text) > 20 for text in shown.values())


def test_the_recording_is_of_what_is_typed_now() -> None:
    shown = [row.text.rstrip() for row in rows(RECORDED)]
    typed = [
        line for step in STEPS for line in f"{step.prompt}{step.command}".replace("\n", "\n> ").split("\n")
    ]
    assert [line for line in shown if line in typed] == typed


def test_what_is_typed_uses_verbs_and_options_that_exist() -> None:
    text = "".join(f"# {step.command}\n" for step in STEPS)
    calls = list(calls_of_ours(Block(ROOT / "README.md", 1, "console", text)))
    assert len(calls) >= 4
    assert [fault for call in calls if (fault := fault_of(call))] == []


def test_the_recording_shows_that_a_dead_backend_leaves() -> None:
    before, kill, after = RECORDED.text.partition("b1# kill")
    assert kill
    assert all(f"b{number} answers" in before for number in (1, 2, 3))
    assert "b1 answers" not in after
    assert f"{90} " not in after
    answered = [int(count) for count in re.findall(r"(\d+) b[23] answers", after)]
    assert (len(answered), sum(answered)) == (2, 90)
    assert re.search(r"10\.244\.0\.11:8080 +1 +0\.0 +no +unhealthy +- +unhealthy: connection refused", after)


def test_the_picture_names_the_addresses_of_the_recording() -> None:
    text = (PICTURES / "packet-path.svg").read_text(encoding="utf-8")
    addresses = set(re.findall(r"\d+\.\d+\.\d+\.\d+", text))
    assert addresses <= {*re.findall(r"\d+\.\d+\.\d+\.\d+", RECORDED.text), CLIENT_SOURCES[0]}
    assert len(addresses) == 6


@pytest.mark.root
@pytest.mark.nightly
def test_the_first_minute_goes_as_recorded() -> None:
    expected, now = RECORDED.text.splitlines(), record().text
    assert mismatch(expected, now, VARIES) == ""


def recording(*outputs: tuple[float, str]) -> Recording:
    return Recording(10, 3, 2.0, tuple(Output(at, text) for at, text in outputs))


def test_a_file_of_a_recording_is_read_as_it_was_written() -> None:
    made = recording((0.0, "\x1b[31mé\x1b[0m"), (1.5, "\r\n"))
    assert Recording.read(made.write()) == made


def test_a_longer_pause_is_cut_and_what_follows_comes_earlier() -> None:
    made = recording((1.0, "a"), (11.0, "b"), (12.0, "c")).shortened()
    assert [output.at for output in made.outputs] == [1.0, 3.0, 4.0]


def test_rows_wrap_and_keep_their_colours() -> None:
    first, second, third = rows(recording((0.0, "\x1b[1m123456789\x1b[32m012\x1b[0m\r\r\n"), (1.0, "x")))
    assert (first.text, second.text, third.text) == ("1234567890", "12", "x")
    assert [(column, text, set(styles)) for column, text, styles in first.runs()] == [
        (0, "123456789", {"bold"}),
        (9, "0", {"bold", "green"}),
    ]
    assert [cell.at for cell in third.cells] == [1.0]


@pytest.mark.parametrize("text", ["\x1b[2J", "\x1b[A", "\x1b[44m", "50 %\r60 %", "\x07"])
def test_what_cannot_be_drawn_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not drawn"):
        rows(recording((0.0, text)))


def test_a_typed_row_is_uncovered_and_an_output_appears_at_once() -> None:
    made = recording(
        (0.0, "$ "), (1.0, "l"), (1.1, "s"), (1.2, " "), (1.3, "-"), (2.0, "\r\n"), (2.0, "<a&b>")
    )
    typed, printed = rows(made)
    assert (typed.typed_from, printed.typed_from) == (2, 5)
    drawn = terminal.draw(made, "x")
    assert "&lt;a&amp;b&gt;" in drawn
    assert ("@keyframes c0" in drawn, "@keyframes c1" in drawn) == (True, False)


def test_the_sheet_moves_when_the_terminal_is_full() -> None:
    made = recording((0.0, "a\r\nb\r\nc"), (1.0, "\r\n"), (2.0, "d"))
    frames = re.search(r"@keyframes sheet {(.*)}", terminal.draw(made, "x"))
    assert frames is not None
    moment = 100 / (2 + terminal.AT_THE_END)
    assert f"{moment:.3f}%{{transform:translateY(-{terminal.LINE:g}px)}}" in frames[1]
