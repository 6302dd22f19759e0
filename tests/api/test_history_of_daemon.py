"""A change that waits for its confirmation, over the ends and starts of a real daemon."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.api.daemon_process import ConfiguredHost, host

pytestmark = pytest.mark.root

BEFORE = {"name": "web", "address": "10.96.0.10", "ports": ["80/tcp"], "backends": ["10.244.0.5"]}
AFTER = {**BEFORE, "backends": ["10.244.0.99"]}
SHORT_SECONDS, LONG_SECONDS = 2, 3600


@pytest.fixture(scope="module")
def shared() -> Iterator[ConfiguredHost]:
    """A daemon for all of these tests; its log is in what fails."""
    with host() as made:
        made.start()
        yield made


@pytest.fixture
def node(shared: ConfiguredHost) -> ConfiguredHost:
    """The daemon runs, and its store has one service with the backend of before."""
    if shared.process is None:
        shared.start()
    if shared.get("history")["confirmation"]:
        shared.ask("POST", "rollback", {})
    apply(shared, BEFORE)
    return shared


def apply(node: ConfiguredHost, *specs: object, seconds: int | None = None) -> None:
    query = f"?confirm={seconds}" if seconds else ""
    status, answer = node.ask("POST", f"apply{query}", {"services": list(specs), "prune": True})
    assert (status, answer["applied"]) == (200, True), answer


def serves(node: ConfiguredHost, backend: str) -> bool:
    """Whether the kernel sends flows to this backend alone."""
    rules = node.rules()
    return f"--to-destination {backend}:" in rules and rules.count("--to-destination") == 1


def reasons(node: ConfiguredHost) -> list[str]:
    return [entry["reason"] for entry in node.get("history")["entries"]]


def test_a_crash_neither_confirms_nor_loses_it(node: ConfiguredHost) -> None:
    apply(node, AFTER, seconds=LONG_SECONDS)
    waits = node.get("status")["confirmation"]
    node.end(signal.SIGKILL)
    node.start()
    assert serves(node, "10.244.0.99")
    again = node.get("status")["confirmation"]
    assert again["revision"] == waits["revision"]
    assert 0 < again["seconds_left"] <= waits["seconds_left"]
    assert node.ask("POST", "apply", {"services": [], "prune": True})[0] == 409
    assert node.run("--socket", str(node.socket), "confirm", module="vipd.cli.main").returncode == 0
    assert "confirmation" not in node.get("status")

    apply(node, BEFORE, seconds=SHORT_SECONDS)
    over = time.monotonic() + SHORT_SECONDS
    node.end(signal.SIGKILL)
    assert serves(node, "10.244.0.5"), "the rules stay while vipd is down"
    while time.monotonic() < over:
        time.sleep(0.1)
    node.start()
    assert serves(node, "10.244.0.99"), "its first step wrote what was before, which was confirmed"
    assert reasons(node)[0].endswith(f"not confirmed within {SHORT_SECONDS}s")
    assert "10.244.0.99" in (node.state_dir / "services.yaml").read_text()
    assert "Traceback" not in node.log()


def test_once_takes_it_back_too(node: ConfiguredHost) -> None:
    apply(node, AFTER, seconds=SHORT_SECONDS)
    over = time.monotonic() + SHORT_SECONDS
    node.end(signal.SIGTERM)
    while time.monotonic() < over:
        time.sleep(0.1)
    done = node.vipd("--once")
    assert done.returncode == 0, done.stderr
    assert "is taken back: not confirmed within" in done.stderr
    assert serves(node, "10.244.0.5")
    assert "10.244.0.99" not in (node.state_dir / "services.yaml").read_text()
