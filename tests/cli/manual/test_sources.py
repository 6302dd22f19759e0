"""What pages and documentation are made of: each setting and key is described once, in the same words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from tests.docs.markdown import ROOT, rows
from vipd.cli.manual import settings_reference
from vipd.cli.manual.settings_reference import docstrings, settings
from vipd.declaration.key_docs import GROUPS, MASQUERADE_MODES, KeyDoc, KeyGroup
from vipd.declaration.value_forms import TEXT
from vipd.host.settings.settings import Settings
from vipd.host.settings.settings_file import read_settings_text
from vipd.model.service import Masquerade

DOCS = ROOT / "docs"
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_SEE = re.compile(r" ?See \[[^\]]*\]\([^)]*\)\.")


def plain(cell: str) -> str:
    """A cell of a table without its links, and without sentences that are only links."""
    return _LINK.sub(r"\1", _SEE.sub("", cell))


def named(cell: str) -> str:
    return cell.strip("`")


@pytest.mark.parametrize("title", GROUPS)
def test_every_key_has_a_meaning_and_every_meaning_a_key(title: str) -> None:
    group = GROUPS[title]
    assert set(group.docs) == set(group.keys), "hint: vipd/declaration/key_docs.py"
    assert all(key.form and key.meaning for key in group.docs.values())


def documented_groups() -> list[str]:
    return [title for title in GROUPS if list(rows(DOCS / "declaration.md", title))]


def test_the_groups_have_the_headings_of_the_documentation() -> None:
    assert len(documented_groups()) >= 8


@pytest.mark.parametrize("title", documented_groups())
def test_the_documentation_of_keys_has_the_same_words(title: str) -> None:
    told = {
        named(first): [plain(cell) for cell in rest] for first, *rest in rows(DOCS / "declaration.md", title)
    }
    meant = {name: [key.form, key.default, key.meaning] for name, key in GROUPS[title].docs.items()}
    if all(len(rest) == 2 for rest in told.values()):  # a table without a column for defaults
        meant = {name: [key.form, key.meaning] for name, key in GROUPS[title].docs.items()}
    wrong = [
        f"docs/declaration.md should say: | `{name}` | {' | '.join(meant[name])} |"
        for name in meant
        if told.get(name) != meant[name]
    ]
    assert wrong == []


def test_masquerade_modes_are_told_in_the_same_words() -> None:
    assert set(MASQUERADE_MODES) == {*Masquerade, "auto"}
    told = {named(mode): tuple(rest) for mode, *rest in rows(DOCS / "declaration.md", "Masquerade")}
    assert told == MASQUERADE_MODES


@pytest.mark.parametrize("setting", settings(), ids=lambda setting: setting.name)
def test_the_documentation_of_settings_has_the_same_words(setting: settings_reference.Setting) -> None:
    told = {named(first): rest for first, *rest in rows(DOCS / "settings.md") if len(rest) == 4}
    meant = [f"`{setting.environment}`", setting.values, setting.default, setting.meaning]
    assert [plain(cell) for cell in told[setting.name]] == meant, (
        "docs/settings.md and vipd/host/settings/settings.py differ"
    )


def test_every_setting_is_documented_and_no_other() -> None:
    told = [named(first) for first, *rest in rows(DOCS / "settings.md") if len(rest) == 4]
    assert sorted(told) == sorted(setting.name for setting in settings())


PACKAGED = (ROOT / "debian" / "vipd.yaml").read_text(encoding="utf-8")
PACKAGED_DEFAULTS = re.findall(r"(?m)^#([a-z_]+: .*)$", PACKAGED)
PACKAGED_EXAMPLES = re.findall(r"(?m)^# Example: (.*)\n#([a-z_]+):", PACKAGED)


@pytest.mark.parametrize("line", PACKAGED_DEFAULTS)
def test_each_line_of_the_packaged_file_shows_a_default(line: str) -> None:
    given = read_settings_text(line, "vipd.yaml")
    assert len(given) == 1
    assert Settings(**given) == Settings()  # type: ignore[arg-type]


@pytest.mark.parametrize(("line", "name"), PACKAGED_EXAMPLES)
def test_each_example_of_the_packaged_file_is_accepted(line: str, name: str) -> None:
    given = read_settings_text(line, "vipd.yaml")
    assert list(given) == [name]
    assert Settings(**given) != Settings()  # type: ignore[arg-type]


def test_the_packaged_file_shows_what_an_operator_looks_for() -> None:
    shown = [line.partition(":")[0] for line in PACKAGED_DEFAULTS]
    assert len(set(shown)) == len(shown)
    assert {"dataplane", "status_page", "metrics_address", "health_address", "etcd", "store"} <= set(shown)
    others = [line for line in PACKAGED.splitlines() if line and not line.startswith(("# ", "#"))]
    assert others == []
    assert PACKAGED.count("# Example: ") == len(PACKAGED_EXAMPLES)


def test_a_key_without_a_meaning_is_told() -> None:
    with pytest.raises(LookupError, match=r"A test: no meaning of b; hint: .*key_docs\.py"):
        list(KeyGroup("A test", ("a", "b"), {"a": KeyDoc(TEXT, "", "A.")}).described())


class _Sample(BaseModel):
    told: int = Field(1, ge=0, le=3)
    """Told in two
    lines."""
    described: Literal["a", "b"] = Field("a", description="Described.")
    listed: tuple[Path, ...] = ()
    """A type of which nothing is said."""


class _Untold(BaseModel):
    untold: bool = True
    other: Annotated[bool, "x"] | None = None
    """Told."""


def test_what_a_setting_is_comes_from_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert docstrings(_Sample) == {"told": "Told in two lines.", "listed": "A type of which nothing is said."}
    monkeypatch.setattr(settings_reference, "Settings", _Sample)
    with pytest.raises(LookupError, match=r"listed has a type .*TYPES"):
        settings()
    monkeypatch.setitem(_Sample.model_fields, "listed", _Sample.model_fields["told"])
    told, described, _ = settings()
    assert (told.values, told.default, told.meaning) == ("0 to 3", "`1`", "Told in two lines.")
    assert (described.values, described.meaning) == ("`a` or `b`", "Described.")


def test_a_setting_without_a_word_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_reference, "Settings", _Untold)
    with pytest.raises(LookupError, match="setting untold has no docstring"):
        settings()
