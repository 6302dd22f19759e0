"""Small changes go to the kernel without nft: what is encoded, what the kernel refuses, and what is lost."""

from __future__ import annotations

import asyncio
import errno
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.dataplane.declared import numbered
from tests.dataplane.nftables.programmed import Inside, Programmed
from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.watch import events, messages
from vipd.dataplane.iptables.watch.events import open_socket
from vipd.dataplane.iptables.watch.own_processes import OwnProcesses
from vipd.dataplane.iptables.watch.stream import WatchOptions
from vipd.dataplane.nftables import codec, writer
from vipd.dataplane.nftables.compile import ElementKey
from vipd.dataplane.nftables.layout import (
    FRONTENDS,
    NODE_PORTS,
    NUMBER_TO_IPV6,
    REPLY_FRONTENDS,
    FrontendKind,
    NftSet,
    allowed_sources,
)
from vipd.dataplane.nftables.watch import TableWatch
from vipd.dataplane.nftables.writer import ElementWriter
from vipd.host.netlink import ATTRIBUTES, ERROR, HEADER, attributes, split, text
from vipd.host.netlink_socket import Sockets
from vipd.host.process import ProgramResult
from vipd.model.service import Family

ONE = numbered(1, "10.244.0.1")
MOVED = numbered(1, "10.244.0.2")


