"""One rule: its text as statements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vipd.model.service import Family
from vipd.observe.simulator.errors import UnknownRule
from vipd.observe.simulator.iptables.options import port
from vipd.observe.simulator.nftables.datatypes import PORT, VERDICT, Datatype, span
from vipd.observe.simulator.nftables.expressions import Expression, Literal
from vipd.observe.simulator.nftables.reader import (
    CHAIN_VERDICTS,
    FINAL_VERDICTS,
    address_type,
    read_concatenation,
    read_set,
    read_spans,
    read_value,
    read_verdict,
    writable,
)
from vipd.observe.simulator.nftables.sets import NftSet
from vipd.observe.simulator.nftables.statements import (
    Compare,
    Counter,
    InSet,
    Masquerade,
    Redirect,
    Reject,
    SetField,
    SetUpdate,
    SourceTranslate,
    Statement,
    Translate,
    VerdictMap,
    VerdictStatement,
)
from vipd.observe.simulator.nftables.words import Words, split_words

OPERATORS = ("==", "!=", "<", ">", "<=", ">=")
_SOURCE_PORTS = frozenset({"random", "fully-random", "persistent"})
_REJECTIONS = {
    "icmp": frozenset({"net-unreachable", "host-unreachable", "prot-unreachable", "port-unreachable",
                       "net-prohibited", "host-prohibited", "admin-prohibited"}),
    "icmpv6": frozenset({"no-route", "admin-prohibited", "addr-unreachable", "port-unreachable"}),
    "icmpx": frozenset({"port-unreachable", "admin-prohibited", "no-route", "host-unreachable"}),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of one chain."""

    text: str
    """Without its comment."""
    comment: str
    statements: tuple[Statement, ...]


def parse_rule(line: str, family: Family, maps: dict[str, NftSet]) -> Rule:
    """Parses the rule of a line, which may use these maps and sets.

    Raises:
        UnknownRule: a form is not known, or nft would reject it.
    """
    try:
        reader = _Reader(Words(split_words(line)), family, maps)
        statements = reader.statements()
    except ValueError as error:
        raise UnknownRule(line, f"unknown rule ({error})") from None
    text = line.removesuffix(f' comment "{reader.comment}"') if reader.comment else line
    return Rule(text, reader.comment, statements)


