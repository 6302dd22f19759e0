"""A text that is read again says what it says to a reader who has never seen it before."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.lab.examples import examples
from vipd.declaration import incremental as again
from vipd.declaration.incremental import parse_incrementally
from vipd.declaration.native import parse_declaration
from vipd.declaration.problems import Declaration
from vipd.model import limits

PATH = "/etc/vipd/services.d/many.yaml"
HEAD = "# All of them\napiVersion: vipd/v1\ndefaults: {affinity: client-ip}\nservices:\n"


def block(number: int, indent: str = "  ") -> str:
    """One service, as people write it."""
    lines = (
        f"- name: web-{number}",
        f"  address: 10.96.0.{number}",
        "  ports:",
        "    - {name: http, port: 80}",
        f"  backends: [10.244.0.{number}]  # the old one",
    )
    return "".join(f"{indent}{line}\n" for line in lines)


TEXT = HEAD + "".join(block(number) for number in range(1, 9))

BARE = TEXT.replace("defaults: {affinity: client-ip}\n", "")
TAILED = BARE + "defaults: {affinity: client-ip}\n"

PIECES = st.sampled_from(
    [
        *('"', "'", "[", "{", "}", "|\n", ">\n", "#", "&a ", "*a", "!!str ", "- ", "  - ", "\t", "\r", ":"),
        *(
            "---\n",
            "...\n",
            "\n---\n",
            "\n\n",
            "\n  ",
            "\n- ",
            "\nservices:\n",
            "\ndefaults: {affinity: none}\n",
        ),
        *("\n  - name: web-3\n", "\n    affinity: none\n", "\n    afinity: none\n", "\n# said\n", " x", "1"),
        *(block(40), block(40, "    "), block(3), block(41) + block(42), "\x85", "\N{LINE SEPARATOR}"),
    ]
)
EDITS = st.lists(
    st.tuples(
        st.integers(0, len(TEXT)), st.sampled_from([0, 0, 0, 1, 5, 60, 140, 300]), PIECES | st.just("")
    ),
    min_size=1,
    max_size=3,
)


def origins(declaration: Declaration) -> list[object]:
    """Where the services stand, which their equality leaves out."""
    return [service.origin for service in declaration.services]


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from([TEXT, BARE, TAILED]), EDITS)
@example(TEXT, [(TEXT.index("  - name: web-4"), 0, '  - name: "web-40\n')])
@example(TEXT, [(TEXT.index("  - name: web-4"), 0, block(40, "    "))])
@example(BARE, [(BARE.index("  - name: web-4"), 0, "defaults: {affinity: none}\n")])
@example(TAILED, [(TAILED.index("10.244.0.4]"), 10, "10.244.0.9")])
@example(BARE, [(len(BARE), 0, "defaults: {affinity: none}\n")])
def test_whatever_is_edited_it_reads_like_the_whole(base: str, edits: list[tuple[int, int, str]]) -> None:
    earlier, known = base, parse_declaration(base, PATH)
    for at, length, piece in edits:
        text = earlier[:at] + piece + earlier[at + length :]
        found, expected = parse_incrementally(text, PATH, earlier, known), parse_declaration(text, PATH)
        assert found == expected
        assert origins(found) == origins(expected)
        earlier, known = text, found


def read_in_part(text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Declaration, list[int]]:
    """What a text says that was `TEXT` before, and how many services were read for it at each reading."""
    read: list[int] = []

    def noted(part: str, path: str, written_by: str = "") -> Declaration:
        found = parse_declaration(part, path, written_by=written_by)
        read.append(len(found.services))
        return found

    known = parse_declaration(TEXT, PATH)
    monkeypatch.setattr(again, "parse_declaration", noted)
    return parse_incrementally(text, PATH, TEXT, known), read


def test_only_the_service_that_differs_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found, read = read_in_part(TEXT.replace("10.244.0.5]", "10.244.0.5, 10.244.9.9]"), monkeypatch)
    assert read == [1]
    assert [str(backend) for backend in found.services[4].backends] == ["10.244.0.5", "10.244.9.9"]


def test_services_behind_an_inserted_line_know_their_new_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found, read = read_in_part(TEXT.replace("web-2\n", "web-2\n    on_remove: reset\n"), monkeypatch)
    assert read == [1]
    assert [service.origin.line for service in found.services] == [5, 10, 16, 21, 26, 31, 36, 41]


def test_a_fault_is_told_with_its_line_and_place_in_the_whole_file(monkeypatch: pytest.MonkeyPatch) -> None:
    found, read = read_in_part(TEXT.replace("web-6\n", "web-6\n    afinity: none\n"), monkeypatch)
    assert read == [1, 8]
    assert [(p.line, p.path) for p in found.problems] == [(31, "services[5]")]


def test_a_claim_of_a_service_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found, read = read_in_part(TEXT.replace("10.96.0.5\n", "10.96.0.1\n"), monkeypatch)
    assert read == [1, 8]
    assert "already belongs to web-1" in str(found.problems[0])


@pytest.mark.parametrize(
    "change", [("10.244.0.3]", "10.96.0.7]"), ("address: 10.96.0.3", "address: 10.244.0.7")]
)
def test_a_backend_at_the_address_of_a_service_elsewhere_is_found(change: tuple[str, str]) -> None:
    text = TEXT.replace(*change)
    assert text != TEXT
    found = parse_incrementally(text, PATH, TEXT, parse_declaration(TEXT, PATH))
    assert found == parse_declaration(text, PATH)
    assert len(found.problems) == 1


FLOW = "apiVersion: vipd/v1\nservices:\n  [{address: 10.96.0.1, ports: [80], backends: [10.244.0.1]}]\n"


def test_services_in_flow_style_are_read_as_a_whole() -> None:
    text = FLOW.replace("10.244.0.1]", "10.244.0.2]")
    assert parse_incrementally(text, PATH, FLOW, parse_declaration(FLOW, PATH)) == parse_declaration(
        text, PATH
    )


@pytest.mark.parametrize("limit", ["SERVICES", "MAX_UNIT_SIZE"])
def test_what_is_added_counts_with_all_else(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    known, text = parse_declaration(TEXT, PATH), TEXT + block(9)
    size = len(known.services) if limit == "SERVICES" else sum(map(limits.declared_size, known.services))
    monkeypatch.setattr(limits, limit, size)
    found = parse_incrementally(text, PATH, TEXT, known)
    assert found == parse_declaration(text, PATH)
    assert not found.ok