class Kernel:
    """A socket that answers what it is told."""

    def __init__(self, *answers: int | OSError, refuses_to_send: bool = False) -> None:
        self._answers, self._refuses = list(answers), refuses_to_send
        self.sent, self.closed = 0, False

    def sendto(self, batch: bytes, to: object) -> None:
        """Take a batch."""
        if self._refuses:
            raise OSError(errno.EMSGSIZE, "too long")
        self.sent += 1

    def recvmsg(self, size: int) -> tuple[bytes, list[object], int, tuple[int, int]]:
        """The next answer: an error number."""
        if not self._answers:
            raise BlockingIOError
        answer = self._answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return HEADER.pack(36, ERROR, 0, 2, 0) + struct.pack("=i", -answer) + bytes(16), [], 0, (0, 0)

    def setblocking(self, blocking: bool) -> None:
        """Nothing to do."""

    def setsockopt(self, *option: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Remember it."""
        self.closed = True


def written(kernel: Kernel) -> bool:
    return asyncio.run(ElementWriter(lambda: kernel).write(b"batch"))  # type: ignore[arg-type, return-value]


def test_the_answer_decides_whether_nft_is_asked() -> None:
    assert written(Kernel(0))
    assert not written(Kernel(errno.ENOENT, 0)), "the last message is acknowledged all the same"
    assert not written(Kernel(refuses_to_send=True))

    def none_left() -> Kernel:
        raise OSError(errno.EMFILE, "too many open files")

    assert not asyncio.run(ElementWriter(none_left).write(b""))  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", [Kernel(), Kernel(OSError(errno.ENOBUFS, "lost"))], ids=["none", "lost"])
def test_an_answer_that_is_lost_is_no_fault_of_the_rules(kernel: Kernel) -> None:
    with pytest.raises(ApplyError, match="answer to a transaction is lost") as caught:
        written(kernel)
    assert not caught.value.rules_at_fault
    assert kernel.closed, "a late answer would be taken for that to the next transaction"


def test_a_kernel_that_hangs_holds_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """No transaction overtakes the one that hangs; the next was planned before that one was written."""
    go_on, order = threading.Event(), []

    def transact(opened: object, batch: bytes, echoes: list[bytes] | None) -> bool:
        go_on.wait(60)
        order.append(batch)
        return True

    async def story() -> None:
        slow = ElementWriter(Kernel)  # type: ignore[arg-type]
        monkeypatch.setattr(writer, "STALL_SECONDS", 0.01)
        for _ in range(2):
            with pytest.raises(ApplyError, match="the kernel hangs"):
                await slow.write(b"first")
        monkeypatch.setattr(writer, "STALL_SECONDS", 60.0)
        asyncio.get_running_loop().call_later(0.01, go_on.set)
        with pytest.raises(ApplyError, match="must be read again"):
            await slow.write(b"second")
        assert await slow.write(b"third")

    monkeypatch.setattr(writer, "_transact", transact)
    asyncio.run(story())
    assert order == [b"first", b"third"]


HOLDERS = (
    FRONTENDS,
    NODE_PORTS,
    NUMBER_TO_IPV6,
    REPLY_FRONTENDS,
    FrontendKind.NODE.endpoints,
    FrontendKind.ADDRESS.slot_endpoints,
    allowed_sources(24),
)
ELEMENTS = {
    Family.IPV4: {
        "frontends": [("10.96.0.1 . tcp . 80", "1.2.3.4"), ("10.96.0.1 . sctp . 65535", "255.0.0.1")],
        "node_ports": [("udp . 30080", "jump gate-node-random-3")],
        "reply_frontends": [("10.244.0.1 . 80", "203.0.113.1 . 8080")],
        "node_endpoints": [("tcp . 30080 . 0.0.0.2", "10.244.0.1 . 8080")],
        "allowed_24": [
            ("192.0.2.0 . 203.0.113.1 . tcp . 80", "drop"),
            ("0.0.0.0 . 1.1.1.1 . udp . 1", "goto a"),
        ],
    },
    Family.IPV6: {
        "frontends": [("fd00:96::1 . tcp . 80", "102:304::1")],
        "numbers": [("65537", "100::1:1"), ("0", "100::")],
        "picks": [("fd00:96::1 . udp . 53 . 100::2", "100::aa")],
    },
}


@pytest.mark.parametrize("family", Family)
def test_what_is_encoded_reads_as_it_was_written(family: Family) -> None:
    holders = {holder.name: holder for holder in HOLDERS}
    elements = {
        ElementKey(name, key): value for name, pairs in ELEMENTS[family].items() for key, value in pairs
    }
    many = {
        ElementKey("frontends", f"{next(iter(addresses(family, n)))} . tcp . {n + 1}"): "" for n in range(900)
    }
    batch = codec.element_batch("vipd", family, holders, many.items(), elements.items())
    assert batch.count(b"vipd\0") == 3 + len(ELEMENTS[family]), "900 elements do not fit into one message"
    found = [read(batch, start, end, holders, family) for *_, start, end in list(split(batch))[1:-1]]
    assert {slot: value for part in found for slot, value in part.items() if slot not in many} == elements
    assert many.keys() <= {slot for part in found for slot in part}
    acknowledged = [flags & 0x4 for _, flags, *_ in split(batch)]
    assert acknowledged == [*[0] * (len(acknowledged) - 2), 0x4, 0], "only the last message with elements"


def addresses(family: Family, number: int) -> Iterator[str]:
    yield f"10.9.{number // 250}.{number % 250}" if family is Family.IPV4 else f"fd00::{number + 1:x}"


def read(
    batch: bytes, start: int, end: int, holders: dict[str, NftSet], family: Family
) -> dict[ElementKey, str]:
    body = batch[start + ATTRIBUTES : end]
    name = text(attributes(body)[2])
    return dict(codec.elements(body, holders[name], family))


@pytest.mark.root
def test_a_small_change_runs_no_program(inside: Inside, tmp_path: Path) -> None:
    programs: list[str] = []

    async def run(argv: object, stdin: str) -> ProgramResult:
        programs.append(stdin)
        return await inside.run(argv, stdin)  # type: ignore[arg-type]

    programmed = Programmed(inside, tmp_path, run)
    programmed.become(ONE)
    assert programs
    programs.clear()
    programmed.become(MOVED)
    programmed.become(MOVED, numbered(2, "10.244.0.3"))
    programmed.become(MOVED)
    assert programs == []
    assert "10.244.0.2" in programmed.tables()
    assert "10.244.0.3" not in programmed.tables()
    programmed.restart()
    assert not programmed.plan(), "what is read equals what was written"
    programmed.become(
        replace(MOVED, addresses=("10.96.0.1", "fd00::1")), numbered(2, "10.244.0.3", "10.244.0.4")
    )
    assert programs, "a chain is written by nft"


@pytest.mark.root
def test_nft_writes_the_chains_of_a_load_and_no_element_of_a_service(inside: Inside, tmp_path: Path) -> None:
    texts: list[str] = []

    async def run(argv: list[str], stdin: str) -> ProgramResult:
        texts.extend([stdin] if argv == ["nft", "-f", "-"] else [])
        return await inside.run(argv, stdin)

    many = [replace(numbered(n, f"10.244.0.{n % 200 + 1}"), addresses=both(n)) for n in range(700)]
    programmed = Programmed(inside, tmp_path, run)  # type: ignore[arg-type]
    programmed.become(*many)
    assert len(texts) == 2, "one for each family"
    assert "10.244.0.1" not in "".join(texts)
    listed = programmed.tables()
    assert listed.count("10.244.0.1 . 8080") == 4
    programmed.restart()
    assert not programmed.plan(), "what is read equals what was written"


def both(number: int) -> tuple[str, str]:
    return f"10.96.{number // 250}.{number % 250 + 1}", f"fd00:96::{number + 1:x}"


@pytest.mark.root
def test_what_another_program_has_added_blames_nobody(inside: Inside, tmp_path: Path) -> None:
    """The kernel refuses an element that is there already, and vipd does not know of it."""
    programmed = Programmed(inside, tmp_path)
    programmed.become(ONE)
    inside.nft("add element ip vipd frontends { 10.96.0.8 . tcp . 80 : 1.2.3.4 }")
    programmed.become(MOVED, numbered(7, "10.244.0.1"))
    assert not programmed.dataplane.quarantined()
    written = programmed.tables()
    programmed.inside.nft("flush", "ruleset")
    programmed.restart()
    programmed.step()
    assert written == programmed.tables()


@pytest.mark.root
def test_own_elements_are_no_disturbance_and_are_not_read(
    inside: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = OwnProcesses(time.monotonic)
    read: list[str] = []

    def reading(*given: Any) -> Iterator[object]:
        for message in messages.read_messages(*given):
            read.append(type(message).__name__)
            yield message

    monkeypatch.setattr(events, "read_messages", reading)

    def opened() -> object:
        made = inside.open_socket()
        own.add_socket(made.getsockname()[0])
        return made

    async def watched() -> list[str]:
        async with TableWatch(Names("VIPD"), WatchOptions(own), lambda: listening) as watch:
            await programmed.dataplane.apply(await programmed.dataplane.plan())
            await asyncio.to_thread(inside.nft, "add element ip vipd claimed { 10.9.9.9 }")
            change = await asyncio.wait_for(anext(watch), 60)
            return [chain.name for _, chain in change.chains]

    programmed = Programmed(inside, tmp_path, sockets=Sockets(inside.open_socket, opened))  # type: ignore[arg-type]
    programmed.become(ONE)
    listening = inside.make(open_socket)
    programmed.declare([MOVED])
    assert asyncio.run(watched()) == ["claimed"], "only the foreign change"
    assert read.count("Change") == 1, "the ends of transactions are enough"
