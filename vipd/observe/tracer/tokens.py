"""The words of an iptables-restore line, and a place in them."""

from __future__ import annotations

from collections.abc import Iterator


def split_words(line: str) -> list[str]:
    """The arguments of one line, as iptables-restore 1.8 splits them.

    Blanks separate. A double quote opens a stretch in which blanks count and a backslash takes the next
    character as it is; the closing quote ends the word. Outside quotes a backslash is a plain character.

    Raises:
        ValueError: a quote is not closed.
    """
    if '"' not in line:
        return line.split()
    words: list[str] = []
    word = ""
    characters = iter(line)
    for character in characters:
        if character == '"':
            words.append(word + _quoted(characters))
            word = ""
        elif not character.isspace():
            word += character
        elif word:
            words.append(word)
            word = ""
    return [*words, word] if word else words


def _quoted(characters: Iterator[str]) -> str:
    text = ""
    for character in characters:
        if character == '"':
            return text
        text += next(characters, "") if character == "\\" else character
    raise ValueError("a quote is not closed")


_FREE_TEXT = frozenset(
    {"--comment", "--log-prefix", "--nflog-prefix", "--ulog-prefix", "--string", "--bytecode"}
)
"""Options whose value may be any word, also one that looks like an option."""


def target_of(rule: str) -> str:
    """The chain or target of an iptables rule: the word after its `-j` or `-g`. Empty when it has none, or
    when the rule cannot be read. What a comment or a log prefix says is no target."""
    try:
        words = iter(split_words(rule))
    except ValueError:
        return ""
    for word in words:
        if word in _FREE_TEXT:
            next(words, "")
        elif word in ("-j", "-g", "--jump", "--goto"):
            return next(words, "")
    return ""


class Cursor:
    """Reads words one after the other."""

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._next = 0

    def __bool__(self) -> bool:
        return self._next < len(self._words)

    def take(self, after: str = "") -> str:
        """The next word.

        Raises:
            ValueError: there is none; `after` names the option that wants it.
        """
        if not self:
            raise ValueError(f"{after} wants a value" if after else "the line ends too early")
        self._next += 1
        return self._words[self._next - 1]
