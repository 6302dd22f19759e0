"""Each setting and key is described once: schemas, pages and documentation have the same words."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from tests.docs.markdown import ROOT, rows
from tests.docs.programs import settings_problems
from tests.lab.inside import Vipd, running
from vipd.model.service import Masquerade

DOCS = ROOT / "docs"
LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
SEE = re.compile(r" ?See \[[^\]]*\]\([^)]*\)\.")


def plain(cell: str) -> str:
    """A cell of a table without its links, and without sentences that are only links."""
    return LINK.sub(r"\1", SEE.sub("", cell))


def schema(name: str) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads((DOCS / f"{name}.schema.json").read_text(encoding="utf-8"))
    return whole


def headings() -> list[str]:
    text = (DOCS / "declaration.md").read_text(encoding="utf-8")
    return re.findall(r"^#+ (.*)$", text, re.MULTILINE)


def test_the_documentation_of_keys_has_the_words_of_the_schema() -> None:
    """Each table of keys is that of one mapping; what its cells say is what an editor shows."""
    mappings = {
        name: part["properties"]
        for name, part in schema("declaration")["definitions"].items()
        if "properties" in part
    }
    described = set()
    nothing: dict[str, Any] = {}
    for heading in headings():
        table = {first.strip("`"): rest for first, *rest in rows(DOCS / "declaration.md", heading)}
        (name, keys) = next(
            ((n, keys) for n, keys in mappings.items() if set(table) == set(keys)), ("", nothing)
        )
        for key, cells in table.items() if name else ():
            meaning = plain(cells[-1])
            assert keys[key]["description"].startswith(meaning), f"docs/declaration.md, {heading}: {key}"
            default = plain(cells[1]) if len(cells) == 3 else ""
            assert not default or f"Default: {default}" in keys[key]["description"], (heading, key)
        described.add(name)
    assert len(described - {""}) >= 8
    assert all(key.get("description") for keys in mappings.values() for key in keys.values())


def test_masquerade_modes_are_told_in_the_words_of_the_page(made_page: str) -> None:
    modes = {mode.strip("`"): rest for mode, *rest in rows(DOCS / "declaration.md", "Masquerade")}
    assert modes.keys() == {*map(str, Masquerade), "auto"}
    for mode, cells in modes.items():
        for cell in cells:
            assert plain(cell).replace("`", "").rstrip(".").lower() in made_page.lower(), mode


@pytest.fixture
def made_page(made: Any) -> str:
    from tests.cli.manual.test_pages import shown

    return re.sub(r"\s+", " ", shown(made / "man/vipd-services.5", 5000))


def test_the_documentation_of_settings_has_the_words_of_the_schema() -> None:
    told = {first.strip("`"): rest for first, *rest in rows(DOCS / "settings.md") if len(rest) == 4}
    settings = schema("settings")["properties"]
    assert told.keys() == settings.keys()
    for name, (environment, _, default, meaning) in told.items():
        description = settings[name]["description"]
        assert plain(environment) in (f"`VIPD_{name.upper()}`", "", "-"), name
        assert description.startswith(plain(meaning)), f"docs/settings.md: {name}"
        assert f"Default: {plain(default)}" in description, name


PACKAGED = (ROOT / "debian" / "vipd.yaml").read_text(encoding="utf-8")
PACKAGED_DEFAULTS = re.findall(r"(?m)^#([a-z_]+: .*)$", PACKAGED)
PACKAGED_EXAMPLES = re.findall(r"(?m)^# Example: (.*)\n#([a-z_]+):", PACKAGED)


def test_what_the_packaged_file_shows_is_the_default() -> None:
    async def settings(vipd: Vipd) -> dict[str, object]:
        known: dict[str, object] = (await vipd.status())["settings"]
        return {name: value for name, value in known.items() if not name.endswith(("_dir", "socket"))}

    shown = yaml.safe_load("\n".join(PACKAGED_DEFAULTS))
    own = ("services_dir", "state_dir", "socket", "socket_group", "host_addresses", "node_name")
    assert running(settings, **{key: shown[key] for key in shown if key not in own}) == running(settings)
    assert [line for line in PACKAGED_DEFAULTS if settings_problems(line)] == []


def test_the_packaged_file_shows_examples_and_what_an_operator_looks_for() -> None:
    for line, name in PACKAGED_EXAMPLES:
        assert line.startswith(name)
        assert (line, settings_problems(line)) == (line, [])
    shown = [line.partition(":")[0] for line in PACKAGED_DEFAULTS]
    assert len(set(shown)) == len(shown)
    assert {"dataplane", "status_page", "metrics_address", "health_address", "etcd", "store"} <= set(shown)
    others = [line for line in PACKAGED.splitlines() if line and not line.startswith(("# ", "#"))]
    assert others == []
    assert PACKAGED.count("# Example: ") == len(PACKAGED_EXAMPLES)
