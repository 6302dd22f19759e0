"""Endpoints that listen but have no gateway for us. The last four are fakes: no etcd of Debian does so."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from random import Random

import pytest

from tests.sources.etcd.members import cluster
from vipd.host.settings.etcd import EtcdSettings
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.errors import EndpointError, GatewayOffError, VersionError
from vipd.sources.etcd.messages import KeyRange

GRPC_SETTINGS = bytes.fromhex("000006040000000000000500004000")
"""The first frame of a gRPC server, and then it hangs up."""


async def fault_at(*urls: str) -> EndpointError:
    client = EtcdClient(EtcdSettings(urls, timeout=30.0), Random(1))
    try:
        with pytest.raises(EndpointError) as told:
            await client.get(b"a")
        with pytest.raises(type(told.value)):
            async with client.watch(KeyRange(b"a"), 1):
                pass
        return told.value
    finally:
        await client.close()


async def fault_of_answer(version: bytes, other: bytes) -> EndpointError:
    """The fault at a server that answers `GET /version` so, and everything else so."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        await reader.readexactly(int(length[1]) if length else 0)  # what is not read would end in a reset
        writer.write(version if head.startswith(b"GET /version") else other)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        return await fault_at(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


def http(status: str, body: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


def test_a_gateway_that_is_off(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, ["--enable-grpc-gateway=false"]) as etcd:
        error = asyncio.run(fault_at(etcd.urls[0]))
        assert isinstance(error, GatewayOffError)
        assert "with its JSON gateway off; hint: start etcd with --enable-grpc-gateway" in str(error)
        error = asyncio.run(fault_at(etcd.members[0].peer))
        assert isinstance(error, GatewayOffError)


def test_a_version_that_is_too_old() -> None:
    missing = http("404 Not Found", "404 page not found")
    error = asyncio.run(fault_of_answer(http("200 OK", '{"etcdserver": "3.3.27"}'), missing))
    assert isinstance(error, VersionError)
    assert "is etcd 3.3.27: 3.4 or later is needed" in str(error)


def test_a_server_that_is_no_etcd() -> None:
    missing = http("404 Not Found", "nothing here")
    error = asyncio.run(fault_of_answer(missing, missing))
    assert isinstance(error, GatewayOffError)
    assert "is no etcd client port (answers HTTP 404: nothing here)" in str(error)


def test_a_redirection_is_not_followed() -> None:
    """It would take the token elsewhere."""
    moved = b"HTTP/1.1 307 Moved\r\nLocation: /elsewhere\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    error = asyncio.run(fault_of_answer(http("404 Not Found", ""), moved))
    assert isinstance(error, GatewayOffError)
    assert "answers HTTP 307" in str(error)


def test_a_port_for_grpc_alone() -> None:
    error = asyncio.run(fault_of_answer(GRPC_SETTINGS, GRPC_SETTINGS))
    assert isinstance(error, GatewayOffError)
    assert "--enable-grpc-gateway" in str(error)
    assert "--listen-client-http-urls" in str(error)
