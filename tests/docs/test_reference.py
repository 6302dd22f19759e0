"""What the documentation lists is what the code has: settings, keys, requests, pages."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.docs.markdown import ROOT, all_pages, anchors, name_of, prose, rows
from vipd.api.context import ApiContext
from vipd.api.peers import Permission
from vipd.api.server import HTTP_STATUS, application
from vipd.cli.manual.settings_reference import etcd_settings
from vipd.declaration.backend_reader import BACKEND_KEYS, STATES
from vipd.declaration.external_reader import EXTERNAL_KEYS, TRAFFIC_KEYS
from vipd.declaration.native import DOCUMENT_KEYS
from vipd.declaration.policy_reader import AFFINITY_KEYS, DEFAULTS_KEYS, FALLBACK_KEYS
from vipd.declaration.port_reader import PORT_KEYS
from vipd.declaration.service_reader import SERVICE_KEYS
from vipd.model.service import Masquerade

DOCS = ROOT / "docs"
LANGUAGE = DOCS / "declaration.md"

_CODE = re.compile(r"`([^`]+)`")
_REQUEST = re.compile(r"`(GET|POST|PATCH|DELETE) ([^`?]+)[^`]*`")
_MENTION = re.compile(r"\bdocs/([a-z]+\.md)\b")


def coded(cell: str) -> list[str]:
    return _CODE.findall(cell)


def test_every_key_of_etcd_is_described_as_the_manual_does() -> None:
    described = {coded(name)[0]: rest for name, *rest in rows(DOCS / "settings.md", "etcd")}
    assert described == {each.name: [each.values, each.default, each.meaning] for each in etcd_settings()}


def keys_under(heading: str) -> set[str]:
    return {key for first, *_ in rows(LANGUAGE, heading) for key in coded(first)}


@pytest.mark.parametrize(
    ("heading", "keys"),
    [
        ("A document", DOCUMENT_KEYS),
        ("A service", SERVICE_KEYS),
        ("A port", PORT_KEYS),
        ("A backend", BACKEND_KEYS),
        ("An external address", EXTERNAL_KEYS),
        ("Affinity", AFFINITY_KEYS),
        ("Fallback", FALLBACK_KEYS),
        ("Masquerade", [*Masquerade, "auto"]),
        ("Traffic policies", TRAFFIC_KEYS),
    ],
)
def test_the_keys_of_the_language_are_described_and_no_others(heading: str, keys: Collection[str]) -> None:
    assert keys_under(heading) == set(keys)


def test_words_that_no_table_holds_are_described() -> None:
    text = LANGUAGE.read_text(encoding="utf-8")
    words: Iterable[str] = [*STATES, *DEFAULTS_KEYS]
    assert [word for word in words if f"`{word}`" not in text] == []


def served_requests() -> set[tuple[str, str]]:
    """Every request of the API's server, as docs/api.md spells them."""
    unused = (
        "overrides",
        "events",
        "flow_stats",
        "fleet",
        "sources",
        "wait_applied",
        "dataplane",
        "save_dataplane_choice",
    )
    parts = dict.fromkeys(unused) | {"reconciler": SimpleNamespace(containment=None)}
    parts |= {"maintenance": SimpleNamespace(), "announcer": SimpleNamespace()}
    served = cast("ApiContext", SimpleNamespace(**parts))
    router = application(served, Permission("vipd-admin")).router
    return {
        (route.method, re.sub(r"\{(\w+)\}", lambda found: found[1].upper(), route.resource.canonical))
        for route in router.routes()
        if route.method != "HEAD" and route.resource
    }


def described_requests() -> set[tuple[str, str]]:
    cells = (row[0] for row in rows(DOCS / "api.md"))
    return {(method, path.strip()) for cell in cells for method, path in _REQUEST.findall(cell)}


def test_every_request_of_the_api_is_described_and_no_other() -> None:
    assert described_requests() == served_requests()


def test_every_kind_of_error_is_described_with_its_status() -> None:
    described: Mapping[str, int] = {
        kind: int(status) for status, kinds, *_ in rows(DOCS / "api.md", "Errors") for kind in coded(kinds)
    }
    assert described == HTTP_STATUS


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
