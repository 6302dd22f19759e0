"""Reading a table from the kernel, over a netlink socket. It blocks: use it from a thread."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import NamedTuple

from vipd.dataplane.base import ApplyError
from vipd.dataplane.nftables import dump
from vipd.dataplane.nftables.compile import Slot
from vipd.dataplane.nftables.layout import HANDLERS, Holder
from vipd.dataplane.nftables.plan import FoundChain, Installed
from vipd.dataplane.programs import own_limit
from vipd.model.service import Family

NETLINK_NETFILTER = 12
RECEIVE_BYTES = 1 << 16
"""The kernel sends at most 32 KiB at once."""
SILENCE_SECONDS = 30.0
ATTEMPTS = 5
"""How often a reading that somebody's change disturbed is begun."""

_COMMENT_OF_SET = 7
"""NFTNL_UDATA_SET_COMMENT; comments of other objects have number 0."""
DORMANT, OWNED = 0x1, 0x2
"""Flags of tables: no packet meets its chains; no other process may change it."""
_ANONYMOUS = "__"
"""Sets within rules have such names."""

OpenSocket = Callable[[], socket.socket]

_FAMILIES = {1: "inet", 2: "ip", 10: "ip6", 7: "bridge", 5: "netdev"}


class BaseChain(NamedTuple):
    """A chain that packets enter by a hook."""

    family: str
    table: str
    name: str
    hook: int
    """2: forward; 1: input."""
    accepts: bool
    """Its policy; the other one is to drop."""


def open_netlink() -> socket.socket:
    """A socket of the network namespace that the calling thread is in. Raises OSError."""
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
    try:
        made.bind((0, 0))
    except BaseException:
        made.close()
        raise
    return made


