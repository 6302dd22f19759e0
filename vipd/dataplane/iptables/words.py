"""The words of an iptables-restore line, and which of them is the target. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

_WORD = re.compile(r'([^\s"]*)"([^"\\]*(?:\\.[^"\\]*)*)"|([^\s"]+)|"', re.DOTALL)
"""A word that ends with a quoted part, one without quotes, or a quote that is not closed."""
_QUOTED = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_QUOTE, _MARK = "\0", "\0 "
"""Replaces a quoted part, which ends a word: of a large table's rules only the target is needed."""
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_FREE_TEXT = frozenset(
    {"--comment", "--log-prefix", "--nflog-prefix", "--ulog-prefix", "--string", "--bytecode"}
)
"""Options whose value may be any word, including one that looks like an option."""
_JUMPS = frozenset({"-j", "-g", "--jump", "--goto"})


def split_words(line: str) -> list[str]:
    """The arguments of one line, as iptables-restore 1.8 splits them.

    Blanks separate. A double quote opens a part in which blanks count and a backslash takes the next
    character literally; the closing quote ends the word. Outside quotes a backslash is a plain character.

    Raises:
        ValueError: a quote is not closed.
    """
    if '"' not in line:
        return line.split()
    return [_word(found) for found in _WORD.finditer(line)]


def _word(found: re.Match[str]) -> str:
    head, quoted, plain = found.groups()
    if plain is not None:
        return str(plain)
    if quoted is None:
        raise ValueError("a quote is not closed")
    return head + (_ESCAPED.sub(r"\1", quoted) if "\\" in quoted else quoted)


def target_of(rule: str) -> str:
    """The chain or target of an iptables rule: the word after its `-j` or `-g`. Empty if it has none, or
    if the rule cannot be parsed. The text of a comment or a log prefix is no target."""
    plain = _QUOTED.sub(_MARK, rule) if '"' in rule else rule
    if '"' in plain:
        return ""  # one is not closed
    words = iter(plain.split())
    for word in words:
        if word in _FREE_TEXT:
            next(words, "")
        elif word in _JUMPS:
            target = next(words, "")
            return target if _QUOTE not in target else _target_among(split_words(rule))
        elif _QUOTE in word:
            return _target_among(split_words(rule))
    return ""


def _target_among(words: Iterable[str]) -> str:
    words = iter(words)
    for word in words:
        if word in _FREE_TEXT:
            next(words, "")
        elif word in _JUMPS:
            return next(words, "")
    return ""
