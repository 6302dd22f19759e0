"""Sends a DNS query over UDP, and checks the answer."""

from __future__ import annotations

import asyncio
import secrets
from typing import cast

from vipd.health.probes.base import ProbeContext
from vipd.health.probes.udp import MOST_ANSWER, connected
from vipd.health.result import ProbeResult
from vipd.host.dns_message import MalformedError, Reply, encode_query, read_reply, same_record
from vipd.model.check import DnsProbe

MOST_OTHERS = 100
"""Answers to other queries that are passed over."""
_MOST_SHOWN = 2


async def probe_dns(asking: ProbeContext) -> ProbeResult:
    """Probe a target that has a DnsProbe. Raises OSError for a network error.

    Datagrams that do not answer this query are ignored, as by a resolver, up to the timeout or a maximum
    number.
    """
    probe = cast("DnsProbe", asking.target.probe)
    loop = asyncio.get_running_loop()
    began = loop.time()
    asking.doing = "while waiting for the answer"
    number = secrets.randbelow(1 << 16)
    try:
        query = encode_query(number, probe.query, probe.type)
    except ValueError as error:
        return ProbeResult.not_probed(str(error))
    with connected(asking.target.address, asking.target.port) as connection:
        connection.send(query)
        for _ in range(MOST_OTHERS + 1):
            data = await loop.sock_recv(connection, MOST_ANSWER)
            try:
                reply = read_reply(data, query)
            except MalformedError as error:
                return ProbeResult.failure(f"no DNS: {error}", loop.time() - began)
            if reply is not None:
                return _judged(probe, reply, loop.time() - began)
            asking.doing = "with answers to other queries only"
            await asyncio.sleep(0)  # receiving does not wait while there is something to receive
        return ProbeResult.failure(f"more than {MOST_OTHERS} answers to other queries", loop.time() - began)


def _judged(probe: DnsProbe, reply: Reply, seconds: float) -> ProbeResult:
    if reply.rcode != probe.rcode:
        return ProbeResult.failure(reply.rcode, seconds)
    if not probe.answer or any(same_record(record.text, probe.answer) for record in reply.records):
        return ProbeResult.success(seconds)
    if reply.truncated:
        return ProbeResult.failure("the wanted record is not in the answer, which is truncated", seconds)
    shown = ", ".join(record.text for record in reply.records[:_MOST_SHOWN]) or "no record"
    more = ", …" if len(reply.records) > _MOST_SHOWN else ""
    return ProbeResult.failure(f"the answer is {shown}{more}", seconds)
