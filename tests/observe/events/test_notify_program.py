"""The program of `notify` gets every event, and whatever it does holds up nothing."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.daemon_process import ConfiguredHost, host
from tests.lab.inside import Vipd, running
from tests.model.samples import HEAD, block
from tests.observe.asking import samples, value
from tests.observe.watching import scrape

pytestmark = pytest.mark.root

QUEUE = 500
"""So many events wait for the program."""
KEEP = "umask 022; id -un > user.new; mv user.new user; cat >> seen"


class Script:
    """A shell script that `notify` runs, in a directory where everybody may write."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.path = directory, directory / "notify"
        directory.chmod(0o777)
        self.write(KEEP)

    def write(self, lines: str) -> None:
        """Replace it; it begins in its directory."""
        new = self.directory / "new"
        new.write_text(f"#!/bin/sh\ncd {shlex.quote(str(self.directory))}\n{lines}\n")
        new.chmod(0o755)
        new.rename(self.path)

    def read(self, name: str) -> str:
        path = self.directory / name
        return path.read_text() if path.exists() else ""

    def seen(self) -> list[Any]:
        """The events that it has kept."""
        return [json.loads(line) for line in self.read("seen").splitlines()]


@pytest.fixture
def script() -> Iterator[Script]:
    """In a directory that other users can enter."""
    with tempfile.TemporaryDirectory(prefix="vipd-notify-") as directory:
        yield Script(Path(directory))


@pytest.fixture(scope="module")
def notified() -> Iterator[tuple[ConfiguredHost, Script]]:
    """A real daemon with a script that keeps its events."""
    with tempfile.TemporaryDirectory(prefix="vipd-notify-") as directory, host() as node:
        script = Script(Path(directory))
        node.settings |= {"notify": [str(script.path), "--an", "argument"], "node_name": "lb1"}
        node.declare("web.yaml", block("10.96.0.10", "web", "10.244.0.11"))
        node.start()
        yield node, script


def notifications(node: ConfiguredHost, result: str) -> float:
    text = node.tool("curl", "-s", "--unix-socket", str(node.socket), "http://vipd/metrics")
    return value(samples(text.encode()), "vipd_notifications_total", result=result)


def warnings(node: ConfiguredHost) -> list[str]:
    return [w for w in node.get("status")["warnings"] if w.startswith("notify: ")]


def test_each_event_is_passed_on_in_order_as_the_api_has_it_as_a_user_without_rights(
    notified: tuple[ConfiguredHost, Script],
) -> None:
    node, script = notified
    node.wait_for(lambda: len(script.seen()) >= 2)
    assert script.read("user").strip() in ("vipd-check", "nobody")
    script.write('cat >> seen; echo "$VIPD_EVENT $VIPD_LEVEL $VIPD_NODE $*" >> environment')
    for number in range(3):
        node.declare(f"{number}.yaml", block(f"10.96.0.5{number}", f"s{number}", "10.244.0.5"))
        node.wait_for(lambda n=number: script.seen()[-1]["services"] == [f"s{n}"])
    node.write("odd.yaml", f"{HEAD}  - {{name: odd, ports: '\"', {'ü' * 300}: 1}}\n")
    node.wait_for(lambda: script.seen()[-1]["event"] == "declaration-refused")
    assert script.seen() == node.get("events")["events"]
    (node.services_dir / "odd.yaml").unlink()
    node.wait_for(lambda: script.seen()[-1]["event"] == "declaration-accepted")
    environment = script.read("environment").splitlines()
    assert environment[0] == "service-added info lb1 --an argument"
    assert environment[3] == "declaration-refused error lb1 --an argument"
    assert warnings(node) == []


def test_a_failure_is_a_warning_until_it_works_again_and_never_an_event(
    notified: tuple[ConfiguredHost, Script],
) -> None:
    node, script = notified
    before = len(node.get("events")["events"])
    failed = notifications(node, "failed")
    script.write("echo no route >&2; exit 7")
    for number in range(3):
        node.declare("web.yaml", block("10.96.0.10", "web", f"10.244.0.2{number}"))
        node.wait_for(lambda n=number: notifications(node, "failed") > failed + n)
    (warning,) = warnings(node)
    assert f"notify: {script.path}: exit code 7: no route; failed 3 times in a row since" in warning
    script.write(KEEP)
    node.declare("web.yaml", block("10.96.0.10", "web", "10.244.0.30"))
    node.wait_for(lambda: script.seen()[-1]["reason"].startswith("backends +10.244.0.30"))
    node.wait_for(lambda: warnings(node) == [])
    assert len(node.get("events")["events"]) == before + 4, "its failures are no events"
    said = [line for line in node.log().splitlines() if "notify: " in line]
    assert len(said) == 2, said
    assert "exit code 7" in said[0]
    assert said[1].endswith("works again")


