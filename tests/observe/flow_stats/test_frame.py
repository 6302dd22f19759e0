"""What `vipctl top` shows, line by line, what its keys do, and rates between two answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vipd.cli.top_frame import CHOSEN, State, batch, frame, press
from vipd.model.formatting import per_second, size

KEYS = ["UP", "DOWN", "PAGEUP", "PAGEDOWN", "HOME", "END", "ENTER", "ESC", "BACKSPACE", *"srbqPMNTIOKYF/x2"]


def service(name: str, new: int, flows: int, **more: Any) -> dict[str, Any]:
    traffic = dict.fromkeys(("packets_in", "bytes_in", "packets_out", "bytes_out"), more.pop("bytes", None))
    return {"name": name, "new_flows": new, "flows": flows, **traffic, **more}


def backend(address: str, new: int = 0, **more: Any) -> dict[str, Any]:
    named = {"endpoint": f"{address}:80", "protocol": "tcp", "port_name": "", "family": "ipv4", "gone": False}
    return service("", new, 1) | named | more


def answer(second: int, *services: dict[str, Any], tracked: int | None = None) -> dict[str, Any]:
    """What `GET /v1/stats` says; `tracked`: when connection tracking was read."""
    at, read = (f"2026-01-01T00:00:{n:02d}.000Z" for n in (second, second if tracked is None else tracked))
    counted = any(row["bytes_in"] is not None for row in services)
    conntrack = {"at": read, "entries": 7, "max": 262144, "accounting": counted, "fault": ""}
    hint = "" if counted else "sysctl -w net.netfilter.nf_conntrack_acct=1"
    traffic = {"counted": counted, "why": "", "hint": hint, "lost_flows": 0}
    return {"at": at, "conntrack": conntrack, "traffic": traffic, "services": list(services)}


@pytest.fixture
def state() -> State:
    """b is the busiest, c has the most flows, a is the first by name."""
    state = State()
    state.take(answer(0, service("a", 100, 1), service("b", 0, 2), service("c", 0, 3)))
    state.take(answer(1, service("a", 100, 1), service("b", 50, 2), service("c", 5, 3)))
    return state


def names(state: State, height: int = 24) -> str:
    """The names in order."""
    return " ".join(line.text.split()[0] for line in frame(state, 80, height)[3:-1] if line.text)


def cells(state: State) -> list[dict[str, str]]:
    """The rows by the titles of their columns."""
    titles, *rows = (line.text.replace(" b/s", "_b/s").split() for line in frame(state, 80, 24)[2:-1])
    return [dict(zip(titles, row, strict=True)) for row in rows if row]


def presses(state: State, *keys: str) -> None:
    for key in keys:
        press(state, key)


def test_keys_sort_filter_and_quit(state: State) -> None:
    assert names(state) == "b c a"
    for key, order in {"M": "c b a", "N": "a b c", "T": "a b c", "P": "b c a"}.items():
        press(state, key)
        assert names(state) == order, key
    press(state, "r")
    assert names(state) == "a c b"
    press(state, "s")
    assert "sorted by FLOWS, reversed" in frame(state, 80, 24)[1].text
    presses(state, "r", "P", "/", "q", "BACKSPACE", "B")
    assert frame(state, 80, 24)[1].text == "filter: B_"
    assert names(state) == "b"
    press(state, "ENTER")
    assert (state.quitting, state.filter) == (False, "B")
    press(state, "ESC")
    assert len(names(state)) == 5
    press(state, "q")
    assert state.quitting


def test_arrows_choose_and_scroll_and_enter_looks_closer(state: State) -> None:
    state.take(answer(2, *(service(f"s{n:03d}", n, n) for n in range(100))))
    presses(state, "N", "HOME")
    assert names(state, 14).startswith("s000")
    press(state, "END")
    assert [line.text.split()[0] for line in frame(state, 80, 14) if line.style == CHOSEN] == ["s099"]
    assert names(state, 14).endswith("s099")
    press(state, "PAGEUP")
    frame(state, 80, 14)
    assert state.chosen == ("s089",)
    press(state, "ENTER")
    assert state.focus == "s089"
    state.take(answer(3, service("s089", 3, 1, backends=[backend("10.0.0.1", 3, gone=True)])))
    assert "1 backend of s089" in frame(state, 80, 24)[0].text
    assert names(state) == "10.0.0.1:80/tcp+"
    press(state, "ESC")
    assert (state.focus, state.chosen) == ("", ("s089",))


def test_rates_are_of_the_time_between_two_readings_of_the_same_kind() -> None:
    state = State()
    seen = []
    for second, tracked, new, size_in in (
        (0, 0, 10, 1000),
        (2, 0, 30, 1000),
        (2, 4, 99, 3000),
        (3, 5, 30, 100),
        (4, 6, 30, 100),
    ):
        state.take(answer(second, service("web", new, 1, bytes=size_in), tracked=tracked))
        (row,) = cells(state)
        seen.append((row["NEW/S"], row["IN/S"]))
    assert seen == [("-", "-"), ("10", "-"), ("10", "500"), ("0", "0"), ("0", "0")]


def test_columns_that_are_there_where_there_is_anything_to_show(state: State) -> None:
    assert not {"IN/S", "REF/S"} & cells(state)[0].keys()
    assert "nf_conntrack_acct=1" in frame(state, 80, 24)[1].text
    full = {"connections": 10, "new_per_second": 5}
    state.take(answer(2, service("a", 100, 1), service("b", 60, 2, refused=full)))
    state.take(answer(4, service("a", 100, 1), service("b", 60, 2, refused=full | {"connections": 30})))
    assert {row["SERVICE"]: row["REF/S"] for row in cells(state)} == {"a": "-", "b": "10"}
    press(state, "F")
    assert names(state) == "b a"
    press(state, "ENTER")
    state.take(answer(5, service("b", 60, 2, refused=full, backends=[])))
    assert "REF/S" not in frame(state, 80, 24)[2].text
    press(state, "ESC")
    state.take(answer(6, service("a", 0, 0, bytes=0)))
    state.take(answer(8, service("a", 0, 0, bytes=4096)))
    assert [list(row.values()) for row in cells(state)] == [["a", "-", "0", "0", "0", "2.0K", "2.0K", "4.1K"]]
    press(state, "b")
    (row,) = cells(state)
    assert (row["IN_b/s"], row["OUT_b/s"]) == ("16K", "16K")
    assert all(len(line.text) <= 80 for line in frame(state, 80, 24))


def test_readiness_is_shown_and_sorted_by_what_is_missing(state: State) -> None:
    ready = {"all": (2, 2), "one-down": (4, 5), "all-down": (0, 3)}
    state.take(answer(2, *(service(n, 0, 0, ready=r, declared=d) for n, (r, d) in ready.items())))
    press(state, "Y")
    rows = [(row["SERVICE"], row["READY"]) for row in cells(state)]
    assert rows == [("all-down", "0/3"), ("one-down", "4/5"), ("all", "2/2")]
    state.focus_on("all")
    backends = [backend(f"10.0.0.{n}", ready=n == 1) for n in (1, 2)]
    state.take(answer(3, service("all", 0, 0, ready=1, declared=2, backends=backends)))
    assert [list(row.values())[:2] for row in cells(state)] == [
        ["10.0.0.2:80/tcp", "no"],
        ["10.0.0.1:80/tcp", "yes"],
    ]


def test_text_for_a_file_has_all_rows_and_whole_names(state: State) -> None:
    state.take(answer(2, *(service(f"a-name-that-is-long-{n:03d}", n, n) for n in range(100))))
    lines = batch(state, 0).splitlines()
    assert len(lines) == 103
    assert lines[0].endswith("; 2026-01-01T00:00:02.000Z")
    assert lines[3].startswith("a-name-that-is-long-099 ")
    assert max(map(len, batch(state, 40).splitlines()[2:])) <= 40


def test_numbers_are_short() -> None:
    sizes = {0: "0", 999: "999", 1000: "1.0K", 1024: "1.0K", 10 * 1024: "10K", 1023 * 1024: "1.0M"}
    sizes |= {5 * 2**30: "5.0G", 2**70: "1048576P"}
    assert {number: size(number) for number in sizes} == sizes
    rates = {0: "0", 0.04: "0.0", 0.5: "0.5", 9.94: "9.9", 9.96: "10", 1520: "1520"}
    assert {number: per_second(number) for number in rates} == rates


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
