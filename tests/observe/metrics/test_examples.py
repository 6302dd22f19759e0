"""The dashboard and the alerts that are shipped ask for metrics that there are."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.docs.markdown import ROOT
from tests.observe.metrics.test_metrics import NO_PROMTOOL, PROMTOOL, documented

METRICS = documented()
DASHBOARD = ROOT / "examples" / "grafana-dashboard.json"
ALERTS = ROOT / "examples" / "prometheus-alerts.yaml"

_METRIC = re.compile(r"\b((?:vipd|process)_[a-z_]+)\b")
_LABELS = re.compile(r"\b(vipd_[a-z_]+)\{([^}]*)\}")
_OF_PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes"}


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return document


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    document: list[dict[str, Any]] = group["rules"]
    return document


def expressions() -> Iterator[str]:
    """Every query of dashboard and alerts."""
    board = dashboard()
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]
    yield from (annotation["expr"] for annotation in board["annotations"]["list"])
    yield from (rule["expr"] for rule in rules())


def family(name: str) -> str:
    return re.sub(r"_(bucket|count|sum)$", "", name) if name not in METRICS else name


def test_every_metric_that_is_asked_for_is_there() -> None:
    asked = {name for text in expressions() for name in _METRIC.findall(text)}
    assert len(asked) > 15
    assert {name for name in asked if family(name) not in METRICS and name not in _OF_PROCESS} == set()


def test_every_label_that_is_asked_for_is_there() -> None:
    for text in expressions():
        for name, selector in _LABELS.findall(text):
            asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) - {"instance", "job"}
            assert asked <= {*METRICS[family(name)][1], "le"}, (name, asked)


def test_counters_are_only_asked_for_their_growth() -> None:
    counters = {name for name, (kind, _) in METRICS.items() if kind == "counter"}
    for text in expressions():
        for name in set(_METRIC.findall(text)) & counters:
            assert re.search(rf"(rate|increase)\({name}", text), text


def test_the_dashboard_can_be_imported() -> None:
    board = dashboard()
    assert {"title", "uid", "schemaVersion", "panels", "templating"} <= board.keys()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        grid = panel["gridPos"]
        assert 0 <= grid["x"] < grid["x"] + grid["w"] <= 24
        assert panel["datasource"]["uid"] == "${datasource}"
    grids = [panel["gridPos"] for panel in board["panels"]]
    tiles = [
        (x, y) for p in grids for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])
    ]
    assert len(set(tiles)) == len(tiles), "panels overlap"


def test_each_alert_says_what_and_what_to_do() -> None:
    for rule in rules():
        assert {"summary", "description"} <= rule["annotations"].keys(), rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


@pytest.mark.skipif(PROMTOOL is None, reason=NO_PROMTOOL)
def test_prometheus_takes_the_alerts() -> None:
    assert PROMTOOL is not None
    argv = [PROMTOOL, "check", "rules", str(ALERTS)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules())} rules found" in done.stdout
