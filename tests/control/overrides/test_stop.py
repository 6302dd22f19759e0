"""vipd that stops answers those who wait for the kernel, and `drain --wait` goes on across a restart."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.api.daemon_process import PATIENCE_SECONDS, ConfiguredHost, host
from tests.api.serving import DNS, WEB, Answer, Api, served
from tests.host.systemd.manager import Tools

PLACE = {"service": "web", "backend": "10.244.0.7"}
WAITING: tuple[tuple[str, str, object], ...] = (
    ("POST", "/v1/services", {"service": DNS}),
    ("PATCH", "/v1/services/web", {"service": {"backends": ["10.244.0.8"]}}),
    ("DELETE", "/v1/services/web", None),
    ("POST", "/v1/services/web/backends", {"backends": ["10.244.0.8"]}),
    ("DELETE", "/v1/services/web/backends", {"backends": ["10.244.0.7"]}),
    ("PATCH", "/v1/services/web/backends/10.244.0.7", {"weight": 7}),
    ("POST", "/v1/apply", {"services": [WEB, DNS]}),
    ("POST", "/v1/overrides", {**PLACE, "admin": "draining"}),
    ("DELETE", "/v1/overrides", {"all": True}),
)


@pytest.mark.parametrize(("method", "path", "body"), WAITING, ids=lambda part: str(part)[:40])
def test_a_write_that_waits_is_answered_when_vipd_stops(method: str, path: str, body: object) -> None:
    async def story(api: Api) -> None:
        await api.add(WEB)
        if path == "/v1/overrides" and method == "DELETE":
            await api.ask("POST", path, {"address": "10.244.0.7", "weight": 2})
        api.dataplane.gate = asyncio.Event()
        api.dataplane.entered.clear()
        asked: asyncio.Task[Answer] = asyncio.create_task(api.ask(method, path, body))
        await api.until(api.dataplane.entered.is_set)
        assert not asked.done()
        await api.reconciler.stop_waiting()
        answered = await asked
        assert answered.status == 200
        assert (answered.body["changed"], answered.body["applied"]) == (True, False)
        assert "vipd is stopping" in answered.body["message"]
        late = await api.add({**WEB, "name": "late", "address": "10.96.0.12"})
        assert late.body["applied"] is False, "nor does a later one wait"
        assert (await api.ask("DELETE", "/v1/overrides", {"all": True})).body["applied"] is False
        flows = await api.ask("GET", "/v1/flows?service=web&backend=10.244.0.7")
        assert flows.kind == "busy", "what the kernel has does not follow orders any more"
        api.dataplane.gate.set()

    served(story)


def test_a_reload_that_waits_is_answered_when_vipd_stops() -> None:
    async def story(api: Api) -> None:
        await api.add(WEB)
        api.dataplane.gate = asyncio.Event()
        api.dataplane.entered.clear()
        adding = asyncio.create_task(api.add(DNS))
        await api.until(api.dataplane.entered.is_set)
        begun = api.begun
        asked = asyncio.create_task(api.ask("POST", "/v1/reload"))
        await api.until(lambda: api.begun > begun)
        await api.reconciler.stop_waiting()
        assert "vipd is stopping" in (await asked).body["message"]
        assert "vipd is stopping" in (await adding).body["message"]
        api.dataplane.gate.set()

    served(story)


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


@pytest.mark.root
def test_vipctl_add_is_answered_at_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    with hanging(monkeypatch) as (node, tools):
        before = tools.calls()
        tools.set("hanging")
        argv = node.argv(
            "--socket",
            str(node.socket),
            "add",
            "10.96.0.9:80",
            "10.244.0.9",
            "--name",
            "new",
            module="vipd.cli.main",
        )
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


@pytest.mark.root
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
