"""Whatever text the API accepts, for whatever key, is the same after every way on which it is written and
read: the store, its copy, etcd, and what vipctl prints."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.declaration.strategies import PATIENT
from tests.faults.broken_declarations import SINGLE, checks, declaration
from tests.lab.examples import examples, some
from tests.model.samples import service
from vipd.cli.main import cli
from vipd.cli.output import document
from vipd.declaration.native import format_declaration, parse_declaration, parse_service
from vipd.declaration.operations import spec_of
from vipd.declaration.yaml_text import dump_yaml
from vipd.model.check import Check, HttpProbe
from vipd.model.service import Origin, Service
from vipd.model.text import is_encodable, join_surrogate_pairs, json_text, lines, one_line, yaml_quoted
from vipd.sources.etcd.fleet_keys import UnwritableError, service_key, service_value
from vipd.sources.etcd.values import Layout, read_service_value
from vipd.sources.files import FileSource
from vipd.sources.store import COPY_SUFFIX, StoreError, StoreSource

LAYOUT = Layout("/vipd/v1/")
Path_ = tuple[str | int, ...]

WORDS = (
    *("", " ", "  a  ", "\t", "\n", "a\nb", "\r\n", "\x85", "\u2028", "\u2029", "\ufeff", "\ufffe", "\uffff"),
    *(
        "\x00",
        "\x1b[2J",
        "\x7f",
        "\x80",
        "\x9b",
        "\u200d",
        "\u202e",
        "\u2066",
        "\ufdd0",
        "\ue000",
        "\U0010ffff",
    ),
    *("\U0001f600", "\U0001f469\u200d\U0001f4bb", "e\u0301", "\u65e5\u672c", "\xa0", "\xad", "\U000e0001"),
    *("no", "yes", "on", "off", "y", "~", "null", "true", "1e3", "0x1f", "0o17", "017", "1_000", "12:30:45"),
    *(".inf", ".nan", "2026-01-01", "+1", "=", "<<", "-", "- a", "?", ": ", "a: b", "a #b", "#a", "&a", "*a"),
    *(
        "!a",
        "|",
        ">",
        "%a",
        "@a",
        "`a",
        "'",
        '"',
        "'a'",
        '"a"',
        "\\",
        "\\u0041",
        "\\ud83d\\ude00",
        "{a}",
        "[a]",
    ),
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


def accepted(spec: object) -> Service | None:
    found, problems = parse_service(spec, Origin("cli"))
    return None if problems else found


def survives(wanted: Service, root: Path) -> None:
    """Every way."""
    stored(wanted, root / "services.yaml")
    texts = [format_declaration([wanted])]
    texts += [document({"services": [spec_of(wanted)]}, form) for form in ("json", "yaml")]
    for text in texts:
        assert lines(text) == text, "it can be printed"
        assert parse_declaration(text, "f").services == (wanted,), text
    assert json.loads(texts[1])["services"] == json.loads(json.dumps([spec_of(wanted)]))
    value = service_value(LAYOUT, wanted)
    assert lines(value) == value
    assert read_service_value(service_key(LAYOUT, wanted.name), wanted.name, value).services == (wanted,)


def stored(wanted: Service, path: Path) -> None:
    """In the store after a restart, and in its copy alone."""
    for each in (path, copied := path.with_name(path.name + COPY_SUFFIX)):
        each.unlink(missing_ok=True)
    with patch("os.fsync"):  # thousands of examples
        StoreSource(path).save({wanted.name: wanted})
    assert path.read_bytes() == copied.read_bytes()
    again = StoreSource(path)
    again.load()
    assert again.faults() == ()
    assert dict(again.services) == {wanted.name: wanted}


@settings(PATIENT, max_examples=examples(300))
@given(st.sampled_from(FREE) | st.sampled_from(SPECS), TEXTS)
@example((SINGLE, ("name",)), "web")
def test_what_is_accepted_for_any_key_survives(
    tmp_path_factory: pytest.TempPathFactory, where: tuple[dict[str, Any], Path_], text: str
) -> None:
    found = accepted(changed(*where, text))
    if found is not None:
        assert is_encodable(text)
        survives(found, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("path", [path for _, path in FREE], ids=lambda path: ".".join(map(str, path)))
def test_every_odd_text_survives_where_any_text_is_taken(tmp_path: Path, path: Path_) -> None:
    spec = next(spec for spec, each in FREE if each == path)
    words = some(WORDS, path, fewer=3)
    found = [accepted(changed(spec, path, text)) for text in words]
    assert sum(each is not None for each in found) > len(words) / 2
    for each in filter(None, found):
        survives(each, tmp_path)


def test_an_empty_datagram_is_stored_as_one(tmp_path: Path) -> None:
    check = {"type": "udp", "port": 53, "send": ""}
    found = accepted({"name": "dns", "address": "10.96.0.1", "ports": "53/udp", "check": check})
    assert found is not None
    survives(found, tmp_path)


@given(st.sampled_from(SPECS), st.text(ANY_CHARACTER, max_size=5), st.characters(categories=["Cs"]))
def test_half_of_a_surrogate_pair_is_refused_for_every_key(
    where: tuple[dict[str, Any], Path_], text: str, half: str
) -> None:
    assert accepted(changed(*where, text + half)) is None


def test_what_does_not_read_back_is_never_written(tmp_path: Path) -> None:
    path = tmp_path / "services.yaml"
    store = StoreSource(path)
    good, other = service("good", "10.96.0.10"), service("other", "10.96.0.11")
    store.save({"good": good})
    before = {each: each.read_bytes() for each in tmp_path.iterdir()}
    for bad in (
        "    fallback: keep\n",
        "  - address: 10.96.0.99\n    ports: 1/tcp\n",
        "    x: \ud83d\n",
        "}",
    ):
        with (
            patch("vipd.sources.store.format_service", lambda s, bad=bad: _formatted(s) + bad),
            pytest.raises(StoreError, match=r"for other reads back.*please report it"),
        ):
            store.save({"good": good, "other": other})
    assert {each: each.read_bytes() for each in tmp_path.iterdir()} == before
    assert dict(store.services) == {"good": good}
    store.save({"good": good, "other": other})


def _formatted(wanted: Service) -> str:
    return format_declaration([wanted]).partition("services:\n")[2]


def test_a_value_that_reads_back_otherwise_is_not_written_to_etcd() -> None:
    probe = HttpProbe(8080, body="a")
    wanted = replace(service("web", "10.96.0.10"), check=Check(probe))
    with (
        patch(
            "vipd.sources.etcd.fleet_keys.spec_of",
            lambda s: spec_of(replace(s, check=Check(replace(probe, body="b")))),
        ),
        pytest.raises(UnwritableError, match="reads back as something else"),
    ):
        service_value(LAYOUT, wanted)


def test_a_store_that_an_earlier_version_wrote_with_pairs_is_read(tmp_path: Path) -> None:
    path = tmp_path / "services.yaml"
    check = Check(HttpProbe(80, body='a\\\U0001f600"\u20ac\\ud83d\\ude00'))
    wanted = replace(service("web", "10.96.0.10"), check=check)
    text = _formatted(wanted).rstrip()
    quoted = yaml_quoted(check.probe.body) if isinstance(check.probe, HttpProbe) else ""
    assert quoted in text
    earlier = text.replace(quoted, json.dumps(check.probe.body) if isinstance(check.probe, HttpProbe) else "")
    path.write_text(f"apiVersion: vipd/v1\nservices:\n{earlier}\n")
    store = StoreSource(path)
    store.load()
    assert store.faults() == ()
    assert dict(store.services) == {"web": wanted}


@pytest.mark.parametrize("edited", [False, True])
def test_what_was_read_is_written_as_it_stands_but_after_an_edit(tmp_path: Path, edited: bool) -> None:
    path = tmp_path / "services.yaml"
    services = {f"s{n}": service(f"s{n}", f"10.96.0.{n}") for n in range(1, 6)}
    StoreSource(path).save(services)
    if edited:
        path.write_text(path.read_text().replace("  - name: s2", "  # two\n  - &b\n    name: s2"))
    store = StoreSource(path)
    store.load()
    with patch("vipd.sources.store.format_service", side_effect=_formatted) as formatting:
        store.save({name: store.services[name] for name in ("s5", "s1", "s2")})
    # The history has the text before, too, of the two that go.
    assert formatting.call_count == (3 + 2 if edited else 0)
    again = StoreSource(path)
    again.load()
    assert list(again.services.values()) == [services[name] for name in ("s5", "s1", "s2")]


def test_a_file_and_its_kept_copy_say_the_same(tmp_path: Path) -> None:
    directory, kept = tmp_path / "services.d", tmp_path / "accepted"
    directory.mkdir()
    spec = {"address": "10.96.0.1", "ports": ["80/tcp"]}
    services = [
        {**spec, "name": f"s{n}", "ports": [f"{n}/tcp"], "check": {"type": "dns", "port": 53, "answer": word}}
        for n, word in enumerate(WORDS, 1)
    ]
    text = json.dumps({"apiVersion": "vipd/v1", "services": services})
    path = directory / "a.json"
    path.write_text(text)
    source = FileSource(directory, kept)
    source.scan()
    (unit,) = source.units().values()
    assert unit.candidate.ok, unit.candidate.problems
    assert [s.check.probe.answer for s in unit.candidate.services] == list(WORDS)  # type: ignore[union-attr]
    source.save_accepted(dict.fromkeys(source.units(), unit.candidate))
    path.write_text("broken")
    again = FileSource(directory, kept)
    again.scan()
    (after,) = again.units().values()
    assert after.accepted == unit.candidate


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_convert_prints_what_reads_back(tmp_path: Path, form: str) -> None:
    check = {"type": "http", "port": 80, "body": "\x1b\U0001f600\u202e\U000e0001 no"}
    wanted = accepted({"name": "web", "address": "10.96.0.1", "ports": "80/tcp", "check": check})
    assert wanted is not None
    file, printed = tmp_path / "a.yaml", tmp_path / "b.yaml"
    file.write_text(format_declaration([wanted]))
    ended = CliRunner().invoke(cli, ["convert", str(file), "-o", form])
    assert ended.exit_code == 0, ended.output
    assert lines(ended.output) == ended.output
    printed.write_text(ended.output)
    assert parse_declaration(printed.read_text(), "b").services == (wanted,)


@given(st.text(ANY_CHARACTER))
def test_text_as_json_and_yaml(text: str) -> None:
    for indent in (None, 2):
        written = json_text({text: [text]}, indent)
        assert json.loads(written) == {text: [text]}
        assert lines(written) == written
    assert one_line(text).isprintable()
    assert one_line(one_line(text)) == one_line(text)
    if is_encodable(text):
        assert yaml.safe_load(yaml_quoted(text)) == text
        written = dump_yaml({"a": [text], text: {text: text}})
        assert yaml.safe_load(written) in ({"a": [text], text: {text: text}}, {"a": {"a": "a"}})
        assert lines(written) == written
        assert join_surrogate_pairs(json.dumps(text)).count('"') == json.dumps(text).count('"')
        assert yaml.safe_load(join_surrogate_pairs(json.dumps(text))) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b", r"\x1b"),
        ("\u202e", r"\u202e"),
        ("\U000e0001", r"\U000e0001"),
        ("\n", r"\n"),
        ("\ud800", r"\ud800"),
    ]
    + [(word, word) for word in ("日本", "e\u0301", "\U0001f600", "ü", "\\x1b")],
)
def test_how_a_character_is_shown(text: str, shown: str) -> None:
    assert one_line(text) == shown
