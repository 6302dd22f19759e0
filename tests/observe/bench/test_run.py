"""The whole run at its smallest: every group of ours over the real kernel, with rows that are complete."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.control import WAYS
from tests.bench.programming import OTHERS, OURS
from tests.bench.record import FORMAT, Record
from tests.bench.report import TABLES

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.root, pytest.mark.nightly, pytest.mark.timeout(900)]
"""The first of these tests waits for the whole run."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `--smoke` writes."""
    out = tmp_path_factory.mktemp("bench")
    argv = [sys.executable, "-m", "tests.bench", "--smoke", "--out", str(out)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    assert "medians, smallest to largest" in done.stdout
    return out / "results.json"


def rows(results: Path, group: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(results.read_text())["groups"][group]["measurements"]
    return found


def test_every_group_is_finished_and_knows_its_machine(results: Path) -> None:
    written = json.loads(results.read_text())
    assert written["format"] == FORMAT
    assert {"programming", "control", "daemon"} <= written["groups"].keys()
    for group in written["groups"].values():
        assert group["finished"]
        assert group["extent"] == "smoke"
        assert {"kernel", "cores", "load_average", "programs"} <= group["machine"].keys()
        assert group["machine"]["programs"]["etcd"].startswith("3.")


def test_nothing_names_the_machine_or_its_places(results: Path) -> None:
    text = results.read_text()
    assert not re.search(rf"\b{re.escape(os.uname().nodename)}\b", text)
    assert str(ROOT) not in text
    assert str(results.parent) not in text


def test_all_subjects_programmed_and_changed(results: Path) -> None:
    measured = rows(results, "programming")
    for what in ("full load", "one change"):
        values = {row["subject"]: row["values"] for row in measured if row["what"] == what}
        assert values.keys() == {*OURS, *OTHERS}
        assert all(len(each) == 1 and each[0] > 0 for each in values.values()), values
    started = [row for row in measured if row["what"].startswith("start of the daemon")]
    assert [len(row["values"]) for row in started] == [1, 1]


def test_every_way_of_a_change_was_timed_with_both_dataplanes(results: Path) -> None:
    timed = {(row["what"], row["subject"]): row["values"] for row in rows(results, "control")}
    assert timed.keys() == {(way, name) for way in WAYS for name in ("vipd iptables-nft", "vipd nftables")}
    assert all(values and values[0] > 0 for values in timed.values()), timed


def test_the_daemon_wrote_what_was_changed(results: Path) -> None:
    found = [row for row in rows(results, "daemon") if row["what"] == "writes to the kernel meanwhile"]
    assert len(found) == 2
    assert all(row["values"][0] > 0 for row in found)


def test_every_table_can_be_made_of_it(results: Path) -> None:
    record = Record(results)
    for name, made in TABLES.items():
        lines = made(record)
        if not name.startswith(("path-", "plot-", "ipvs", "balance")):
            assert len(lines) > 2, name
            assert all(line.startswith("|") for line in lines if line), name
