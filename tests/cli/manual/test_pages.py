"""The manual pages: sound roff, at home in 80 columns, and true to the program."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import click
import pytest

from tests.cli.manual.conftest import NEW_YEAR, ROOT
from tests.docs.commands import calls_of_ours, fault_of
from tests.docs.markdown import Block as Fence
from vipd import __version__
from vipd.cli import errors
from vipd.cli.main import HIDDEN, VERBS, cli
from vipd.cli.manual.__main__ import day_of, files, main, pages
from vipd.cli.manual.pages import Entry, Example, Page, Paragraph, Section, entry
from vipd.cli.manual.roff import roff
from vipd.cli.manual.vipctl_page import EXIT_CODES as VIPCTL_CODES
from vipd.cli.manual.vipd_page import EXIT_CODES as VIPD_CODES
from vipd.declaration.key_docs import GROUPS
from vipd.declaration.native import parse_declaration
from vipd.host import preflight as start
from vipd.host.settings.command_line import EXIT_CONFIGURATION, argument_parser
from vipd.host.settings.layers import ENVIRONMENT_PREFIX
from vipd.host.settings.settings import Settings, load_settings
from vipd.host.settings.settings_file import read_settings_text

NAMES = ["vipd.8", "vipctl.1", "vipd.yaml.5", "vipd-services.5"]


def needs(program: str, package: str) -> pytest.MarkDecorator:
    reason = f"{program} is not installed: apt-get install {package}"
    return pytest.mark.skipif(shutil.which(program) is None, reason=reason)


def complaints(*command: str | Path) -> str:
    """What a program says of a page."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    return ended.stderr + (ended.stdout if command[0] == "mandoc" else "")


