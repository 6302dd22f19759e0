"""Whatever text the API accepts, for whatever key, is the same after every way on which it is written and
read: the store, its copy, etcd, and what vipctl prints."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.faults.broken_declarations import SINGLE, checks, declaration
from tests.lab.examples import examples
from tests.lab.inside import Vipd, declare, running, written
from vipd.model.service import Origin, Service
from vipd.model.text import is_encodable, join_surrogate_pairs, json_text, lines, one_line, yaml_quoted

Path_ = tuple[str | int, ...]

WORDS = (
    *("", " ", "  a  ", "\t", "\n", "a\nb", "\r\n", "\x85", "\u2028", "\u2029", "\ufeff", "\ufffe", "\uffff"),
    *("\x00", "\x1b[2J", "\x7f", "\x80", "\x9b", "\u200d", "\u202e", "\u2066", "\ufdd0", "\ue000"),
    *("\U0010ffff"),
    *("\U0001f600", "\U0001f469\u200d\U0001f4bb", "e\u0301", "\u65e5\u672c", "\xa0", "\xad", "\U000e0001"),
    *("no", "yes", "on", "off", "y", "~", "null", "true", "1e3", "0x1f", "0o17", "017", "1_000", "12:30:45"),
    *(".inf", ".nan", "2026-01-01", "+1", "=", "<<", "-", "- a", "?", ": ", "a: b", "a #b", "#a", "&a", "*a"),
    *("!a", "|", ">", "%a", "@a", "`a", "'", '"', "'a'", '"a"', "\\", "\\u0041", "\\ud83d\\ude00"),
    *("{a}", "[a]"),
    *("{", "a,b", "---", "...", "--- a", "x" * 499, "ab " * 160, "\U0001f600" * 240),
)
ANY_CHARACTER = st.characters(exclude_categories=[])
TEXTS = (
    st.sampled_from(WORDS)
    | st.lists(st.sampled_from(WORDS[:60]), max_size=4).map("".join)
    | st.text(ANY_CHARACTER, max_size=20)
    | st.text(st.characters(categories=["Cc", "Cf", "Zl", "Zp", "Zs", "Co", "Cn", "Cs", "Mn"]), max_size=8)
)


def _strings(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Where text stands."""
    if isinstance(value, str):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _strings(item, (*path, key))


def _specs() -> list[tuple[dict[str, Any], Path_]]:
    """Every text of a declaration, with one that has it."""
    found = [({**declaration(0), "check": "tcp"}, path) for path in _strings({**declaration(0), "check": 0})]
    found += [(SINGLE, path) for path in _strings(SINGLE)]
    for check in checks(0):
        kind = {**declaration(0), "check": check}
        found += [(kind, ("check", *path)) for path in _strings(check)]
    return found


SPECS = _specs()
FREE = [each for each in SPECS if each[1][-2:-1] != ("command",) and each[1][-1] in ("body", "ca", "answer")]
FREE += [each for each in SPECS if each[1][-1] in ("send", "expect") or "command" in each[1]]
"""Those of any text; the others are words, names and numbers."""


def changed(spec: dict[str, Any], path: Path_, text: str) -> Any:
    made: Any = copy.deepcopy(spec)
    holder = made
    for key in path[:-1]:
        holder = holder[key]
    # What has to begin in a certain way does so.
    holder[path[-1]] = f"/{text}" if path[-1] == "ca" or path[-2:] == ("command", 0) else text
    return made


def file_of(*specs: object) -> str:
    return json.dumps({"apiVersion": "vipd/v1", "services": specs})


@settings(max_examples=examples(300))
@given(st.sampled_from(FREE) | st.sampled_from(SPECS), TEXTS)
@example((SINGLE, ("name",)), "web")
def test_what_is_accepted_for_any_key_is_written_and_read_as_the_same(
    where: tuple[dict[str, Any], Path_], text: str
) -> None:
    if not is_encodable(text):
        return
    declared = declare(file_of(changed(*where, text)))
    if not declared.problems:
        yaml_text = written(declared.services)
        assert lines(yaml_text) == yaml_text, "it can be printed"
        assert declare(yaml_text).services == declared.services, yaml_text


