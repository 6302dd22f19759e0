"""TLS: what is trusted, under which name, and what is told when it is not."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.health.servers import (
    Case,
    Handler,
    answers,
    beside,
    differing,
    healthy_and_reason,
    silent,
    tcp_server,
    verdict,
)

NAME = "shop.example"
NOBODY = 65534
WELL = answers(b"HTTP/1.1 200 OK\r\nX-Vipd-Weight: 9\r\n\r\n")


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
    openssl("req", "-x509", *curve, "-keyout", str(key), "-out", str(path), *what)
    if days < 0:  # a request takes no such number, a renewal does
        openssl("x509", "-in", str(path), "-signkey", str(key), "-days", str(days), "-out", str(path))
    return Certificate(path, server_context(path, key))


def server_context(path: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, key)
    return context


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make(tmp_path_factory.mktemp("tls"), "good", 2, f"DNS:{NAME},IP:127.0.0.1")


@pytest.fixture(scope="module")
def expired(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make(tmp_path_factory.mktemp("tls"), "expired", -1, f"DNS:{NAME}")


async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(10)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await asyncio.sleep(300)


@pytest.mark.parametrize("worker", [False, True])
def test_what_is_trusted_and_under_which_name(
    worker: bool, good: Certificate, expired: Certificate, tmp_path: Path
) -> None:
    """In vipd's own process, and in that which reads answers for a daemon."""
    tls12 = server_context(good.path, good.path.with_suffix(".key"))
    tls12.maximum_version = ssl.TLSVersion.TLSv1_2
    # That process has no right to read it.
    private = tmp_path / "private.pem"
    private.write_bytes(good.path.read_bytes() + good.path.with_suffix(".key").read_bytes())
    private.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(private, NOBODY, NOBODY)

    def case(
        seen: str, server: Certificate | ssl.SSLContext = good, handler: Handler = WELL, **keys: Any
    ) -> Case:
        return Case(handler, seen, keys, server.context if isinstance(server, Certificate) else server)

    trusted, expired_ca, none = str(good.path), str(expired.path), "/etc/none.pem"
    not_valid = "bad: certificate not valid: "
    cases = {
        "trusted": case("good", ca=trusted, server_name=NAME),
        "under the name of the host": case("good", ca=trusted, host=f"{NAME}:443"),
        "under the address": case("good", ca=trusted),
        "with a file that vipd alone may read": case("good", ca=str(private)),
        "TLS 1.2": case("good", tls12, ca=trusted),
        "a stranger": case(f"{not_valid}self-signed certificate", server_name=NAME),
        "another name": case(f"{not_valid}Hostname mismatch…", ca=trusted, server_name="other.example"),
        "expired": case(f"{not_valid}certificate has expired", expired, ca=expired_ca, server_name=NAME),
        "unverified": case("good", expired, verify=False, server_name="other.example"),
        "a bad answer": case("bad: status 200", ca=trusted, status=204),
        "no TLS": Case(plain, "bad: TLS failed: wrong version number", {"verify": False}),
        "no file of certificates": case(
            f"not asked: cannot be asked: {none}: No such file or directory", ca=none
        ),
    }
    assert differing(cases, worker=worker, type_="https") == {}


def test_the_server_is_told_the_name_and_says_its_weight(good: Certificate) -> None:
    names: list[str | None] = []

    def note(_: ssl.SSLObject, name: str | None, __: ssl.SSLContext) -> None:
        names.append(name)

    context = server_context(good.path, good.path.with_suffix(".key"))
    context.sni_callback = note
    with beside(tcp_server(WELL, context)) as port:
        found = verdict("https", port, ca=str(good.path), server_name=NAME)
    assert (found.healthy, found.weight, names) == (True, "9", [NAME])


def test_a_handshake_that_hangs_times_out() -> None:
    with beside(tcp_server(silent)) as port:
        found = healthy_and_reason("https", port, timeout="1s", verify=False)
    assert found == (False, "timeout after 1 s while setting up TLS")


def test_a_ca_file_that_is_replaced_counts_at_once(
    good: Certificate, expired: Certificate, tmp_path: Path
) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_bytes(expired.path.read_bytes())
    with beside(tcp_server(WELL, good.context)) as port:
        assert not verdict("https", port, ca=str(ca), server_name=NAME).healthy
        ca.write_bytes(good.path.read_bytes())
        os.utime(ca, (1, 1))  # a clock that ticks slowly may give both files one time
        assert verdict("https", port, ca=str(ca), server_name=NAME).healthy


def test_a_server_cannot_choose_a_key_exchange_that_takes_long(good: Certificate) -> None:
    """With a group of 8192 bits a handshake would hold the event loop for a hundred milliseconds."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listen = ["s_server", "-accept", f"127.0.0.1:{port}", "-naccept", "2", "-groups", "ffdhe8192", "-www"]
    keys = ["-cert", str(good.path), "-key", str(good.path.with_suffix(".key"))]
    server = subprocess.Popen(["openssl", *listen, *keys], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        while "ACCEPT" not in server.stdout.readline():
            assert server.poll() is None
        healthy, reason = healthy_and_reason("https", port, verify=False)
        assert (healthy, reason.startswith("TLS failed: ")) == (False, True)
    finally:
        server.kill()
        server.communicate()
