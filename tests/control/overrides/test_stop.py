"""vipd that stops answers those who wait for the kernel, and `drain --wait` goes on across a restart."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.api.daemon_process import PATIENCE_SECONDS, ConfiguredHost, host
from tests.api.specs import DNS, WEB
from tests.host.systemd.manager import Tools
from tests.lab.stored import stored

pytestmark = pytest.mark.root

PLACE = {"service": "web", "backend": "10.244.0.7"}
OTHER = {**WEB, "name": "other", "address": "10.96.0.12"}
WAITING: tuple[tuple[str, str, object], ...] = (
    ("POST", "services", {"service": DNS}),
    ("PATCH", "services/web", {"service": {"affinity": "client-ip"}}),
    ("DELETE", "services/other", None),
    ("POST", "services/web/backends", {"backends": ["10.244.0.8"]}),
    ("PATCH", "services/web/backends/10.244.0.7", {"weight": 7}),
    ("POST", "apply", {"services": [{**WEB, "name": "third", "address": "10.96.0.13"}]}),
    ("POST", "overrides", {**PLACE, "admin": "draining"}),
    ("POST", "reload", None),
)


@contextmanager
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ConfiguredHost, Tools]]:
    """A running daemon, and the programs that it writes rules with, which can hang."""
    with host() as node:
        tools = Tools(node.root / "tools")
        monkeypatch.setenv("PATH", f"{tools.directory}:{os.environ['PATH']}")
        node.settings["dataplane"] = "iptables"
        node.start()
        assert node.ask("POST", "services", {"service": WEB})[1]["applied"]
        yield node, tools


def test_whoever_waits_for_a_write_is_answered_when_vipd_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    with hanging(monkeypatch) as (node, tools), ThreadPoolExecutor(len(WAITING)) as pool:
        assert node.ask("POST", "services", {"service": OTHER})[1]["applied"]
        before = tools.calls()
        tools.set("hanging")
        asked = [pool.submit(node.ask, *request) for request in WAITING]
        node.wait_for(lambda: tools.calls() > before)
        node.wait_for(lambda: "third" in stored(node.state_dir))
        assert not any(answer.done() for answer in asked)
        assert node.end(signal.SIGTERM) == 0
        for request, answer in zip(WAITING, asked, strict=True):
            status, body = answer.result(PATIENCE_SECONDS)
            assert (status, body["applied"]) == (200, False), (request, body)
            assert "vipd is stopping" in body["message"], request
        tools.unset("hanging")


def test_vipctl_add_is_answered_at_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    with hanging(monkeypatch) as (node, tools):
        before = tools.calls()
        tools.set("hanging")
        words = ("add", "10.96.0.9:80", "10.244.0.9", "--name", "new")
        argv = node.argv("--socket", str(node.socket), *words, module="vipd.cli.main")
        adding = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        node.wait_for(lambda: tools.calls() > before)
        assert node.end(signal.SIGTERM) == 0
        out, err = adding.communicate(timeout=PATIENCE_SECONDS)
        tools.unset("hanging")
        assert adding.returncode == 1, (out, err)
        assert "stored" in err
        assert "vipd is stopping" in err
        node.start()
        assert "new" in node.names()


def test_a_drain_that_waits_goes_on_across_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    with hanging(monkeypatch) as (node, tools):
        before = tools.calls()
        tools.set("hanging")
        argv = node.argv(
            "--socket", str(node.socket), "drain", "web/10.244.0.7", "--wait", module="vipd.cli.main"
        )
        draining = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        node.wait_for(lambda: tools.calls() > before)
        assert node.end(signal.SIGTERM) == 0
        assert draining.poll() is None
        node.begin()
        node.wait_for(lambda: node.get("status")["state"])
        assert draining.poll() is None, "the kernel does not have the drain yet"
        tools.unset("hanging")
        out, err = draining.communicate(timeout=PATIENCE_SECONDS)
        assert (draining.returncode, err.splitlines()[-1]) == (0, "no flows left"), (out, err)
