"""Probes in a real worker process find what they find in this one; and what is no answer of a worker."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.health.servers import answer, ask_once, run, target, tcp_server, udp_server
from tests.health.test_https import NAME, Certificate, make
from vipd.health.probes.base import ProbeFunction
from vipd.health.probes.dns import probe_dns
from vipd.health.probes.http import probe_http
from vipd.health.probes.remote import RemoteProber, read_result, written_result
from vipd.health.result import ProbeResult, ReportedWeight
from vipd.host.worker import Worker
from vipd.model.check import DnsProbe, HttpProbe, Probe

NOBODY = 65534


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make(tmp_path_factory.mktemp("tls"), "good", 2, f"DNS:{NAME},IP:127.0.0.1")


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    status = b"200 OK" if head.startswith(b"PUT /well HTTP") and b"Host: web\r\n" in head else b"500 No"
    writer.write(b"HTTP/1.1 %s\r\nX-Vipd-Weight: 50%%\r\n\r\nall is well" % status)
    await writer.drain()
    writer.close()


def test_the_worker_finds_what_this_process_finds(certificate: Certificate, tmp_path: Path) -> None:
    private = tmp_path / "ca.pem"
    private.write_bytes(certificate.path.read_bytes() + certificate.path.with_suffix(".key").read_bytes())
    private.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(private, NOBODY, NOBODY)  # the worker has no right to read it
    asked = HttpProbe(method="PUT", path="/well", host="web", status=((200, 200),), body="all .* well")
    secure = HttpProbe(tls=True, ca=str(private), server_name=NAME, status=((500, 500), (200, 204)))

    async def both(probe: Probe, ask: ProbeFunction, port: int, worker: Worker) -> list[ProbeResult]:
        where = target(port, probe)
        return [await answer(RemoteProber(worker), where), await ask_once(ask, where)]

    async def story() -> None:
        worker = Worker()
        running = asyncio.create_task(worker.run())
        async with (
            tcp_server(answered) as plain,
            tcp_server(answered, certificate.context) as tls,
            udp_server(lambda _: [b"no DNS"]) as dns,
        ):
            gone = HttpProbe(tls=True, ca=str(tmp_path / "none.pem"))
            pairs = [
                await both(asked, probe_http, plain, worker),
                await both(HttpProbe(), probe_http, plain, worker),
                await both(HttpProbe(tls=True), probe_http, tls, worker),
                await both(secure, probe_http, tls, worker),
                await both(DnsProbe(query="web.internal"), probe_dns, dns, worker),
                await both(gone, probe_http, tls, worker),
            ]
        running.cancel()
        shown = [[(r.good, r.reason.partition(" in ")[0], r.weight) for r in pair] for pair in pairs]
        assert [remote for remote, _ in shown] == [own for _, own in shown]
        assert [remote[0] for remote, _ in shown] == [True, False, False, True, False, None]
        assert shown[0][0][2] == ReportedWeight(50, True)

    run(story())


@pytest.mark.parametrize(
    "result",
    [
        ProbeResult.success(0.1, ReportedWeight(9)),
        ProbeResult.failure("status 500", 0.2),
        ProbeResult.not_probed("no memory"),
    ],
)
def test_a_result_is_read_as_it_was_written(result: ProbeResult) -> None:
    assert read_result(written_result(result)) == result


@pytest.mark.parametrize(
    "garbage",
    [
        None,
        7,
        "fine",
        {},
        [],
        [True, "fine", 0.1],
        [1, "fine", 0.1, None],
        [True, None, 0.1, None],
        [True, "fine", "0.1", None],
        [True, "fine", float("nan"), None],
        [True, "fine", -1.0, None],
        [True, "fine", 1e9, None],
        [True, "fine", 0.1, 7],
    ],
)
def test_what_is_no_result_is_refused(garbage: object) -> None:
    with pytest.raises(ValueError, match="no result of a check"):
        read_result(garbage)


def test_text_of_the_worker_is_made_harmless() -> None:
    found = read_result([False, "\x1b[31m" + "x" * 1000, 0.1, "999999"])
    assert (found.reason.isprintable(), len(found.reason) <= 120, found.weight) == (True, True, None)
