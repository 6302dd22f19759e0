"""What others write into names, reasons and causes writes to nobody's terminal, and forges no line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Spawn, Vipctl
from tests.cli.documents import DNS, STATUS, changed, one
from tests.cli.fake_daemon import FakeDaemon
from tests.cli.test_answers import event, order
from tests.cli.test_main import on_terminal
from vipd.model.text import display_width, lines

EVIL = "\x1b[2J\x1b]0;x\x07\x9b31m\u202e\x7f\r\nFORGED\x0b\u2028FORGED\U0001f600日本"
OWN_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
VALUES = set(
    """owner path message reason by cause location what why hint fault ipv4 unit stored chain refusal version
    endpoint summary prefix serves diff at""".split()  # noqa: SIM905 - a list is no clearer
)
"""Keys of the API's answers whose text somebody else may have written, and some more."""
LISTS = {"problems", "warnings", "rejected", "held", "keys", "services", "notes"}


def evil(value: Any, key: str = "") -> Any:
    """An answer with such text wherever there is any."""
    if isinstance(value, dict):
        return {k: evil(item, k) for k, item in value.items()}
    if isinstance(value, list):
        return [evil(item, key) for item in value]
    return f"{value}{EVIL}" if isinstance(value, str) and key in VALUES | LISTS else value


ETCD = {"endpoint": "http://10.0.0.1:2379", "connected": True, "applied_revision": 7, "lag": 1.0, "keys": 1}
ETCD |= {"last_change": 7, "prefix": "/vipd/v1/"}
ETCD |= {"rejected": ["/vipd/v1/services/a"], "held": ["/vipd/v1/services/b"]}
EVENT = event(cause="file /etc/x.yaml:3")
ORDER = order()["override"] | {"reason": "why"}
HOST = {"name": "h1" + EVIL, "version": "1", "revision": 7, "services": 1, "problems": 1, "behind": 0}
HOST |= {"seen_seconds": 3, "fault": ""}


@pytest.fixture
def answers(daemon: FakeDaemon) -> FakeDaemon:
    daemon.answer("GET /v1/services", evil({"services": [DNS]}))
    daemon.answer("GET /v1/services/dns", evil(one(DNS)))
    daemon.answer("GET /v1/status", evil({**STATUS, "quarantined": {"dns" + EVIL: "reason"}, "etcd": ETCD}))
    daemon.answer("GET /v1/events", evil({"events": [EVENT]}))
    daemon.answer("GET /v1/overrides", {"overrides": [{**evil(ORDER), "at": "2026-01-01T12:00:05Z"}]})
    daemon.answer("GET /v1/fleet", {"hosts": [evil(HOST), evil(HOST) | {"fault": EVIL}], "newest": 7})
    daemon.answer("GET /v1/diff", {"in_sync": False, "diff": f"+a{EVIL.replace(chr(10), '')}\n-b\n"})
    daemon.answer("GET /v1/export", {"services": [DNS["spec"] | {"check": {"type": "http", "body": EVIL}}]})
    daemon.answer("POST /v1/services", evil(changed(("created", "dns"))) | {"warnings": [EVIL]})
    daemon.refuse("DELETE /v1/services/dns", 409, "owned", EVIL, why=EVIL, hint=EVIL, problems=[EVIL, "b"])
    daemon.answer("POST /v1/reload", evil(changed(("created", "dns")) | {"services": 2}))
    return daemon


VERBS = (
    *(("list",), ("list", "-o", "wide"), ("list", "-o", "name"), ("describe", "dns"), ("status",)),
    *(("events",), ("overrides",), ("fleet", "status"), ("fleet", "status", "-o", "wide"), ("diff",)),
    *(("add", "10.96.0.10:53/udp", "10.244.0.5", "--name", "dns"), ("remove", "dns"), ("reload",)),
    *(("describe", EVIL), (EVIL,), ("--socket", EVIL, "list"), ("list", "-o", EVIL), ("drain", EVIL)),
    *(("check", f"/nonexistent/{EVIL}.yaml"), ("apply", f"/nonexistent/{EVIL}.yaml")),
    *(("complete", "targets", ""), ("complete", "places", ""), ("export",)),
)
DOCUMENTS = (
    *(
        (*verb, "-o", form)
        for verb in VERBS[:1] + VERBS[3:9]
        for form in ("json", "yaml")
        if verb != ("events",)
    ),
    ("events", "-o", "json"),
    ("export", "-o", "json"),
    ("export", "-o", "yaml"),
)


