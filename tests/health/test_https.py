"""TLS: what is trusted, under which name, and what is told when it is not."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.health.servers import ask_once, run, target, tcp_server
from vipd.health.probes.http import probe_http
from vipd.health.probes.tls import tls_context
from vipd.health.result import ProbeResult, one_line
from vipd.model.check import HttpProbe

NAME = "shop.example"


@dataclass(frozen=True)
class Certificate:
    """Self-signed: a server's and its own authority's."""

    path: Path
    context: ssl.SSLContext


def openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def make(root: Path, name: str, days: int, names: str) -> Certificate:
    path, key = root / f"{name}.pem", root / f"{name}.key"
    what = ["-days", str(max(days, 1)), "-subj", f"/CN={name}", "-addext", f"subjectAltName={names}"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    argv = ["req", "-x509", *curve, "-keyout", str(key), "-out", str(path), *what]
    openssl(*argv)
    if days < 0:  # a request takes no such number, a renewal does
        openssl("x509", "-in", str(path), "-signkey", str(key), "-days", str(days), "-out", str(path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, key)
    return Certificate(path, context)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make(tmp_path_factory.mktemp("tls"), "good", 2, f"DNS:{NAME},IP:127.0.0.1")


@pytest.fixture(scope="module")
def expired(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make(tmp_path_factory.mktemp("tls"), "expired", -1, f"DNS:{NAME}")


def probe(server: Certificate, check: HttpProbe, seen: list[str | None] | None = None) -> ProbeResult:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nX-Vipd-Weight: 9\r\n\r\n")
        await asyncio.sleep(300)

    def note(_: ssl.SSLObject, name: str | None, __: ssl.SSLContext) -> None:
        if seen is not None:
            seen.append(name)

    async def ask() -> ProbeResult:
        server.context.sni_callback = note
        async with tcp_server(handler, server.context) as port:
            return await ask_once(probe_http, target(port, check))

    return run(ask())


def test_a_trusted_certificate_for_the_name_is_good(good: Certificate) -> None:
    seen: list[str | None] = []
    result = probe(good, HttpProbe(tls=True, ca=str(good.path), server_name=NAME), seen)
    assert result.good
    assert result.weight == (9, False)
    assert seen == [NAME]


def test_the_name_is_that_of_the_host_or_the_address(good: Certificate) -> None:
    assert probe(good, HttpProbe(tls=True, ca=str(good.path), host=f"{NAME}:443")).good
    assert probe(good, HttpProbe(tls=True, ca=str(good.path))).good


def test_a_stranger_is_bad(good: Certificate) -> None:
    result = probe(good, HttpProbe(tls=True, server_name=NAME))
    assert (result.good, result.reason) == (False, "certificate not valid: self-signed certificate")


def test_another_name_is_bad(good: Certificate) -> None:
    result = probe(good, HttpProbe(tls=True, ca=str(good.path), server_name="other.example"))
    assert result.good is False
    assert result.reason.startswith("certificate not valid: Hostname mismatch")


def test_an_expired_one_is_bad(expired: Certificate) -> None:
    result = probe(expired, HttpProbe(tls=True, ca=str(expired.path), server_name=NAME))
    assert (result.good, result.reason) == (False, "certificate not valid: certificate has expired")


def test_unverified_any_will_do(expired: Certificate) -> None:
    assert probe(expired, HttpProbe(tls=True, verify=False, server_name="other.example")).good


def test_a_server_without_tls_is_bad() -> None:
    async def ask() -> ProbeResult:
        async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(10)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await asyncio.sleep(300)

        async with tcp_server(plain) as port:
            return await ask_once(probe_http, target(port, HttpProbe(tls=True, verify=False)))

    result = run(ask())
    assert (result.good, result.reason) == (False, "TLS failed: wrong version number")


def test_a_handshake_that_hangs_times_out() -> None:
    async def ask() -> ProbeResult:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(300)

        async with tcp_server(silent) as port:
            return await ask_once(probe_http, target(port, HttpProbe(tls=True), 1.0))

    tls_context(HttpProbe(tls=True))  # kept from here on: reading what the host trusts takes its time
    assert run(ask()).reason == "timeout after 1 s while setting up TLS"


def test_a_ca_file_that_is_gone_blames_no_backend(good: Certificate, tmp_path: Path) -> None:
    result = probe(good, HttpProbe(tls=True, ca=str(tmp_path / "none.pem"), server_name=NAME))
    assert result.good is None
    assert result.reason == one_line(f"cannot be asked: {tmp_path}/none.pem: No such file or directory")


def test_a_ca_file_that_is_replaced_counts_at_once(
    good: Certificate, expired: Certificate, tmp_path: Path
) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_bytes(expired.path.read_bytes())
    check = HttpProbe(tls=True, ca=str(ca), server_name=NAME)
    assert not probe(good, check).good
    ca.write_bytes(good.path.read_bytes())
    os.utime(ca, (1, 1))  # a clock that ticks slowly may give both files one time
    assert probe(good, check).good


def test_a_server_cannot_choose_a_key_exchange_that_takes_long(good: Certificate) -> None:
    """With a group of 8192 bits a handshake would hold the event loop for a hundred milliseconds."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listen = ["s_server", "-accept", f"127.0.0.1:{port}", "-naccept", "2", "-groups", "ffdhe8192", "-www"]
    keys = ["-cert", str(good.path), "-key", str(good.path.with_suffix(".key"))]
    server = subprocess.Popen(["openssl", *listen, *keys], stdout=subprocess.PIPE, text=True)

    async def ask() -> ProbeResult:
        return await ask_once(probe_http, target(port, HttpProbe(tls=True, verify=False)))

    try:
        assert server.stdout is not None
        while "ACCEPT" not in server.stdout.readline():
            assert server.poll() is None
        result = run(ask())
        assert (result.good, result.reason.startswith("TLS failed: ")) == (False, True)
    finally:
        server.kill()
        server.communicate()


def test_a_server_of_tls_1_2_is_good(good: Certificate) -> None:
    good.context.maximum_version = ssl.TLSVersion.TLSv1_2
    try:
        assert probe(good, HttpProbe(tls=True, ca=str(good.path))).good
    finally:
        good.context.maximum_version = ssl.TLSVersion.MAXIMUM_SUPPORTED