class _Reader:
    """Reads the statements of one rule."""

    def __init__(self, words: Words, family: Family, maps: dict[str, NftSet]) -> None:
        self._words, self._family, self._maps = words, family, maps
        self.comment = ""

    def statements(self) -> tuple[Statement, ...]:
        """Every word of the rule."""
        found: list[Statement] = []
        while self._words:
            if self.comment:
                raise ValueError("words stand behind the comment")
            if self._words.accept("comment"):
                self.comment = self._words.take().strip('"')
            else:
                found.append(self.statement())
        if not found:
            raise ValueError("it is empty")
        if (
            sum(statement.branches > 1 for statement in found) > 1
            or self._words.count("numgen", "symhash") > 1
        ):
            raise ValueError("chance decides twice")
        return tuple(found)

    def statement(self) -> Statement:
        """The next statement. Raises ValueError for what is not known."""
        word = self._words.next
        if word in FINAL_VERDICTS | CHAIN_VERDICTS:
            return VerdictStatement(read_verdict(self._words))
        readers: dict[str, Callable[[], Statement]] = {
            "counter": self._counter,
            "reject": self._reject,
            "dnat": self._dnat,
            "snat": self._snat,
            "redirect": self._redirect,
            "masquerade": self._masquerade,
            "add": self._set_update,
            "update": self._set_update,
            "delete": self._set_update,
        }
        return readers.get(word, self._about)()

    def _about(self) -> Statement:
        """A statement that begins with an expression."""
        words = self._words
        left = read_concatenation(words, self._maps)
        if words.accept("vmap"):
            nft_set = read_set(words, self._maps, left.types, (VERDICT,))
            if not nft_set.of_verdicts:
                raise ValueError(f"@{nft_set.name} has no verdicts")
            return VerdictMap(left, nft_set)
        if words.accept("set"):
            return self._write(left)
        return self._compare(left)

    def _write(self, left: Expression) -> Statement:
        field, datatype = writable(left), left.types[0]
        value = self._value((datatype,))
        if len(value.types) != 1 or value.types[0].size > datatype.size:
            raise ValueError(f"the value does not fit into {field}")
        return SetField(field, value)

    def _compare(self, left: Expression) -> Statement:
        words = self._words
        operator = words.accept(*OPERATORS) or "=="
        if words.next.startswith("@"):
            if operator not in ("==", "!="):
                raise ValueError(f"{operator} a set")
            return InSet(left, read_set(words, self._maps, left.types, ()), operator == "!=")
        if words.next != "{":
            return Compare(left, operator, (read_spans(words, left.types),))
        words.take()
        wanted = []
        while words.next != "}":
            wanted.append(read_spans(words, left.types))
            if not words.accept(","):
                break
        words.take("}")
        if operator not in ("==", "!="):
            raise ValueError(f"{operator} a set")
        return Compare(left, operator, tuple(wanted))

    def _value(self, types: tuple[Datatype, ...]) -> Expression:
        """A computed expression, or a literal of these types."""
        words = self._words
        try:
            fixed = tuple(span(words.next, datatype) for datatype in types[:1])
        except ValueError:
            return read_value(words, self._maps, types)
        words.take()
        if fixed[0][0] != fixed[0][1]:
            raise ValueError("a value is a range")
        return Literal(types[:1], (fixed[0][0],))

    def _counter(self) -> Statement:
        self._words.take()
        for word in ("packets", "bytes"):
            if self._words.accept(word):
                self._words.take()
        return Counter()

    def _reject(self) -> Statement:
        words = self._words
        words.take()
        if not words.accept("with"):
            return Reject()
        if words.after("tcp", "reset"):
            return Reject(reset=True)
        by = words.take(*_REJECTIONS)
        words.accept("type")
        words.take(*_REJECTIONS[by])
        return Reject()

    def _dnat(self) -> Statement:
        words = self._words
        words.take()
        datatype = address_type(words.accept("ip", "ip6"), self._family)
        if words.after("addr", ".", "port"):
            pass
        words.take("to")
        literal = self._socket(datatype)
        value = literal or read_value(words, self._maps, (datatype, PORT))
        if value.types not in ((datatype,), (datatype, PORT)):
            raise ValueError("dnat goes to an address, or to an address and a port")
        return Translate(value)

    def _snat(self) -> Statement:
        words = self._words
        words.take()
        datatype = address_type(words.accept("ip", "ip6"), self._family)
        words.take("to")
        value = read_value(words, self._maps, (datatype, PORT))
        if value.types != (datatype, PORT):
            raise ValueError("snat goes to an address and a port")
        return SourceTranslate(value)

    def _socket(self, datatype: Datatype) -> Expression | None:
        """`10.0.0.1`, `10.0.0.1:80`, `[fd00::1]:80`; None: a computed expression."""
        word = self._words.next
        host, _, rest = word.rpartition(":")
        for address, text in ((word, ""), (host.strip("[]"), rest)):
            try:
                low, high = span(address, datatype)
            except ValueError:
                continue
            self._words.take()
            if low != high:
                raise ValueError(f"{word} is a range")
            return Literal((datatype, PORT), (low, port(text))) if text else Literal((datatype,), (low,))
        return None

    def _redirect(self) -> Statement:
        words = self._words
        words.take()
        return Redirect(port(words.take().removeprefix(":")) if words.accept("to") else None)

    def _masquerade(self) -> Statement:
        self._words.take()
        while self._words.accept(*_SOURCE_PORTS, ","):
            pass
        return Masquerade()

    def _set_update(self) -> Statement:
        words = self._words
        verb, name = words.take(), words.take().removeprefix("@")
        nft_set = self._maps.get(name)
        if nft_set is None or nft_set.of_verdicts:
            raise ValueError(f"there is no map or set {name}")
        words.take("{")
        key = read_concatenation(words, self._maps)
        if words.accept("timeout"):
            words.take()
        words.accept("counter")
        exceeds = self._limit()
        data = read_concatenation(words, self._maps) if words.accept(":") else None
        words.take("}")
        if [k.size for k in key.types] != [k.size for k in nft_set.keys]:
            raise ValueError(f"the key is not of @{name}'s type")
        if (data is not None) != bool(nft_set.values):
            raise ValueError(f"@{name} is a {'map' if nft_set.values else 'set'}")
        return SetUpdate(verb, nft_set, key, data, exceeds)

    def _limit(self) -> bool:
        """`limit rate over 10/second burst 20 packets` and `ct count over 100`; whether there is one."""
        words = self._words
        if words.after("ct", "count", "over"):
            words.take()
            return True
        if not words.after("limit", "rate", "over"):
            return False
        words.take()
        words.take("burst")
        words.take()
        words.take("packets")
        return True
