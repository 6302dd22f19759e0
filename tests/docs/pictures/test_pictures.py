"""The pictures of README.md are drawn anew and compared; at night the recorded minute is run anew, too."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.docs.commands import calls_of_ours, fault_of
from tests.docs.markdown import ROOT, Block, prose
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
def test_a_picture_is_the_one_that_is_drawn_now_and_fits_every_reader(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == drawings(RECORDED)[path], "stale; run: python -m tests.docs.pictures"
    assert len(text.encode()) < MOST_BYTES
    drawn = ET.fromstring(text)  # noqa: S314 (drawn here)
    assert {each.tag.removeprefix(SVG) for each in drawn.iter()} <= ELEMENTS
    assert re.findall(r"href|@import|url\((?!#)|\son\w+=", text) == [], "it needs nothing else"
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


@pytest.mark.parametrize("text", ["\x1b[2J", "\x1b[A", "\x1b[44m", "50 %\r60 %", "\x07"])
def test_what_cannot_be_drawn_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not drawn"):
        rows(Recording(10, 3, 2.0, (Output(0.0, text),)))