@pytest.mark.usefixtures("answers")
def test_no_verb_prints_what_a_terminal_would_obey(vipctl: Vipctl) -> None:
    for verb in VERBS:
        ended = vipctl(*verb)
        assert ended.out + ended.err, verb
        for said in (ended.out, ended.err):
            assert all(character.isprintable() or character in "\n\t" for character in said), verb
            assert not re.search(r"^\s*FORGED", said, re.MULTILINE), verb


@pytest.mark.usefixtures("answers")
def test_documents_are_exact_and_hold_nothing_raw(vipctl: Vipctl) -> None:
    for verb in DOCUMENTS:
        ended = vipctl(*verb)
        assert lines(ended.out) == ended.out, verb
        document = json.loads(ended.out) if verb[-1] == "json" else yaml.safe_load(ended.out)
        wanted = EVIL.replace("\n", "") if verb[0] == "diff" else EVIL
        assert any(wanted in text for text in _texts(document)), verb


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


@pytest.mark.usefixtures("answers")
@pytest.mark.parametrize("verb", [*VERBS[:1], *VERBS[3:12]], ids=ascii)
def test_on_a_terminal_of_80_columns_colours_are_all_that_is_not_text(
    spawn: Spawn, verb: tuple[str, ...]
) -> None:
    shown = on_terminal(spawn, *verb) + on_terminal(spawn, *verb, errors=True)
    shown = OWN_COLOURS.sub("", shown)
    assert lines(shown) == shown
    assert not re.search(r"^\s*FORGED", shown, re.MULTILINE)


@pytest.mark.usefixtures("answers")
def test_the_list_fits_80_columns_with_wide_characters(daemon: FakeDaemon, spawn: Spawn) -> None:
    views = [DNS | {"owner": f"file:/etc/{'日本語' * n}.yaml"} for n in (1, 2, 30)]
    daemon.answer("GET /v1/services", {"services": views})
    shown = on_terminal(spawn, "list", NO_COLOR="").splitlines()
    assert max(map(display_width, shown)) <= 80
    places = [
        display_width(line[: line.index(" 2 unch") if " 2 unch" in line else line.index("STATUS")])
        for line in shown
    ]
    assert len({place - (1 if i == 0 else 0) for i, place in enumerate(places)}) == 1, shown


def test_an_argument_that_is_no_text_is_wrong_usage(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    for words in (("describe", os.fsdecode(b"\xff")), ("explain", "--from", "local", os.fsdecode(b"\xff"))):
        ended = vipctl(*words)
        assert (ended.code, ended.err) == (2, "vipctl: \\udcff is no text: write UTF-8\n")
    assert daemon.requests == []


def test_problems_of_files_quote_nothing_raw(vipctl: Vipctl, tmp_path: Path) -> None:
    evil = json.dumps(EVIL)
    file = tmp_path / "a.yaml"
    for place in (
        f"check: {{type: https, ca: {evil}}}",
        f"check: {{type: exec, command: [{evil}]}}",
        f"check: {{type: exec, command: [/bin/true], user: {evil}}}",
        f"{evil}: 1",
        f"backends: [{{address: 10.0.0.1, node: {evil}}}]",
        "x: &a\x9f 1\n    y: *b\u2066",
    ):
        file.write_text(
            f"apiVersion: vipd/v1\nservices:\n  - address: 10.96.0.1\n    ports: 80/tcp\n    {place}\n"
        )
        ended = vipctl("check", str(file))
        assert ended.code == 1
        assert lines(ended.err) == ended.err
        assert not re.search(r"^\s*FORGED", ended.err, re.MULTILINE)
