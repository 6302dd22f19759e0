"""A real daemon in a namespace: each kind of change, really made, is one event with its cause."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.daemon_process import PATIENCE_SECONDS, ConfiguredHost, host
from tests.faults.dataplanes import IPTABLES
from tests.faults.equipment import REFUSAL, FailingTools
from tests.lab.cached import cached
from tests.model.samples import block

pytestmark = pytest.mark.root

REFUSED_BACKEND = "10.244.0.66"
ME = f"user root (pid {os.getpid()})"

Json = dict[str, Any]


class Story:
    """A host, and the events of it that no test has looked at yet."""

    def __init__(self, node: ConfiguredHost, tools: FailingTools) -> None:
        self.node, self.tools = node, tools
        self.last = 0

    def new(self) -> list[Json]:
        """The events since the last look."""
        events: list[Json] = self.node.get(f"events?after={self.last}")["events"]
        self.last = max((event["id"] for event in events), default=self.last)
        return events

    def makes(self, act: Callable[[], object], *expected: str) -> list[Json]:
        """What an act leads to: these events, in any order, and no others. In the order expected."""
        assert self.new() == []
        act()
        after = self.last
        path = f"events?after={after}"
        self.node.wait_for(lambda: len(self.node.get(path)["events"]) >= len(expected))
        self.node.wait_for(lambda: self.node.get("status")["state"] != "pending")
        events = self.new()
        assert sorted(event["event"] for event in events) == sorted(expected), events
        assert all(event["count"] == 1 for event in events), events
        return sorted(events, key=lambda event: expected.index(event["event"]))

    def file(self, name: str) -> Path:
        return self.node.services_dir / name

    def vipctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run vipctl against this host's daemon."""
        return self.node.run(*arguments, "--socket", str(self.node.socket), module="vipd.cli.main")

    def ask(self, method: str, path: str, body: object = None) -> None:
        status, answer = self.node.ask(method, path, body)
        assert status == 200, answer


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """One daemon for all, with tools that can be made to fail."""
    directory = tmp_path_factory.mktemp("tools")
    tools = FailingTools(directory, IPTABLES)
    with pytest.MonkeyPatch.context() as patch, host() as node:
        patch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
        node.declare("web.yaml", block("10.96.0.10", "web", "10.244.0.11", "10.244.0.12"))
        node.start()
        yield Story(node, tools)


def test_the_start_is_told_and_the_load_as_one(story: Story) -> None:
    started, loaded = story.new()
    assert (started["event"], loaded["event"]) == ("started", "services-loaded")
    assert started["reason"].startswith("vipd ")
    assert loaded["reason"].startswith("1 service in the kernel")


def test_a_file_added_edited_and_deleted(story: Story) -> None:
    path = story.file("dns.yaml")
    (added,) = story.makes(
        lambda: story.node.declare("dns.yaml", block("10.96.0.53", "dns", "10.244.0.5")), "service-added"
    )
    assert (added["services"], added["cause"], added["reason"]) == (
        ["dns"],
        f"file {path}:3",
        "1 backend, 1 unchecked",
    )
    (changed,) = story.makes(
        lambda: story.node.declare("dns.yaml", block("10.96.0.53", "dns", "10.244.0.6")), "service-changed"
    )
    assert changed["reason"] == "backends +10.244.0.6 -10.244.0.5"
    assert changed["cause"] == f"file {path}:3"
    (removed,) = story.makes(path.unlink, "service-removed")
    assert (removed["services"], removed["cause"]) == (["dns"], f"file {path}")


def test_vipctl_is_named_with_its_user_and_pid(story: Story) -> None:
    (added,) = story.makes(
        lambda: story.vipctl("add", "10.96.0.20:80/tcp", "10.244.0.7", "--name", "mine"), "service-added"
    )
    assert added["services"] == ["mine"]
    assert re.fullmatch(r"user root \(pid \d+\)", added["cause"])
    weight = lambda: story.ask("PATCH", "services/mine/backends/10.244.0.7", {"weight": 5})  # noqa: E731
    (changed,) = story.makes(weight, "service-changed")
    assert (changed["cause"], changed["reason"]) == (ME, "backends ~10.244.0.7")
    (removed,) = story.makes(lambda: story.ask("DELETE", "services/mine"), "service-removed")
    assert (removed["cause"], removed["reason"]) == (ME, "was by cli")


def test_orders_given_taken_back_and_ended(story: Story) -> None:
    about = {"service": "web", "backend": "10.244.0.11"}
    order = {**about, "admin": "draining", "reason": "kernel update"}
    (begun,) = story.makes(lambda: story.ask("POST", "overrides", order), "override-given")
    assert (begun["services"], begun["backends"], begun["cause"]) == (["web"], ["10.244.0.11"], ME)
    assert begun["reason"] == "draining (kernel update)"
    (back,) = story.makes(lambda: story.ask("DELETE", "overrides", about), "override-taken-back")
    assert (back["cause"], back["reason"]) == (ME, "was draining (kernel update)")
    short = {"address": "10.244.0.12", "weight": 3, "for": 1}
    begun, ended = story.makes(
        lambda: story.ask("POST", "overrides", short), "override-given", "override-ended"
    )
    assert (begun["services"], begun["backends"]) == (["web"], ["10.244.0.12"])
    assert ended["cause"] == "time limit"
    assert ended["reason"].startswith("was weight 3 until ")


