"""What `vipctl top` shows, line by line, and what its keys do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vipd.cli.top_frame import CHOSEN, State, batch, frame, press

KEYS = ["UP", "DOWN", "PAGEUP", "PAGEDOWN", "HOME", "END", "ENTER", "ESC", "BACKSPACE", *"srbqPMNTIOKYF/x2"]


def service(name: str, new: int, flows: int, **more: Any) -> dict[str, Any]:
    traffic = dict.fromkeys(("packets_in", "bytes_in", "packets_out", "bytes_out"), more.pop("bytes", None))
    return {"name": name, "new_flows": new, "flows": flows, **traffic, **more}


def answer(second: int, *services: dict[str, Any], accounting: bool = False) -> dict[str, Any]:
    at = f"2026-01-01T00:00:{second:02d}.000Z"
    conntrack = {"at": at, "entries": 7, "max": 262144, "accounting": accounting, "fault": ""}
    hint = "" if accounting else "sysctl -w net.netfilter.nf_conntrack_acct=1"
    traffic = {"counted": accounting, "why": "", "hint": hint, "lost_flows": 0}
    return {"at": at, "conntrack": conntrack, "traffic": traffic, "services": list(services)}


@pytest.fixture
def state() -> State:
    """b is the busiest, c has the most flows, a is the first by name."""
    state = State()
    state.take(answer(0, service("a", 100, 1), service("b", 0, 2), service("c", 0, 3)))
    state.take(answer(1, service("a", 100, 1), service("b", 50, 2), service("c", 5, 3)))
    return state


def shown(state: State, height: int = 24) -> list[str]:
    """The names in order."""
    return [line.text.split()[0] for line in frame(state, 80, height)[3:-1] if line.text]


def test_keys_sort(state: State) -> None:
    assert shown(state) == ["b", "c", "a"]
    found = {}
    for key in "MNTP":
        press(state, key)
        found[key] = "".join(shown(state))
    assert found == {"M": "cba", "N": "abc", "T": "abc", "P": "bca"}
    press(state, "r")
    assert shown(state) == ["a", "c", "b"]
    press(state, "s")
    assert "sorted by FLOWS, reversed" in frame(state, 80, 24)[1].text


def test_flows_over_a_limit_have_a_column_where_a_service_has_limits(state: State) -> None:
    assert "REF/S" not in frame(state, 80, 24)[2].text
    full = {"connections": 10, "new_per_second": 5}
    state.take(answer(2, service("a", 100, 1), service("b", 60, 2, refused=full)))
    state.take(answer(4, service("a", 100, 1), service("b", 60, 2, refused=full | {"connections": 30})))
    titles, *rows = (line.text.split() for line in frame(state, 80, 24)[2:5])
    at = titles.index("REF/S")
    assert {row[0]: row[at] for row in rows} == {"a": "-", "b": "10"}
    press(state, "F")
    assert shown(state) == ["b", "a"]
    press(state, "ENTER")
    state.take(answer(5, service("b", 60, 2, refused=full, backends=[])))
    assert "REF/S" not in frame(state, 80, 24)[2].text


def test_a_filter_is_typed_kept_and_cleared(state: State) -> None:
    for key in ["/", "q", "BACKSPACE", "B"]:
        press(state, key)
    assert frame(state, 80, 24)[1].text == "filter: B_"
    assert shown(state) == ["b"]
    press(state, "ENTER")
    assert (state.quitting, state.filter) == (False, "B")
    press(state, "ESC")
    assert shown(state) == ["b", "c", "a"]
    press(state, "q")
    assert state.quitting


def test_arrows_choose_and_scroll_and_enter_looks_closer(state: State) -> None:
    state.take(answer(2, *(service(f"s{n:03d}", n, n) for n in range(100))))
    press(state, "N")
    press(state, "HOME")
    assert shown(state, 14)[0] == "s000"
    press(state, "END")
    lines = frame(state, 80, 14)
    assert [line.text.split()[0] for line in lines if line.style == CHOSEN] == ["s099"]
    assert shown(state, 14)[-1] == "s099"
    press(state, "PAGEUP")
    frame(state, 80, 14)
    assert state.chosen == ("s089",)
    press(state, "ENTER")
    assert state.focus == "s089"
    backend = service(
        "", 3, 1, endpoint="10.0.0.1:80", protocol="tcp", port_name="", family="ipv4", gone=True
    )
    state.take(answer(3, service("s089", 3, 1, backends=[backend])))
    lines = frame(state, 80, 24)
    assert "1 backend of s089" in lines[0].text
    assert shown(state) == ["10.0.0.1:80/tcp+"]
    press(state, "ESC")
    assert (state.focus, state.chosen) == ("", ("s089",))


def test_traffic_is_shown_where_it_is_counted(state: State) -> None:
    assert "IN/S" not in frame(state, 80, 24)[2].text
    assert "nf_conntrack_acct=1" in frame(state, 80, 24)[1].text
    state.take(answer(2, service("a", 0, 0, bytes=0), accounting=True))
    state.take(answer(4, service("a", 0, 0, bytes=4096), accounting=True))
    lines = frame(state, 80, 24)
    assert lines[2].text.split() == ["SERVICE", "READY", "NEW/S", "NEW", "FLOWS", "IN/S", "OUT/S", "PKT/S"]
    assert lines[3].text.split() == ["a", "-", "0", "0", "0", "2.0K", "2.0K", "4.1K"]
    press(state, "b")
    lines = frame(state, 80, 24)
    assert " IN b/s OUT b/s " in lines[2].text
    assert lines[3].text.split()[5:7] == ["16K", "16K"]
    assert all(len(line.text) <= 80 for line in lines)


def test_readiness_is_shown_and_sorted_by_what_is_missing(state: State) -> None:
    state.take(
        answer(
            2,
            service("all", 0, 0, ready=2, declared=2),
            service("one-down", 0, 0, ready=4, declared=5),
            service("all-down", 0, 0, ready=0, declared=3),
        )
    )
    press(state, "Y")
    rows = [line.text.split()[:2] for line in frame(state, 80, 24)[3:6]]
    assert rows == [["all-down", "0/3"], ["one-down", "4/5"], ["all", "2/2"]]
    backends = [
        service("", 0, 0, endpoint=f"10.0.0.{n}:80", protocol="tcp", port_name="", family="ipv4", gone=False)
        | {"ready": n == 1}
        for n in (1, 2)
    ]
    state.focus_on("all")
    state.take(answer(3, service("all", 0, 0, ready=1, declared=2, backends=backends)))
    rows = [line.text.split()[:2] for line in frame(state, 80, 24)[3:5]]
    assert rows == [["10.0.0.2:80/tcp", "no"], ["10.0.0.1:80/tcp", "yes"]]


def test_text_for_a_file_has_all_rows_and_whole_names(state: State) -> None:
    state.take(answer(2, *(service(f"a-name-that-is-long-{n:03d}", n, n) for n in range(100))))
    lines = batch(state, 0).splitlines()
    assert len(lines) == 103
    assert lines[0].endswith("; 2026-01-01T00:00:02.000Z")
    assert lines[3].startswith("a-name-that-is-long-099 ")
    assert max(map(len, batch(state, 40).splitlines()[2:])) <= 40


@given(
    st.lists(st.sampled_from(KEYS), max_size=30), st.integers(1, 200), st.integers(1, 60), st.integers(0, 40)
)
def test_whatever_is_pressed_the_screen_is_kept_to(
    keys: list[str], width: int, height: int, rows: int
) -> None:
    state = State()
    for second, key in enumerate(keys[:50]):
        state.take(answer(second, *(service(f"name-of-service-{n}" * (n % 4), n, n) for n in range(rows))))
        press(state, key)
        lines = frame(state, width, height)
        assert len(lines) == height
        assert all(len(line.text) <= width for line in lines)
