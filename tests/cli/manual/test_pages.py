"""The manual pages: sound roff, at home in 80 columns, and true to the program."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import vipd
from tests.cli.conftest import Vipctl, vipctl
from tests.cli.manual.conftest import ROOT, run
from tests.docs.commands import calls_of_ours, fault_of
from tests.docs.markdown import Block as Fence
from tests.lab.inside import declare

__all__ = ["vipctl"]

NAMES = ["vipd.8", "vipctl.1", "vipd.yaml.5", "vipd-services.5"]
SECTIONS = ("SYNOPSIS", "DESCRIPTION", "FILES", "EXAMPLES", '"SEE ALSO"')
OF_PROGRAMS = ("OPTIONS", '"EXIT STATUS"', "ENVIRONMENT")
LINTERS = {
    "mandoc": ("-T", "lint", "-W", "style"),
    "groff": ("-man", "-ww", "-z"),
    "man": ("--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z"),
}
OPTION = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")


def needs(program: str) -> pytest.MarkDecorator:
    package = {"groff": "groff-base", "man": "man-db"}.get(program, program)
    reason = f"{program} is not installed: apt-get install {package}"
    return pytest.mark.skipif(shutil.which(program) is None, reason=reason)


def shown(page: Path, width: int = 80) -> str:
    """The page as a terminal shows it, without fonts."""
    command = ["groff", "-man", "-Tutf8", "-P-cbou", f"-rLL={width}n", str(page)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout


@pytest.fixture(scope="module")
def texts(made: Path) -> dict[str, str]:
    """Each page so wide that no line is broken, every run of spaces as one."""
    return {name: re.sub(r" +", " ", shown(made / "man" / name, 5000)) for name in NAMES}


@pytest.mark.parametrize("program", [pytest.param(name, marks=needs(name)) for name in LINTERS])
def test_readers_of_roff_have_nothing_to_say(made: Path, program: str) -> None:
    for name in NAMES:
        command = [program, *LINTERS[program], str(made / "man" / name)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert ended.stderr + (ended.stdout if program == "mandoc" else "") == "", name


@needs("groff")
def test_a_page_fits_eighty_columns_and_has_what_is_looked_for(made: Path) -> None:
    for name in NAMES:
        page = made / "man" / name
        assert [line for line in shown(page).splitlines() if len(line) > 80] == []
        source = page.read_text()
        assert "--" not in source, "a reader of roff may show another character for a bare hyphen"
        wanted = {*SECTIONS, *(OF_PROGRAMS if name in ("vipd.8", "vipctl.1") else ())}
        assert wanted <= set(re.findall(r"^\.SH (.*)$", source, re.MULTILINE)), name
        below = source.partition('.SH "SEE ALSO"')[2].replace("\\-", "-")
        others = {f"{other}.{number}" for other, number in re.findall(r"\\fB([\w.-]+)\\fP\((\d)\)", below)}
        assert set(NAMES) - {name} == others & set(NAMES)


@needs("groff")
def test_every_verb_has_its_place_with_its_options_and_codes(texts: dict[str, str], vipctl: Vipctl) -> None:
    commands = texts["vipctl.1"].partition("\nCOMMANDS\n")[2].partition("\nFILES\n")[0]
    found = re.split(r"^ vipctl ([a-z-]+) (?=.*\[OPTION\.\.\.\])", commands, flags=re.MULTILINE)
    parts = dict(zip(found[1::2], found[2::2], strict=True))
    verbs = re.findall(r"^  ([a-z][a-z-]+)  ", vipctl("-h").out, re.MULTILINE)
    assert parts.keys() == set(verbs)
    for verb, part in parts.items():
        options = re.findall(r"^  (-.*?)(?:  |$)", vipctl(verb, "-h").out, re.MULTILINE)
        for option in {name for line in options for name in OPTION.findall(line)} - {"-h", "--help"}:
            assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", part), (verb, option)
    codes = re.findall(r"\b(\d) ", vipctl("-h").out.partition("Exit codes:")[2].replace("\n", " "))
    assert len(codes) >= 6
    told = texts["vipctl.1"].partition("EXIT STATUS")[2].partition("EXAMPLES")[0]
    assert [code for code in [*codes, "130"] if not re.search(rf"^ {code} ", told, re.MULTILINE)] == []


@needs("groff")
def test_every_option_of_the_daemon_and_every_setting_is_told(made: Path, texts: dict[str, str]) -> None:
    usage = run("vipd", "--help").stdout
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", usage))
    assert len(options) > 8
    assert [name for name in options if not re.search(rf"^ .*{name}\b", texts["vipd.8"], re.MULTILINE)] == []
    told = texts["vipd.8"].partition("EXIT STATUS")[2]
    assert [code for code in (0, 1, 2, 77, 78) if not re.search(rf"^ {code} ", told, re.MULTILINE)] == []
    for name in json.loads((made / "schemas/settings.schema.json").read_text())["properties"]:
        setting = re.search(rf"^ {name}: (.+)\n(.+)\n", texts["vipd.yaml.5"], re.MULTILINE)
        assert setting, f"{name} is not in vipd.yaml(5)"
        assert re.search(r"\. Default: .+\.$", setting[2])
    assert "VIPD_NAME" in texts["vipd.yaml.5"]


@needs("groff")
def test_every_key_of_a_declaration_is_told(made: Path, texts: dict[str, str]) -> None:
    definitions = json.loads((made / "schemas/declaration.schema.json").read_text())["definitions"]
    keys = texts["vipd-services.5"].partition("\nKEYS\n")[2]
    told = set(re.findall(r"^ ([a-z0-9_]+): .+\n .+", keys, re.MULTILINE))
    wanted = {key for mapping in definitions.values() for key in mapping.get("properties", {})}
    assert len(wanted) > 60
    assert wanted - told - {"apiVersion", "kind"} == set()


ESCAPES = {r"\-": "-", r"\(aq": "'", r"\(dq": '"', r"\(ga": "`", r"\(ha": "^", r"\(ti": "~"}


def examples(page: Path) -> Iterator[str]:
    """What stands in a page between .nf and .fi, as it is shown."""
    for source in re.findall(r"^\.nf\n(.*?)^\.fi\n", page.read_text(), re.MULTILINE | re.DOTALL):
        text = re.sub(r"^\\&", "", source, flags=re.MULTILINE)
        for escape, character in ESCAPES.items():
            text = text.replace(escape, character)
        yield text.replace(r"\e", "\\")


@needs("groff")
def test_every_example_is_shown_and_taken_by_the_program(made: Path, tmp_path: Path, vipctl: Vipctl) -> None:
    kinds = set()
    for name in NAMES:
        lines = {line.strip() for line in shown(made / "man" / name).splitlines()}
        for text in examples(made / "man" / name):
            assert {line.strip() for line in text.splitlines()} <= lines | {""}, text
            joined = text.replace("\\\n", " ")
            if (
                text.startswith(("apiVersion:", "#", "{", "---"))
                and "services" in text + name
                and "yaml.5" not in name
            ):
                kinds.add("declaration")
                declared = declare(text)
                assert (declared.problems, bool(declared.services)) == ((), True), text
            elif name == "vipd.yaml.5" and not joined.lstrip().startswith(("vipctl", "vipd", "systemctl")):
                kinds.add("settings")
                (tmp_path / "vipd.yaml").write_text(text)
                (tmp_path / "none.yaml").write_text("")
                ended = vipctl(
                    "check", str(tmp_path / "none.yaml"), "--settings", str(tmp_path / "vipd.yaml")
                )
                assert ended.code == 0, ended.err
            else:
                kinds.add("commands")
                calls = list(calls_of_ours(Fence(ROOT, 1, "sh", joined)))
                assert calls, text
                assert [fault for call in calls if (fault := fault_of(call))] == []
    assert kinds == {"declaration", "settings", "commands"}


def test_what_is_made_twice_is_the_same_but_for_the_date_of_the_source(made: Path, tmp_path: Path) -> None:
    def files(directory: Path) -> dict[str, str]:
        paths = (path for path in directory.rglob("*") if path.is_file())
        return {str(path.relative_to(directory)): path.read_text() for path in paths}

    assert run("vipd.cli.manual", str(tmp_path / "undated")).code == 0
    assert f'8 "" "vipd {vipd.__version__}"' in (tmp_path / "undated/man/vipd.8").read_text()
    assert f'2026-01-01 "vipd {vipd.__version__}"' in (made / "man/vipd.8").read_text()
    undated = {name: text.replace(' 2026-01-01 "', ' "" "', 1) for name, text in files(made).items()}
    assert undated == files(tmp_path / "undated")
    (tmp_path / "taken").touch()
    refused = run("vipd.cli.manual", str(tmp_path / "taken"))
    assert (refused.code, refused.stderr[:17]) == (1, "vipd.cli.manual: ")


def test_the_documentation_has_the_schemas_of_the_program(made: Path) -> None:
    for path in (made / "schemas").iterdir():
        hint = "python -m vipd.cli.manual DIR && cp DIR/schemas/* docs/"
        assert (ROOT / "docs" / path.name).read_text(encoding="utf-8") == path.read_text(encoding="utf-8"), (
            hint
        )
