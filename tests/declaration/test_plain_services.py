"""Files of plain services are read by a pattern: with the result of the YAML reader, or not at all."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.examples import examples
from tests.model.samples import many_declared
from vipd.declaration import plain_services
from vipd.declaration.native import parse_declaration
from vipd.declaration.plain_services import read_plain_services
from vipd.declaration.problems import Declaration
from vipd.declaration.yaml_tree import read_tree
from vipd.model import limits
from vipd.model.service import Origin

HEAD = "apiVersion: vipd/v1\nservices:\n"
WEB = """  - name: web/shop
    address: 10.96.0.1
    ports: [{name: http, port: 80, protocol: tcp, target: 8080}]
    backends: [10.128.0.1, 10.128.0.2:81, 10.128.0.3@5]
"""
LISTED = """  # a comment
  - ports: 53:5353/udp
    backends:
        - 10.128.0.1
        - 10.128.0.2:53@0
    address: 10.96.0.2
"""
WRAPPED = """  - address: 10.96.0.3
    ports: [53/udp, "54/tcp,udp"]
    backends: [10.128.0.1, 10.128.0.2,
      10.128.0.4]

"""
CHECKED = """  - name: checked
    address: [10.96.0.4, "fd00::4"]
    ports:
      - 80
    backends: [10.128.0.1, "fd00::5"]
    check: {type: tcp, interval: 5s}