def shown(page: Path, width: int = 80) -> str:
    """The page as a terminal shows it, without fonts."""
    command = ["groff", "-man", "-Tutf8", "-P-cbou", f"-rLL={width}n", str(page)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout


@pytest.fixture(scope="module")
def texts(made: Path) -> dict[str, str]:
    """Each page so wide that no line is broken, every run of spaces as one."""
    return {name: re.sub(r" +", " ", shown(made / "man" / name, 5000)) for name in NAMES}


@needs("mandoc", "mandoc")
@pytest.mark.parametrize("name", NAMES)
def test_mandoc_has_nothing_to_say(made: Path, name: str) -> None:
    assert complaints("mandoc", "-T", "lint", "-W", "style", made / "man" / name) == ""


@needs("groff", "groff-base")
@pytest.mark.parametrize("name", NAMES)
def test_groff_has_nothing_to_say(made: Path, name: str) -> None:
    assert complaints("groff", "-man", "-ww", "-z", made / "man" / name) == ""


@needs("man", "man-db")
@pytest.mark.parametrize("name", NAMES)
def test_man_has_nothing_to_say(made: Path, name: str) -> None:
    command = ["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z", str(made / "man" / name)]
    assert complaints(*command) == ""


@needs("groff", "groff-base")
@pytest.mark.parametrize("name", NAMES)
def test_a_page_fits_eighty_columns(made: Path, name: str) -> None:
    assert [line for line in shown(made / "man" / name).splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_what_is_looked_for(name: str) -> None:
    (page,) = (page for page in pages() if page.file == name)
    titles = [section.title for section in page.sections]
    wanted = ["SYNOPSIS", "DESCRIPTION", "FILES", "EXAMPLES", "SEE ALSO"]
    wanted += ["OPTIONS", "EXIT STATUS", "ENVIRONMENT"] if name in ("vipd.8", "vipctl.1") else []
    assert set(wanted) <= set(titles)


@pytest.mark.parametrize("name", NAMES)
def test_pages_name_each_other(made: Path, name: str) -> None:
    below = (made / "man" / name).read_text().partition('.SH "SEE ALSO"')[2].replace("\\-", "-")
    named = {f"{page}.{number}" for page, number in re.findall(r"\\fB([\w.-]+)\\fP\((\d)\)", below)}
    assert set(NAMES) - {name} == named & set(NAMES)


def parts_of(text: str) -> dict[str, str]:
    """What vipctl(1) says of each verb."""
    commands = text.partition("\nCOMMANDS\n")[2].partition("\nFILES\n")[0]
    found = re.split(r"^ vipctl ([a-z-]+) (?=.*\[OPTION\.\.\.\])", commands, flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


@needs("groff", "groff-base")
def test_every_verb_has_its_place_and_hidden_ones_have_none(texts: dict[str, str]) -> None:
    assert set(parts_of(texts["vipctl.1"])) == set(VERBS)
    assert not set(HIDDEN) & set(parts_of(texts["vipctl.1"]))


@needs("groff", "groff-base")
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_its_options_and_arguments(texts: dict[str, str], verb: str) -> None:
    part = parts_of(texts["vipctl.1"])[verb]
    command = cli.get_command(click.Context(cli, **cli.context_settings), verb)
    assert command is not None
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{verb} {parameter.opts} has no help"
            for name in parameter.opts:
                assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", part), name
        else:
            assert str(parameter.metavar or parameter.name) in part
    words = (command.help or "").split()
    assert words[0] in part


@needs("groff", "groff-base")
def test_every_option_of_the_daemon_is_told(texts: dict[str, str]) -> None:
    for action in argument_parser()._actions:
        assert action.help, action.option_strings
        assert f"\n {', '.join(action.option_strings)}" in texts["vipd.8"]


@needs("groff", "groff-base")
@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_told(texts: dict[str, str], name: str) -> None:
    told = re.search(rf"^ {name}: (.+)\n(.+)\n", texts["vipd.yaml.5"], re.MULTILINE)
    assert told, f"{name} is not in vipd.yaml(5)"
    assert re.search(r"\. Default: .+\.$", told[2])
    assert f"{ENVIRONMENT_PREFIX}NAME" in texts["vipd.yaml.5"]


@needs("groff", "groff-base")
@pytest.mark.parametrize("title", GROUPS)
def test_every_key_is_told(texts: dict[str, str], title: str) -> None:
    part = texts["vipd-services.5"].partition(f"\n {title}\n")[2]
    for key in GROUPS[title].keys:
        assert re.search(rf"^ {key}: .+\n .+", part, re.MULTILINE), f"{key} is not told under {title!r}"


def test_every_exit_code_is_told() -> None:
    codes = {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}
    assert set(VIPCTL_CODES) == codes
    daemon = {value for name, value in vars(start).items() if name.startswith("EXIT_")}
    assert {*daemon, EXIT_CONFIGURATION} <= set(VIPD_CODES)


def faults_in(example: Example) -> list[str]:
    """Why the programs would not take an example."""
    if example.language == "yaml":
        declared = parse_declaration(example.text, "example.yaml")
        return [*map(str, declared.problems), *([] if declared.services else ["it declares nothing"])]
    if example.language == "settings":
        return [] if load_settings(flags=read_settings_text(example.text, "example")) else ["nothing"]
    joined = example.text.replace("\\\n", " ")
    calls = list(calls_of_ours(Fence(ROOT, 1, "sh", joined)))
    faults = [fault for call in calls if (fault := fault_of(call))]
    return faults if calls else ["it calls none of our programs"]


def test_every_example_is_taken_by_the_program() -> None:
    examples = [(page.file, example) for page in pages() for example in page.examples()]
    assert [(name, fault) for name, example in examples for fault in faults_in(example)] == []
    assert len(examples) > 20
    assert {example.language for _, example in examples} == {"shell", "yaml", "settings"}


def test_a_wrong_example_is_noticed() -> None:
    assert faults_in(Example("apiVersion: vipd/v1\nservices: [{address: 10.96.0.1}]", "yaml"))
    assert faults_in(Example("vipctl list --every"))
    assert faults_in(Example("ls"))


def test_what_is_made_twice_is_the_same(made: Path) -> None:
    again = dict(files(date(2026, 1, 1)))
    assert {path: (made / path).read_text() for path in again} == again
    assert sorted(path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()) == sorted(
        again
    )


def test_the_date_is_that_of_the_source_or_none(made: Path) -> None:
    assert day_of({"SOURCE_DATE_EPOCH": NEW_YEAR}) == date(2026, 1, 1)
    assert f'2026-01-01 "vipd {__version__}"' in (made / "man" / "vipd.8").read_text()
    assert day_of({}) is None
    assert f'8 "" "vipd {__version__}"' in dict(files(None))["man/vipd.8"]


def test_a_directory_that_cannot_be_made_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").touch()
    monkeypatch.setattr(sys, "argv", ["vipd.cli.manual", str(tmp_path / "taken")])
    assert main() == 1
    assert capsys.readouterr().err.startswith("vipd.cli.manual: ")


def page_of(*blocks: Paragraph | Example | Entry) -> str:
    return roff(Page("x", 1, "a test", (Section("DESCRIPTION", blocks),)), "1", None)


@needs("groff", "groff-base")
def test_characters_that_mean_something_to_roff_are_shown(tmp_path: Path) -> None:
    lines = [".hidden", "'too", r"a\b \fB \n", "~ ^ ` ' \" - -- @", "grün → 10", "..", "  indented"]
    (tmp_path / "x.1").write_text(page_of(Example("\n".join(lines))))
    seen = [line[7:] for line in shown(tmp_path / "x.1").splitlines()]
    assert [line for line in seen if line in lines] == lines


@needs("groff", "groff-base")
def test_markup_and_sentences(tmp_path: Path) -> None:
    text = "Use `a. b` or *FILE*... of `*.yaml`. Then 2*3*4. See vipd_x_y."
    source = page_of(Paragraph(text), entry("`-f` *FILE*", "'Tis it. .x too."))
    assert "\nThen 2*3*4.\nSee vipd_x_y.\n" in source
    assert "\\fBa. b\\fP" in source
    assert "\\fIFILE\\fP..." in source
    (tmp_path / "x.1").write_text(source)
    seen = " ".join(shown(tmp_path / "x.1").split())
    assert "Use a. b or FILE... of *.yaml. Then 2*3*4. See vipd_x_y. -f FILE 'Tis it. .x too." in seen
