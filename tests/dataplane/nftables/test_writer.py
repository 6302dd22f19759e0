"""Small changes go to the kernel without nft. What the kernel refuses is tried by nft, and what may be lost
is read again."""

from __future__ import annotations

import asyncio
import errno
import struct
import threading
from collections.abc import Callable

import pytest

from vipd.dataplane.base import ApplyError
from vipd.dataplane.nftables import writer
from vipd.dataplane.nftables.writer import ElementWriter
from vipd.host.netlink import ERROR, HEADER


class Kernel:
    """A socket that answers what it is told."""

    def __init__(
        self, *answers: int | OSError, sending: Callable[[bytes], None] = lambda batch: None
    ) -> None:
        self._answers, self._sending = list(answers), sending
        self.closed = False

    def sendto(self, batch: bytes, to: object) -> None:
        """Take a batch."""
        self._sending(batch)

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


def too_long(batch: bytes) -> None:
    raise OSError(errno.EMSGSIZE, "too long")


def test_the_answer_decides_whether_nft_is_asked() -> None:
    assert written(Kernel(0))
    assert not written(Kernel(errno.ENOENT, 0)), "the last message is acknowledged all the same"
    assert not written(Kernel(sending=too_long))


@pytest.mark.parametrize("kernel", [Kernel(), Kernel(OSError(errno.ENOBUFS, "lost"))], ids=["none", "lost"])
def test_an_answer_that_is_lost_is_no_fault_of_the_rules(kernel: Kernel) -> None:
    with pytest.raises(ApplyError, match="answer to a transaction is lost") as caught:
        written(kernel)
    assert not caught.value.rules_at_fault
    assert kernel.closed, "a late answer would be taken for that to the next transaction"


def test_a_kernel_that_hangs_holds_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """No transaction overtakes the one that hangs; the next was planned before that one was written."""
    go_on, order = threading.Event(), list[bytes]()

    def wait(batch: bytes) -> None:
        go_on.wait(60)
        order.append(batch)

    async def story() -> None:
        slow = ElementWriter(lambda: Kernel(0, 0, sending=wait))  # type: ignore[arg-type, return-value]
        monkeypatch.setattr(writer, "STALL_SECONDS", 0.01)
        for _ in range(2):
            with pytest.raises(ApplyError, match="the kernel hangs"):
                await slow.write(b"first")
        monkeypatch.setattr(writer, "STALL_SECONDS", 60.0)
        asyncio.get_running_loop().call_later(0.01, go_on.set)
        with pytest.raises(ApplyError, match="must be read again"):
            await slow.write(b"second")
        with pytest.raises(ApplyError, match="lost"):  # this kernel answers no more
            await slow.write(b"third")

    asyncio.run(story())
    assert order == [b"first", b"third"]