class TableReader:
    """Reads one table of one family. A context manager; each method may raise ApplyError."""

    def __init__(
        self, family: Family | None, table: str = "", open_socket: OpenSocket = open_netlink
    ) -> None:
        """Without a family and a table only `base_chains` can be asked."""
        self._family, self._table = family, table
        self._sequence = 0
        try:
            self._socket = open_socket()
        except OSError as error:
            raise self._failed(error.errno or 0) from None
        self._socket.settimeout(SILENCE_SECONDS)

    def __enter__(self) -> TableReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def structure(self) -> Installed:
        """Everything besides the elements of services."""
        with self.understood():
            return self._structure()

    def _structure(self) -> Installed:
        tables = [t for t in self._dump(dump.GET_TABLE) if dump.text(t.get(1)) == self._table]
        if not tables:
            return Installed()
        found = Installed(dump.comment(tables[0].get(6)), self._holders())
        if found.holders.get(HANDLERS.name) == HANDLERS.digest(self._of):
            found.handlers = {slot.key: verdict for slot, verdict in self.elements([HANDLERS]).items()}
        rules: dict[str, list[str]] = {}
        for each in self._dump(dump.GET_RULE, self._table):
            if dump.text(each.get(1)) == self._table:
                rules.setdefault(dump.text(each.get(2)), []).append(dump.comment(each.get(7)))
        for each in self._dump(dump.GET_CHAIN):
            if dump.text(each.get(1)) == self._table:
                name = dump.text(each.get(3))
                found.chains[name] = FoundChain(_hook(each.get(4)), tuple(rules.get(name, ())))
        return found

    def _holders(self) -> dict[str, str]:
        """Digest of each map and set, but those within rules."""
        found = {}
        for each in self._dump(dump.GET_SET, self._table):
            name = dump.text(each.get(2))
            if dump.text(each.get(1)) == self._table and not name.startswith(_ANONYMOUS):
                found[name] = dump.comment(each.get(13), _COMMENT_OF_SET)
        return found

    def elements(self, holders: Collection[Holder]) -> dict[Slot, str]:
        """Every element of some holders, as they are written."""
        with self.understood():
            return {
                slot: value
                for holder in holders
                for message in self._messages(dump.GET_ELEMENTS, self._table, holder.name)
                for slot, value in dump.elements(message.attributes, holder, self._of)
            }

    def counters(self, holder: Holder) -> dict[tuple[str, ...], int]:
        """The counter of every element of a holder, by its key's fields."""
        with self.understood():
            return {
                tuple(dump.key_fields(dump.data_of(element, 1), holder.key, self._of)): dump.counted(element)
                for message in self._messages(dump.GET_ELEMENTS, self._table, holder.name)
                for element in dump.element_attributes(message.attributes)
            }

    def base_chains(self) -> list[BaseChain]:
        """Every chain of every table that packets enter by a hook."""
        with self.understood():
            chains = [(m.family, dump.attributes(m.attributes)) for m in self._messages(dump.GET_CHAIN)]
            return [
                BaseChain(
                    _FAMILIES.get(family, str(family)),
                    dump.text(each.get(1)),
                    dump.text(each.get(3)),
                    hook[0],
                    dump.number(each.get(5)) != 0,
                )
                for family, each in chains
                if (hook := _hook(each.get(4)))
            ]

    @contextlib.contextmanager
    def understood(self) -> Iterator[None]:
        """Within it an answer that is garbled is an ApplyError, like one that does not come."""
        try:
            yield
        except dump.MalformedDumpError as error:
            raise self._failed(0, f"the kernel's answer is not understood: {error}") from None

    def table_flags(self) -> dict[tuple[str, str], int]:
        """The flags of every table, by its family and name."""
        found = {}
        for message in self._messages(dump.GET_TABLE):
            each = dump.attributes(message.attributes)
            family = _FAMILIES.get(message.family, str(message.family))
            found[family, dump.text(each.get(1))] = dump.number(each.get(2))
        return found

    @property
    def _of(self) -> Family:
        assert self._family is not None  # noqa: S101 (a table was named, hence a family)
        return self._family

    def _dump(self, kind: int, table: str = "") -> Iterator[dict[int, bytes]]:
        for message in self._messages(kind, table):
            yield dump.attributes(message.attributes)

    def _messages(self, kind: int, table: str = "", holder: str = "") -> list[dump.Message]:
        for _ in range(ATTEMPTS):
            found = self._once(kind, table, holder)
            if found is not None:
                return found
        raise ApplyError(self._what, "it changes all the time")

    def _once(self, kind: int, table: str, holder: str) -> list[dump.Message] | None:
        """One reading; None when somebody's change disturbed it."""
        self._sequence += 1
        found: list[dump.Message] = []
        disturbed = done = False
        try:
            self._socket.send(dump.request(kind, self._family, self._sequence, table, holder))
            while not done:
                for message in dump.messages(self._socket.recv(RECEIVE_BYTES), self._sequence):
                    if message.error:
                        raise self._failed(message.error)
                    disturbed = disturbed or bool(message.flags & dump.INTERRUPTED)
                    done = done or message.kind == -dump.DONE
                    if message.kind >= 0:
                        found.append(message)
        except (OSError, dump.MalformedDumpError) as error:
            raise self._failed(getattr(error, "errno", 0) or 0, str(error)) from None
        return None if disturbed else found

    @property
    def _what(self) -> str:
        return f"cannot read the {self._family} table {self._table}" if self._table else "cannot read chains"

    def _failed(self, number: int, why: str = "") -> ApplyError:
        hint = own_limit(number)
        if number in (errno.EPERM, errno.EACCES):
            hint = "vipd needs root, or CAP_NET_ADMIN"
        if number in (errno.EPROTONOSUPPORT, errno.EOPNOTSUPP, errno.EINVAL):
            hint = "the kernel may lack nf_tables; load it: modprobe nf_tables"
        return ApplyError(self._what, why or os.strerror(number), hint)


def _hook(nested: bytes | None) -> tuple[int, int] | None:
    if nested is None:
        return None
    found = dump.attributes(nested)
    return dump.number(found.get(1)), dump.number(found.get(2))