@given(st.sampled_from(SPECS), st.text(ANY_CHARACTER, max_size=5), st.characters(categories=["Cs"]))
def test_half_of_a_surrogate_pair_is_refused_for_every_key(
    where: tuple[dict[str, Any], Path_], text: str, half: str
) -> None:
    assert declare(file_of(changed(*where, text + half))).problems


@cache
def odd_services() -> list[dict[str, Any]]:
    """A service for each key that takes any text and names nothing of this host, and each odd text."""
    found: list[dict[str, Any]] = []
    for spec, path in {path: (spec, path) for spec, path in FREE}.values():
        if path[-1] == "ca" or "command" in path:
            continue
        for word in WORDS:
            made = changed(spec, path, word)
            number = len(found)
            place = {"name": f"s{number}", "address": f"10.250.{number >> 8}.{number & 255}", "ports": [80]}
            check = made["check"] if path[0] == "check" else made["backends"][path[1]]["check"]
            found.append({**place, "backends": ["10.244.0.5"], "check": check})
    return [spec for spec in found if not declare(file_of(spec)).problems]


def by_name(text: str) -> dict[str, Service]:
    """What a text declares, wherever it stands."""
    return {service.name: replace(service, origin=Origin("cli")) for service in declare(text).services}


async def exported(vipd: Vipd) -> dict[str, Service]:
    """What serves."""
    return by_name(file_of(*(await vipd.ask("GET", "/v1/export")).body["services"]))


def test_every_odd_text_is_the_same_after_every_way_on_which_it_is_written_and_read(tmp_path: Path) -> None:
    """The store, its copy, a file, its kept copy, and what vipctl prints."""
    specs = odd_services()
    assert len(specs) > 2 * len(WORDS)
    expected = by_name(file_of(*specs))

    async def add(vipd: Vipd) -> dict[str, Service]:
        assert (await vipd.ask("POST", "/v1/apply", {"services": specs})).status == 200
        for form in ("yaml", "json"):
            printed = (await vipd.vipctl("export", "-o", form)).stdout
            assert lines(printed) == printed
            assert by_name(printed) == expected
        return await exported(vipd)

    def file(vipd: Vipd, text: str = file_of(*specs)) -> None:
        (vipd.services_dir / "a.json").write_text(text)

    first, second = tmp_path / "first", tmp_path / "second"
    for root in (first, second):
        root.mkdir()
    assert running(add, root=first) == expected
    assert running(exported, root=first) == expected
    (first / "state" / "state.db").write_text("broken")  # then its copy counts
    assert running(exported, root=first) == expected
    assert running(exported, file, second) == expected
    assert running(exported, lambda vipd: file(vipd, "broken"), second) == expected


def test_every_odd_text_of_a_key_of_etcd_is_read_as_it_is_written() -> None:
    specs = odd_services()
    expected = by_name(file_of(*specs))

    def keys(vipd: Vipd) -> None:
        for spec in specs:
            value = json.dumps({key: part for key, part in spec.items() if key != "name"})
            vipd.etcd.put(f"/vipd/v1/services/{spec['name']}", value)

    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(10)
        found = await exported(vipd)
        assert found == expected

    running(story, keys, simulated=True, etcd={"endpoints": ["http://etcd:2379"]})


@given(st.text(ANY_CHARACTER))
def test_text_as_json_and_yaml(text: str) -> None:
    for indent in (None, 2):
        as_json = json_text({text: [text]}, indent)
        assert json.loads(as_json) == {text: [text]}
        assert lines(as_json) == as_json
    assert one_line(text).isprintable()
    assert one_line(one_line(text)) == one_line(text)
    if is_encodable(text):
        assert yaml.safe_load(yaml_quoted(text)) == text
        assert join_surrogate_pairs(json.dumps(text)).count('"') == json.dumps(text).count('"')
        assert yaml.safe_load(join_surrogate_pairs(json.dumps(text))) == text


SHOWN = {"\x1b": r"\x1b", "\u202e": r"\u202e", "\U000e0001": r"\U000e0001", "\n": r"\n", "\ud800": r"\ud800"}
SHOWN |= {word: word for word in ("日本", "e\u0301", "\U0001f600", "ü", "\\x1b")}


def test_how_a_character_is_shown() -> None:
    assert {text: one_line(text) for text in SHOWN} == SHOWN