"""
FLOW = "  - {name: flow, address: 10.96.0.5, ports: [53/udp], backends: [10.128.0.1]}\n"
MIXED = HEAD + WEB + LISTED + FLOW + WRAPPED + CHECKED + WEB.replace("shop", "2").replace("0.1\n", "0.6\n")
OUTDENTED = re.sub(r"^  ", "", f"# head\n\n{HEAD}{WEB}{CHECKED}{LISTED}", flags=re.MULTILINE)


def plain(text: str, accepted: bool = False) -> Declaration | None:
    """What this module reads."""
    found = read_plain_services(text.encode(), Origin("file", "x"), accepted=accepted)
    return None if found is None else Declaration(tuple(found))


def as_yaml(text: str, accepted: bool = False) -> Declaration:
    """What all of it means as YAML: text that is no UTF-8 bytes is not read in any other way."""
    return parse_declaration(text, "x", accepted=accepted)


def contents(declared: Declaration) -> object:
    """All of it, with the lines, which equal services do not compare."""
    return declared, [service.origin for service in declared.services]


@pytest.mark.parametrize("text", [MIXED, OUTDENTED, many_declared(30)], ids=["mixed", "outdented", "many"])
def test_services_are_read_as_the_yaml_reader_reads_them(text: str) -> None:
    found = plain(text)
    assert found is not None
    assert len(found.services) > 2
    assert contents(found) == contents(as_yaml(text))
    assert contents(parse_declaration(text.encode(), "x")) == contents(found)


@pytest.mark.parametrize(
    "text",
    [
        "",
        HEAD,
        f"{HEAD}{WEB}kind: x\n",
        f"{HEAD}{WEB}---\n{HEAD}{FLOW}",
        f"{HEAD}{WEB}{CHECKED}...\n",
        f"{HEAD}{WEB}{CHECKED}...\n{WEB}",
        f"defaults: {{check: {{type: tcp}}}}\n{HEAD}{WEB}",
        f"{HEAD}{WEB}{WEB}",
        HEAD + WEB.replace("10.96.0.1", "127.0.0.1"),
        HEAD + WEB.replace("10.96.0.1", "10.96.0.256"),
        HEAD + WEB.replace("10.96.0.1", "10.128.0.1"),
        HEAD + WEB.replace("10.128.0.1,", "10.128.0.2:81,"),
        HEAD + WEB.replace("10.128.0.1,", "10.128.0.1:0,"),
        HEAD + WEB.replace("10.128.0.1,", "224.0.0.1,"),
        HEAD + WEB.replace("port: 80,", "port: 80, port: 81,"),
        HEAD + WEB.replace("web/shop", "yes"),
        HEAD + WEB.replace("web/shop", "0x10"),
        HEAD + WEB.replace("web/shop", "web-"),
        HEAD + WEB + "    address: 10.96.0.9\n",
        HEAD + WEB + "    checks: {type: tcp}\n",
        HEAD + WEB + "    check: {type: tcp, <<: {}}\n",
        HEAD + CHECKED.replace("[10.128", "&a [10.128") + WEB.replace("ports:", "fallback: *a\n    ports:"),
        HEAD + WEB.replace("    ports", "     ports"),
        HEAD + WEB.replace("    ports", "\tports"),
        HEAD + WEB.replace("\n", "\r"),
        HEAD + CHECKED.replace("checked\n", "checked\u2028"),
        HEAD + WEB.rstrip("\n").removesuffix("]"),
        HEAD + WEB + "  - just text\n",
        HEAD + WEB + "  - [a, list]\n",
    ],
)
def test_anything_else_and_anything_wrong_is_left_to_the_yaml_reader(text: str) -> None:
    found = plain(text)
    assert found is None
    assert contents(parse_declaration(text.encode(), "x")) == contents(as_yaml(text))


def test_a_text_that_was_accepted_may_break_later_rules() -> None:
    text = HEAD + WEB + FLOW.replace("10.128.0.1", "10.96.0.1")
    assert plain(text) is None, "a backend is a virtual IP"
    found = plain(text, accepted=True)
    assert found is not None
    assert contents(found) == contents(as_yaml(text, accepted=True))


def test_services_beyond_a_limit_are_left_to_the_yaml_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plain(many_declared(10)) is not None
    for name, most in (("SERVICES", 9), ("MAX_UNIT_SIZE", 59), ("YAML_VALUES", 100)):
        with monkeypatch.context() as patch:
            patch.setattr(limits, name, most)
            assert plain(many_declared(10)) is None, name


def test_plain_services_need_no_yaml_reader_and_others_one_together(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counting(text: bytes, path: str) -> object:
        read.append(len(text))
        return read_tree(text, path)

    monkeypatch.setattr(plain_services, "read_tree", counting)
    plain_services._ports.cache_clear()
    assert plain(many_declared(200)) is not None
    assert len(read) == 1, "the ports, which are the same for all"
    read.clear()
    others = "".join(
        f"  - {{address: 10.97.0.{n}, ports: [80], backends: [10.128.0.1], slow_start: 1m}}\n"
        for n in range(1, 100)
    )
    assert plain(many_declared(200) + others) is not None
    assert len(read) == 1


_PIECES = st.sampled_from(
    [
        *"ab01.:,-#[]{}&*!|>'\"%@?\t \n\r~=/\x85",
        *(": ", " #", "\n  ", "\n- ", "\n---\n", "\n...\n", "\n\n", "\N{LINE SEPARATOR}", "\ufeff"),
        *("\n    name: q\n", "null", "1e3", "x-a: 1\n", "services:\n", ":0", "80/tcp", "127.0.0.1"),
    ]
)
_EDITS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 4), _PIECES), min_size=1, max_size=3)


def edited(text: str, edits: list[tuple[float, int, str]]) -> Iterator[str]:
    """The text after some edits: each replaces characters at a place by others, or moves a line there."""
    for place, length, piece in edits:
        at = int(place * len(text))
        text = text[:at] + piece + text[at + length :]
    yield text
    lines = text.splitlines(keepends=True)
    if lines:
        lines.insert(int(edits[-1][0] * len(lines)), lines.pop(edits[0][1] * len(lines) // 5))
        yield "".join(lines)


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from([MIXED, OUTDENTED]), _EDITS, st.booleans())
def test_an_edited_file_is_read_as_the_yaml_reader_reads_it(
    text: str, edits: list[tuple[float, int, str]], accepted: bool
) -> None:
    for made in edited(text, edits):
        found = parse_declaration(made.encode(), "x", accepted=accepted)
        assert contents(found) == contents(as_yaml(made, accepted))