def test_drift_is_repaired_and_its_maker_named(story: Story) -> None:
    rule = next(line for line in story.node.rules().splitlines() if "-A VIPD-SERVICES" in line)
    delete = ("iptables", "-t", "nat", "-D", "VIPD-SERVICES", "1")
    assert rule
    (repaired,) = story.makes(lambda: story.node.tool(*delete), "rules-repaired")
    assert re.match(r"process iptables \(pid \d+\)", repaired["cause"])
    assert repaired["reason"] == "rule deleted in ipv4 nat VIPD-SERVICES"
    story.node.wait_for(lambda: rule in story.node.rules())


def test_a_broken_file_is_one_event_with_all_its_problems_counted_and_so_is_its_mending(story: Story) -> None:
    path = story.file("web.yaml")
    good = path.read_text()
    broken = good.replace("10.96.0.10", "10.96.0.300").replace("10.244.0.12", "10.244.0.1200")
    (refused,) = story.makes(lambda: story.node.write("web.yaml", broken), "declaration-refused")
    assert (refused["cause"], refused["level"]) == (f"file {path}:3", "error")
    assert "10.96.0.300" in refused["reason"]
    assert refused["reason"].endswith("; and 1 more problem")
    (mended,) = story.makes(lambda: story.node.write("web.yaml", good), "declaration-accepted")
    assert mended["cause"] == f"file {path}"


def test_quarantine_begins_and_ends(story: Story) -> None:
    with story.tools.refusing(REFUSED_BACKEND):
        added, quarantined = story.makes(
            lambda: story.node.declare("bad.yaml", block("10.96.0.66", "bad", REFUSED_BACKEND)),
            "service-added",
            "service-quarantined",
        )
        assert added["services"] == quarantined["services"] == ["bad"]
        assert quarantined["cause"] == "kernel"
        assert REFUSAL in quarantined["reason"]
    reloaded, readmitted = story.makes(lambda: story.ask("POST", "reload"), "reloaded", "service-readmitted")
    assert (reloaded["cause"], readmitted["services"]) == (ME, ["bad"])


def test_a_write_that_fails_and_the_one_that_works_again(story: Story) -> None:
    with story.tools.being("broken"):
        _, failed = story.makes(story.file("bad.yaml").unlink, "service-removed", "apply-failed")
        assert (failed["cause"], failed["level"]) == ("kernel", "error")
        assert "broken by the test" in failed["reason"]
    story.node.wait_for(lambda: story.node.get("status")["state"] == "in-sync")
    (recovered,) = story.new()
    assert recovered["event"] == "apply-recovered"
    assert "broken by the test" in recovered["reason"]


def test_a_source_that_goes_and_comes_back(story: Story) -> None:
    away = story.node.services_dir.with_name("away")
    # A file that comes parts what was deleted before it from what vanishes then.
    story.makes(
        lambda: story.node.declare("new.yaml", block("10.96.0.54", "new", "10.244.0.5")), "service-added"
    )
    failed = story.makes(lambda: story.node.services_dir.rename(away), *2 * ["source-failed"])
    assert {event["cause"] for event in failed} == {f"file {story.node.services_dir}"}
    assert {event["reason"].partition(";")[0].partition(":")[0] for event in failed} == {
        "there is no such directory",
        "2 files are gone, and their services go on serving",
    }
    (mended,) = story.makes(lambda: away.rename(story.node.services_dir), "source-mended")
    assert mended["cause"] == f"file {story.node.services_dir}"
    story.makes(story.file("new.yaml").unlink, "service-removed")


def test_many_at_once_are_one_event(story: Story) -> None:
    many = [block(f"10.97.0.{n}", f"s{n}", "10.244.0.5") for n in range(1, 61)]
    (bulk,) = story.makes(lambda: story.node.declare("many.yaml", *many), "services-changed")
    assert bulk["reason"] == "60 added, 0 changed, 0 removed"
    assert bulk["cause"] == f"file {story.file('many.yaml')}"
    assert len(bulk["services"]) == 60
    story.makes(story.file("many.yaml").unlink, "services-changed")


def test_a_check_that_fails_is_an_event_of_the_backend(story: Story) -> None:
    for arguments in ("link set lo up", "address add 10.244.9.9/32 dev lo"):
        story.node.tool("ip", *arguments.split())  # whoever connects there is refused
    checked = block("10.96.0.77", "checked", "10.244.9.9").replace(
        "name: checked", "name: checked, check: {type: tcp, port: 9, interval: 1s, timeout: 1s, fall: 1}"
    )
    _, unhealthy = story.makes(
        lambda: story.node.declare("checked.yaml", checked), "service-added", "backend-health"
    )
    assert (unhealthy["services"], unhealthy["backends"]) == (["checked"], ["10.244.9.9:9"])
    assert unhealthy["cause"] == "check tcp"
    assert unhealthy["reason"].startswith("unhealthy: ")
    story.makes(story.file("checked.yaml").unlink, "service-removed")


