"""What a reload says that it came to."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tests.control.reconciling import DNS, WEB, IsolatedReconciler, looping
from tests.dataplane.fake_dataplane import broken_tool
from tests.host.systemd.manager import unit
from tests.model.samples import block, broken, declared, service
from vipd.control.reload import ReloadResult, reload
from vipd.control.service_status import RefusedUnit, what_serves
from vipd.declaration.unit import Unit
from vipd.model.service import Service


def reloaded(isolated: IsolatedReconciler, candidate: object = None, patience: float = 5) -> ReloadResult:
    """A reload of a isolated in which the source says something new meanwhile."""

    async def rescan() -> None:
        if candidate is not None:
            isolated.source.candidate = candidate  # type: ignore[assignment]  # a Declaration

    async def run() -> ReloadResult:
        async with looping(isolated):
            await isolated.reconciler.wait_synced(isolated.reconciler.request_sync(), 5)
            return await reload(rescan, isolated.dataplane, isolated.reconciler, (isolated.source,), patience)

    return asyncio.run(run())


def test_what_is_not_as_before_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    changed = service("web", "10.96.0.77")
    said = reloaded(IsolatedReconciler(DNS, WEB), declared(changed, service("new", "10.96.0.78")))
    assert said.actions == {"dns": "removed", "web": "changed", "new": "created"}
    assert (said.fault, said.problems) == ("", ())
    assert "reloaded: 2 services, 1 created, 1 changed, 1 removed" in caplog.messages


def test_problems_are_told_and_what_served_serves(caplog: pytest.LogCaptureFixture) -> None:
    isolated = IsolatedReconciler(DNS)
    said = reloaded(isolated, broken("/etc/vipd/x.yaml"))
    assert len(said.problems) == 1
    assert isolated.names() == {"dns"}
    (told,) = [
        r for r in caplog.records if r.message.startswith("reloaded: 1 service, none changed; problems: 1")
    ]
    assert told.levelno == logging.WARNING
    assert "/etc/vipd/x.yaml:3" in told.message


OWN = service("dns", "10.96.0.10", "/etc/vipd/x.yaml")


@pytest.mark.parametrize(
    ("known", "said"),
    [((OWN,), "the last good version of the file serves on"), ((), "nothing of the file serves")],
)
def test_the_log_says_what_serves_of_what_is_refused(
    known: tuple[Service, ...], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    isolated = IsolatedReconciler(*known)
    isolated.source.unit = "file:/etc/vipd/x.yaml"
    reloaded(isolated, broken("/etc/vipd/x.yaml"))
    told = next(message for message in caplog.messages if message.startswith("reloaded: "))
    assert f"problems: 1, {said}: /etc/vipd/x.yaml:3" in told


def test_of_several_refused_units_it_is_counted_what_serves() -> None:
    one = Unit(declared(DNS), declared(DNS))
    two = Unit(declared(DNS, WEB), declared(DNS, WEB))
    whole, part = RefusedUnit("file:/a", one, 1), RefusedUnit("file:/b", two, 1)
    nothing = RefusedUnit("etcd:/c", one, 0)
    assert what_serves([]) == ""
    assert what_serves([part]) == "1 of 2 services of the file serve"
    assert what_serves([whole, whole]) == "the last good versions go on serving"
    assert what_serves([nothing, nothing]) == "nothing of what is refused serves"
    assert what_serves([whole, part, nothing]) == (
        "of 3 refused files and keys serve 1 in the last good version, 1 in part, 1 not at all"
    )


def test_a_kernel_that_does_not_take_it_is_told() -> None:
    isolated = IsolatedReconciler(DNS)
    isolated.dataplane.failures = [broken_tool() for _ in range(9)]
    assert "it said no" in reloaded(isolated, declared(DNS, WEB)).fault


def test_a_kernel_that_does_not_answer_is_not_waited_for_for_ever() -> None:
    isolated = IsolatedReconciler(DNS)
    isolated.dataplane.gate = asyncio.Event()

    async def run() -> ReloadResult:
        async with looping(isolated):

            async def nothing() -> None: ...

            return await reload(nothing, isolated.dataplane, isolated.reconciler, (isolated.source,), 0.2)

    assert "vipd goes on trying" in asyncio.run(run()).fault


@pytest.mark.root
def test_vipctl_reload_says_what_was_done_or_refused() -> None:
    with unit() as node:
        node.declare("dns.yaml", block("10.96.0.10", "dns", "10.244.0.5"))
        node.start()
        done = node.vipctl("reload")
        kernel = "the kernel has the rules of every source\n"
        assert (done.returncode, done.stdout) == (0, f"reloaded: 1 service, none changed; {kernel}")
        node.write("dns.yaml", "apiVersion: vipd/v1\nservices:\n  - {address: 10.0.0.300}\n")
        node.write("more.yaml", "nonsense")
        refused = node.vipctl("reload")
        assert refused.returncode == 1
        assert "dns.yaml:3" in refused.stderr
        assert "more.yaml" in refused.stderr
        assert "of 2 refused files and keys serve 1 in the last good version, 1 not at all" in refused.stderr
        assert node.names() == {"dns"}
        assert "10.96.0.10" in node.rules()
