"""The program of `notify` gets every event, and whatever it does holds up nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pwd
import shlex
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.daemon_process import ConfiguredHost, host
from tests.lab.simulated_time import simulate
from tests.model.samples import block
from tests.observe.events.made import occurrence, recorder
from vipd.host.accounts import CheckUsers
from vipd.observe.events.log_handler import EventHandler
from vipd.observe.events.notify_program import DROPS_SHOWN_SECONDS, DroppingSubscription, NotifyProgram
from vipd.observe.events.recorder import Recorder

PATIENCE_SECONDS = 60.0
Story = Callable[[NotifyProgram, Recorder], Awaitable[None]]


class Script:
    """A shell script that `notify` runs, in a directory where it may write."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "notify"

    def write(self, lines: str) -> None:
        """Replace it; it begins in its directory."""
        new = self.directory / "new"
        new.write_text(f"#!/bin/sh\ncd {shlex.quote(str(self.directory))}\n{lines}\n")
        new.chmod(0o755)
        new.rename(self.path)

    def seen(self) -> list[Any]:
        """The lines of JSON that it has kept in `seen`."""
        path = self.directory / "seen"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def script(tmp_path: Path) -> Script:
    made = Script(tmp_path)
    made.write("cat >> seen")
    return made


@pytest.fixture
def _as_oneself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run programs as their own user, which a daemon never does."""
    monkeypatch.setattr(CheckUsers, "account", lambda *_: pwd.getpwuid(os.geteuid()))


def run_story(story: Story, script: Script, **more: Any) -> None:
    """Run a story beside a recorder and a script."""

    async def run() -> None:
        made = recorder(script.directory)
        notify = NotifyProgram((str(script.path), "--an", "argument"), CheckUsers(), made, "lb1", **more)
        running = asyncio.create_task(notify.run())
        await asyncio.sleep(0)
        try:
            await story(notify, made)
        finally:
            running.cancel()
            await asyncio.wait([running])
            made.close()

    asyncio.run(asyncio.wait_for(run(), 2 * PATIENCE_SECONDS))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 (another process decides)
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("_as_oneself")
def test_each_event_is_passed_on_in_order_with_all_that_it_says(script: Script) -> None:
    script.write('cat >> seen; echo "$VIPD_EVENT $VIPD_LEVEL $VIPD_NODE $*" >> told')

    async def story(notify: NotifyProgram, made: Recorder) -> None:
        for number in range(3):
            made.record(occurrence(number, services=(f"s{number}",), reason='said "no"', cause="check tcp"))
        made.record(occurrence(3, "rules-repaired", level="warning", backends=("ü" * 1000,) * 100))
        await until(lambda: notify.counts()["passed"] == 4)

    run_story(story, script)
    events = script.seen()
    assert [event["services"] for event in events] == [["s0"], ["s1"], ["s2"], []]
    assert (events[0]["reason"], events[0]["cause"], events[0]["count"]) == ('said "no"', "check tcp", 1)
    assert events[3]["backends"] == ["ü" * 1000] * 100, "more than a pipe holds"
    told = (script.directory / "told").read_text().splitlines()
    assert told[0] == "backend-health info lb1 --an argument"
    assert told[3] == "rules-repaired warning lb1 --an argument"


@pytest.mark.usefixtures("_as_oneself")
def test_a_failure_is_a_warning_until_it_works_again_and_never_an_event(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vipd")
    script.write("echo no route >&2; exit 7")

    async def story(notify: NotifyProgram, made: Recorder) -> None:
        handler, logger = EventHandler(made), logging.getLogger("vipd")
        logger.addHandler(handler)
        try:
            for number in range(3):
                made.record(occurrence(number, services=(f"s{number}",)))
            await until(lambda: notify.counts()["failed"] == 3)
            (warning,) = notify.warnings()
            assert f"notify: {script.path}: exit code 7: no route; failed 3 times in a row since" in warning
            script.write("cat >> seen")
            made.record(occurrence(4, services=("last",)))
            await until(lambda: notify.counts()["passed"] == 1)
            assert notify.warnings() == ()
            assert len(made.read()) == 4, "its failures are no events"
        finally:
            logger.removeHandler(handler)

    run_story(story, script)
    assert [event["services"] for event in script.seen()] == [["last"]]
    said = [record.getMessage() for record in caplog.records if "notify" in record.getMessage()]
    assert len(said) == 2, said
    assert "exit code 7" in said[0]
    assert said[1].endswith("works again")


@pytest.mark.usefixtures("_as_oneself")
def test_one_that_hangs_is_killed_with_its_children_and_the_next_event_is_passed_on(script: Script) -> None:
    script.write('[ "$VIPD_EVENT" = reloaded ] || { sleep 300 & echo $! > child; wait; }; cat >> seen')

    async def story(notify: NotifyProgram, made: Recorder) -> None:
        made.record(occurrence(0))
        await until(lambda: notify.counts()["failed"] == 1)
        assert f"{script.path} did not end within 0.5 s and was killed" in notify.warnings()[0]
        made.record(occurrence(1, "reloaded"))
        await until(lambda: notify.counts()["passed"] + notify.counts()["failed"] == 2)

    run_story(story, script, timeout=0.5)
    child = (script.directory / "child").read_text().strip()
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.usefixtures("_as_oneself")
def test_what_arrives_while_the_queue_is_full_is_dropped_and_counted(script: Script) -> None:
    script.write("cat >> seen; until [ -e go ]; do sleep 0.01; done")

    async def story(notify: NotifyProgram, made: Recorder) -> None:
        made.record(occurrence(0, services=("first",)))
        await until(script.seen)
        for number in range(20):
            made.record(occurrence(number, services=(f"s{number}",)))
        await until(lambda: notify.counts()["dropped"] == 15)
        (warning,) = notify.warnings()
        assert warning.startswith("notify: 15 events were not passed on, since ")
        (script.directory / "go").touch()
        await until(lambda: notify.counts()["passed"] == 6)
        made.record(occurrence(30, services=("after",)))
        await until(lambda: notify.counts()["passed"] == 7)
        assert len(made.read()) == 22, "all are kept"

    run_story(story, script, limit=5)
    names = [event["services"][0] for event in script.seen()]
    assert names == ["first", *(f"s{number}" for number in range(5)), "after"]


def test_the_warning_of_dropped_events_ends_after_an_hour() -> None:
    async def story() -> None:
        notify = NotifyProgram(("/bin/false",), CheckUsers(), recorder(Path("/nonexistent")), limit=0)
        notify._queue.put(occurrence())
        assert "1 events" in notify.warnings()[0]
        await asyncio.sleep(DROPS_SHOWN_SECONDS - 1)
        assert notify.warnings()
        await asyncio.sleep(2)
        assert notify.warnings() == ()
        assert notify.counts()["dropped"] == 1

    simulate(story())


def test_a_queue_goes_on_once_it_has_room_again() -> None:
    async def story() -> None:
        queue = DroppingSubscription(1)
        for name in ("a", "b"):
            queue.put(occurrence(event=name))
        assert (await queue.next(1)).event == "a"  # type: ignore[union-attr]
        queue.put(occurrence(event="c"))
        assert (await queue.next(1)).event == "c"  # type: ignore[union-attr]
        assert not queue.overflowed

    simulate(story())


@pytest.mark.usefixtures("_as_oneself")
def test_when_vipd_ends_the_program_ends(script: Script) -> None:
    script.write("echo $$ > pid; exec sleep 300")
    pid = script.directory / "pid"

    async def story(notify: NotifyProgram, made: Recorder) -> None:
        made.record(occurrence())
        await until(lambda: pid.exists() and pid.read_text())

    run_story(story, script, timeout=300.0)
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


@pytest.fixture(scope="module")
def notified() -> Iterator[tuple[ConfiguredHost, Script]]:
    """A real daemon with a script that keeps its events, in a directory open to its user."""
    with tempfile.TemporaryDirectory(prefix="vipd-notify-") as directory, host() as node:
        script = Script(Path(directory))
        script.directory.chmod(0o777)
        script.write("umask 022; id -un > user.new; mv user.new user; cat >> seen")
        node.settings["notify"] = [str(script.path)]
        node.declare("web.yaml", block("10.96.0.10", "web", "10.244.0.11"))
        node.start()
        yield node, script


@pytest.mark.root
def test_a_daemon_passes_its_events_on_as_a_user_without_rights(
    notified: tuple[ConfiguredHost, Script],
) -> None:
    node, script = notified
    node.wait_for(lambda: len(script.seen()) >= 2)
    assert {event["event"] for event in script.seen()} >= {"started", "services-loaded"}
    assert (script.directory / "user").read_text().strip() in ("vipd-check", "nobody")
    node.declare("dns.yaml", block("10.96.0.53", "dns", "10.244.0.5"))
    node.wait_for(lambda: script.seen()[-1]["event"] == "service-added")
    assert script.seen()[-1] == node.get("events")["events"][-1], "as the API has it"
    assert not any("notify" in warning for warning in node.get("status")["warnings"])


@pytest.mark.root
def test_without_its_program_a_daemon_serves_on_and_says_what_is_missing(
    notified: tuple[ConfiguredHost, Script],
) -> None:
    node, script = notified
    script.path.rename(script.directory / "away")
    node.declare("two.yaml", block("10.96.0.54", "two", "10.244.0.5"))
    node.wait_for(lambda: "two" in node.names() and node.get("status")["state"] == "in-sync")
    missing = f"notify: {script.path}: no such file or directory"
    node.wait_for(lambda: any(w.startswith(missing) for w in node.get("status")["warnings"]))
    checked = node.vipd("--check")
    assert checked.returncode == 0
    assert f"warning: notify: {script.path}: no such file; hint: install it" in checked.stderr
    (script.directory / "away").rename(script.path)