def test_without_its_program_a_daemon_serves_on_and_says_what_is_missing(
    notified: tuple[ConfiguredHost, Script],
) -> None:
    node, script = notified
    script.path.rename(script.directory / "away")
    node.declare("two.yaml", block("10.96.0.54", "two", "10.244.0.5"))
    node.wait_for(lambda: "two" in node.names() and node.get("status")["state"] == "in-sync")
    missing = f"notify: {script.path}: no such file or directory"
    node.wait_for(lambda: any(warning.startswith(missing) for warning in warnings(node)))
    checked = node.vipd("--check")
    assert checked.returncode == 0
    assert f"warning: notify: {script.path}: no such file; hint: install it" in checked.stderr
    (script.directory / "away").rename(script.path)


def test_when_vipd_ends_the_program_ends(notified: tuple[ConfiguredHost, Script]) -> None:
    node, script = notified
    script.write("echo $$ > pid; exec sleep 300")
    node.declare("two.yaml", block("10.96.0.54", "two", "10.244.0.8"))
    node.wait_for(lambda: script.read("pid").strip())
    assert node.end(signal.SIGTERM) == 0
    assert not Path(f"/proc/{script.read('pid').strip()}").exists()


def test_one_that_hangs_is_killed_with_its_children_and_the_next_event_is_passed_on(script: Script) -> None:
    script.write('[ "$VIPD_EVENT" = reloaded ] || { sleep 300 & echo $! > child; wait; }; cat >> seen')

    async def story(vipd: Vipd) -> None:
        status = await vipd.until_status(lambda status: "did not end" in str(status["warnings"]))
        (warning,) = [warning for warning in status["warnings"] if "did not end" in warning]
        assert f"{script.path} did not end within 10 s and was killed" in warning
        await vipd.reload()
        await vipd.until(lambda: [event["event"] for event in script.seen()] == ["reloaded"])

    def prepare(vipd: Vipd) -> None:
        vipd.state_dir.mkdir(exist_ok=True)
        vipd.declare(block("10.96.0.10", "web", "10.244.0.11"))

    running(story, prepare, notify=[str(script.path)])
    assert not Path(f"/proc/{script.read('child').strip()}").exists()


def test_what_finds_no_room_is_dropped_and_counted_the_rest_is_passed_on_and_the_warning_ends_after_an_hour(
    script: Script,
) -> None:
    script.write('read -r event; echo "$event" >> seen')  # no other program, five hundred times

    async def story(vipd: Vipd) -> None:
        async def warned() -> list[str]:
            return [w for w in (await vipd.status())["warnings"] if "not passed on" in w]

        for number in range(QUEUE + 100):
            (vipd.services_dir / f"{number}.yaml").write_text(f"{HEAD}  - {{nmae: x}}\n")
        await vipd.reload()
        every = (await vipd.ask("GET", "/v1/events")).body["events"]
        (warning,) = await warned()
        await asyncio.sleep(3599)
        assert await warned() == [warning]
        dropped = int(value(await scrape(vipd), "vipd_notifications_total", result="dropped"))
        assert warning.startswith(f"notify: {dropped} events were not passed on, since ")
        await vipd.until(lambda: len(script.seen()) >= len(every) - dropped)
        passed = script.seen()
        assert (passed[:QUEUE], len(passed)) == (every[:QUEUE], len(every) - dropped)
        await asyncio.sleep(2)
        assert await warned() == []
        await vipd.reload()
        await vipd.until(lambda: script.seen()[-1]["event"] == "reloaded")

    running(
        story, lambda vipd: vipd.state_dir.mkdir(exist_ok=True), simulated=True, notify=[str(script.path)]
    )