def followers(node: ConfiguredHost) -> int:
    """How many connections there are to the daemon's socket."""
    connected = node.tool("ss", "-Hxn", "state", "established", "src", str(node.socket))
    return len(connected.splitlines())


class Tail:
    """`vipctl events -f` as a process that writes to a file: first the last event of all, then what comes."""

    def __init__(self, story: Story, path: Path) -> None:
        self.path = path
        argv = story.node.argv(
            "events",
            "-f",
            "-n",
            "1",
            "-o",
            "json",
            "--socket",
            str(story.node.socket),
            module="vipd.cli.main",
        )
        with path.open("w") as out, path.with_suffix(".err").open("w") as err:
            self.process = subprocess.Popen(argv, stdout=out, stderr=err)

    def events(self) -> list[Json]:
        """The whole lines."""
        return [json.loads(line) for line in self.path.read_text().split("\n")[:-1]]

    def interrupt(self) -> tuple[int, str]:
        """Ctrl-C; the exit code and what was said."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(PATIENCE_SECONDS), self.path.with_suffix(".err").read_text()


def test_followers_see_events_live_and_over_a_restart_without_loss_or_doubles(
    story: Story, tmp_path: Path
) -> None:
    (first,) = story.node.get("events?limit=1")["events"]
    tails = [Tail(story, tmp_path / name) for name in ("one", "two")]
    try:
        story.node.wait_for(lambda: all(tail.events() == [first] for tail in tails))
        assert followers(story.node) == 2
        story.node.declare("late.yaml", block("10.96.0.80", "late", "10.244.0.5"))
        story.node.wait_for(lambda: all(len(tail.events()) > 1 for tail in tails))
        assert story.node.end(signal.SIGTERM) == 0
        story.node.declare("late.yaml", block("10.96.0.80", "late", "10.244.0.6"))
        story.node.start()
        story.vipctl("remove", "nothing")
        story.ask("POST", "reload")
        story.node.wait_for(lambda: all(tail.events()[-1]["event"] == "reloaded" for tail in tails))
        expected = ["service-added", "stopped", "started", "services-loaded", "reloaded"]
        kept = story.node.get(f"events?after={first['id']}")["events"]
        assert [event["event"] for event in kept] == expected
        assert [event["cause"] for event in kept if event["event"] == "stopped"] == ["signal SIGTERM"]
        for tail in tails:
            assert tail.events() == [first, *kept]
            code, said = tail.interrupt()
            assert code == 130
            assert said in ("", "vipctl: vipd is away; waiting for it\n")
        story.node.wait_for(lambda: followers(story.node) == 0)
    finally:
        for tail in tails:
            if tail.process.poll() is None:
                tail.process.kill()
                tail.process.wait()


def test_a_killed_daemon_has_kept_its_events(story: Story) -> None:
    story.new()
    order = {"address": "10.244.0.11", "admin": "disabled"}
    story.makes(lambda: story.ask("POST", "overrides", order), "override-given")
    kept = story.node.get("events")["events"]
    story.node.wait_for(lambda: str(kept[-1]["id"]) in cached(story.node.state_dir, "event"))
    story.node.end(signal.SIGKILL)
    story.node.start()
    after = story.node.get("events?limit=1000")["events"]
    assert after[: len(kept)] == kept
    assert [event["event"] for event in after[len(kept) :]] == ["started", "services-loaded"]


def test_sighup_is_the_cause_of_its_reload(story: Story) -> None:
    story.new()
    process = story.node.process
    assert process is not None
    (reloaded,) = story.makes(lambda: process.send_signal(signal.SIGHUP), "reloaded")
    assert reloaded["cause"] == "signal SIGHUP"


def test_vipctl_shows_them_and_describe_ends_with_those_of_the_service(story: Story) -> None:
    shown = story.vipctl("events", "--service", "web", "--since", "10m", "-n", "2").stdout.splitlines()
    assert len(shown) == 2
    assert "override-given        web/10.244.0.11: disabled; by " + ME in shown[-1]
    described = story.vipctl("describe", "web").stdout.splitlines()
    at = described.index("Events")
    kinds = [line.split()[1] for line in described[at + 1 :]]
    # Those of its file and of its backends' addresses belong to it, too.
    assert kinds == [
        "override-given",
        "override-ended",
        "declaration-refused",
        "declaration-accepted",
        "override-given",
    ]
    assert re.match(r"  \d+m?\d*s +override-given +10.244.0.11: disabled; by user root", described[-1])
    refused = story.vipctl("events", "--since", "soon")
    assert refused.returncode == 2
    nothing = story.vipctl("events", "--service", "web", "-n", "0")
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (0, "", "no events\n")
