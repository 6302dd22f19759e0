"""Reading a table from the kernel, over a netlink socket. It blocks: use it from a thread."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Iterator, Mapping
from types import TracebackType
from typing import NamedTuple

from vipd.dataplane.base import ApplyError
from vipd.dataplane.engine import ObjectId
from vipd.dataplane.nftables import codec
from vipd.dataplane.nftables.codec import FAMILIES
from vipd.dataplane.nftables.layout import NftSet
from vipd.dataplane.programs import local_limit_hint
from vipd.host import netlink_socket
from vipd.host.netlink import MalformedMessageError, attributes, text
from vipd.host.netlink_socket import OpenSocket, read_whole
from vipd.model.service import Family

SILENCE_SECONDS = 30.0

_COMMENT_OF_SET = 7
"""NFTNL_UDATA_SET_COMMENT; comments of other objects have number 0."""
DORMANT, OWNED = 0x1, 0x2
"""Flags of tables: no packet enters its chains; no other process may change it."""
_ANONYMOUS = "__"
"""Sets within rules have such names."""


class BaseChain(NamedTuple):
    """A chain that packets enter by a hook."""

    family: str
    table: str
    name: str
    hook: int
    """2: forward; 1: input."""
    accepts: bool
    """Its policy; the other one is to drop."""


class ReadChain(NamedTuple):
    """A chain as read: its hook (number and priority), and the comments of its rules."""

    hook: tuple[int, int] | None
    rules: tuple[str, ...]


class Structure(NamedTuple):
    """A table as read, without elements."""

    comment: str | None
    """None: there is no table."""
    sets: Mapping[str, str]
    """The comment of each set and map, but those within rules."""
    chains: Mapping[str, ReadChain]


class TableReader:
    """Reads one table of one family. A context manager; each method may raise ApplyError."""

    def __init__(
        self, family: Family | None, table: str = "", open_socket: OpenSocket = netlink_socket.open_netlink
    ) -> None:
        """Without a family and a table only `base_chains` and `table_flags` work."""
        self._family, self._table = family, table
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

    def structure(self) -> Structure:
        """Everything besides the elements."""
        with self.understood():
            tables = [t for t in self._dump(codec.GET_TABLE) if text(t.get(1)) == self._table]
            if not tables:
                return Structure(None, {}, {})
            sets = {
                name: codec.comment(each.get(13), _COMMENT_OF_SET)
                for each in self._dump(codec.GET_SET, self._table)
                if text(each.get(1)) == self._table and not (name := text(each.get(2))).startswith(_ANONYMOUS)
            }
            rules: dict[str, list[str]] = {}
            for each in self._dump(codec.GET_RULE, self._table):
                if text(each.get(1)) == self._table:
                    rules.setdefault(text(each.get(2)), []).append(codec.comment(each.get(7)))
            chains = {
                name: ReadChain(_hook(each.get(4)), tuple(rules.get(name, ())))
                for each in self._dump(codec.GET_CHAIN)
                if text(each.get(1)) == self._table and (name := text(each.get(3)))
            }
            return Structure(codec.comment(tables[0].get(6)), sets, chains)

    def elements(self, holders: Collection[NftSet]) -> dict[ObjectId, str]:
        """Every element of some holders, as text."""
        with self.understood():
            return {
                slot: value
                for holder in holders
                for message in self._messages(codec.GET_ELEMENTS, self._table, holder.name)
                for slot, value in codec.elements(message.attributes, holder, self._of)
            }

    def counters(self, holder: NftSet) -> dict[tuple[str, ...], int]:
        """The counter of every element of a holder, by its key's fields."""
        with self.understood():
            return {
                tuple(codec.key_fields(codec.data_of(element, 1), holder.key, self._of)): codec.counted(
                    element
                )
                for message in self._messages(codec.GET_ELEMENTS, self._table, holder.name)
                for element in codec.element_attributes(message.attributes)
            }

    def base_chains(self) -> list[BaseChain]:
        """Every chain of every table that packets enter by a hook."""
        with self.understood():
            chains = [(m.family, attributes(m.attributes)) for m in self._messages(codec.GET_CHAIN)]
            return [
                BaseChain(
                    FAMILIES.get(family, str(family)),
                    text(each.get(1)),
                    text(each.get(3)),
                    hook[0],
                    codec.number(each.get(5)) != 0,
                )
                for family, each in chains
                if (hook := _hook(each.get(4)))
            ]

    @contextlib.contextmanager
    def understood(self) -> Iterator[None]:
        """Within it a malformed answer raises ApplyError, like a missing one."""
        try:
            yield
        except MalformedMessageError as error:
            raise self._failed(0, f"the kernel's answer is not understood: {error}") from None

    def table_flags(self) -> dict[tuple[str, str], int]:
        """The flags of every table, by its family and name."""
        found = {}
        for message in self._messages(codec.GET_TABLE):
            each = attributes(message.attributes)
            family = FAMILIES.get(message.family, str(message.family))
            found[family, text(each.get(1))] = codec.number(each.get(2))
        return found

    @property
    def _of(self) -> Family:
        assert self._family is not None  # noqa: S101 (a table was named, hence a family)
        return self._family

    def _dump(self, kind: int, table: str = "") -> Iterator[dict[int, bytes]]:
        for message in self._messages(kind, table):
            yield attributes(message.attributes)

    def _messages(self, kind: int, table: str = "", holder: str = "") -> list[codec.Answer]:
        try:
            return read_whole(
                self._socket,
                lambda sequence: codec.request(kind, self._family, sequence, table, holder),
                lambda datagram, answers: (codec.answer(datagram, *each) for each in answers),
            )
        except (OSError, MalformedMessageError) as error:
            number, why = getattr(error, "errno", 0) or 0, getattr(error, "strerror", "") or str(error)
            raise self._failed(number, why) from None

    @property
    def _what(self) -> str:
        return f"cannot read the {self._family} table {self._table}" if self._table else "cannot read chains"

    def _failed(self, number: int, why: str = "") -> ApplyError:
        hint = local_limit_hint(number)
        if number in (errno.EPERM, errno.EACCES):
            hint = "vipd needs root, or CAP_NET_ADMIN"
        if number in (errno.EPROTONOSUPPORT, errno.EOPNOTSUPP, errno.EINVAL):
            hint = "the kernel may lack nf_tables; load it: modprobe nf_tables"
        return ApplyError(self._what, why or os.strerror(number), hint)


def _hook(nested: bytes | None) -> tuple[int, int] | None:
    if nested is None:
        return None
    found = attributes(nested)
    return codec.number(found.get(1)), codec.number(found.get(2))
