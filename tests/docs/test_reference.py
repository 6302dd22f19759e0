"""What the documentation lists is what the code has: settings, keys, requests, pages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.markdown import ROOT, all_pages, anchors, name_of, prose, rows
from tests.lab.inside import declare
from vipd.model.service import BackendState

DOCS = ROOT / "docs"
LANGUAGE = DOCS / "declaration.md"

_CODE = re.compile(r"`([^`]+)`")
_MENTION = re.compile(r"\bdocs/([a-z]+\.md)\b")


def coded(cell: str) -> list[str]:
    return _CODE.findall(cell)


def test_every_key_of_etcd_is_described_in_the_words_of_the_schema() -> None:
    described = {coded(name)[0]: rest for name, *rest in rows(DOCS / "settings.md", "etcd")}
    settings = json.loads((DOCS / "settings.schema.json").read_text(encoding="utf-8"))
    text = json.dumps(settings["properties"]["etcd"]) + json.dumps(settings["definitions"])
    known = next(part for part in parts(settings) if "max_removal" in part.get("properties", {}))[
        "properties"
    ]
    assert described.keys() == known.keys()
    assert [key for key, (_, _, meaning) in described.items() if json.dumps(meaning)[1:-2] not in text] == []


def parts(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts(part)


KEYS = {
    "A document": "{}",
    "A service": "services: [{}]",
    "A port": "services: [{ports: [{}]}]",
    "A backend": "services: [{backends: [{}]}]",
    "An external address": "services: [{external_addresses: [{}]}]",
    "Affinity": "services: [{affinity: {}}]",
    "Fallback": "services: [{fallback: {}}]",
    "Flow limits": "services: [{limits: {}}]",
    "Traffic policies": "services: [{traffic_policy: {}}]",
}


@pytest.mark.parametrize("heading", KEYS)
def test_the_keys_that_are_read_are_described_and_no_others(heading: str) -> None:
    mapping = KEYS[heading].replace("{}", "{no_such_key: 1}", 1).removeprefix("{no_such_key: 1}")
    text = f"apiVersion: vipd/v1\n{mapping or 'no_such_key: 1'}\n"
    (hint,) = (each.hint for each in declare(text).problems if "no_such_key" in each.what)
    described = {key for first, *_ in rows(LANGUAGE, heading) for key in coded(first)}
    assert described == set(hint.removeprefix("known: ").split(", "))


def test_words_that_no_table_holds_are_described() -> None:
    text = LANGUAGE.read_text(encoding="utf-8")
    defaults = declare("apiVersion: vipd/v1\ndefaults: {no_such_key: 1}\n").problems[0].hint
    words = [*BackendState, *defaults.removeprefix("known: ").split(", ")]
    assert [word for word in words if f"`{word}`" not in text] == []


def broken_links() -> list[str]:
    """Links between pages that lead nowhere."""
    broken = []
    for page in all_pages():
        for line in prose(page):
            for target in line.links():
                path, _, anchor = target.partition("#")
                aim = (page.parent / path).resolve() if path else page
                if "://" in target:
                    continue
                if not aim.exists() or (anchor and anchor not in anchors(aim)):
                    broken.append(f"{line}: {target}")
    return broken


def test_modules_that_the_architecture_names_exist() -> None:
    """By their path in the project or in vipd/, or by a file name that some module has."""
    files = [path.relative_to(ROOT) for top in ("vipd", "tests") for path in (ROOT / top).rglob("*.py")]
    known = {str(path) for path in files} | {str(path).partition("/")[2] for path in files}
    known |= {path.name for path in files} | {str(Path(*path.parts[-2:])) for path in files}
    text = (ROOT / "docs/architecture.md").read_text()
    pattern = r"(?:^|`)([a-z_/]+\.py)[` ]"
    named = set(re.findall(pattern, text, re.MULTILINE))
    assert len(named) > 60
    assert sorted(named - known) == []


def test_registries_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    named = re.findall(r"`(\w+)(?:\(\))?` in `([a-z_/]+\.py)`", text)
    assert len(named) >= 4
    assert [
        name for name, path in named if not re.search(rf"\b{name}\b", (ROOT / "vipd" / path).read_text())
    ] == []


def test_links_between_pages_lead_somewhere() -> None:
    assert broken_links() == []


def test_pages_that_are_mentioned_exist() -> None:
    files = [*all_pages(), *sorted((ROOT / "vipd").rglob("*.py"))]
    missing = [
        f"{name_of(file)}: docs/{name}"
        for file in files
        for name in _MENTION.findall(file.read_text(encoding="utf-8"))
        if not (DOCS / name).exists()
    ]
    assert missing == []


def test_every_page_is_reached_from_the_readme() -> None:
    linked = {target.partition("#")[0] for line in prose(ROOT / "README.md") for target in line.links()}
    assert {name_of(page) for page in DOCS.glob("*.md")} <= linked


def rooms() -> list[Path]:
    return sorted((ROOT / "vipd" / "dataplane").glob("*/README.md"))


@pytest.mark.parametrize("page", rooms(), ids=lambda page: page.parent.name)
def test_a_room_lists_its_modules(page: Path) -> None:
    inside = {f"{path.name}/" if path.is_dir() else path.name for path in page.parent.iterdir()}
    modules = {name for name in inside if name.endswith((".py", "/")) and not name.startswith("__")}
    listed = {word for first, *_ in rows(page) for word in coded(first) if word.endswith((".py", "/"))}
    assert listed == modules
