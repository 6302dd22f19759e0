"""The words of a rule, and which of them is its target."""

from __future__ import annotations

import pytest

from vipd.dataplane.iptables.words import split_words, target_of

TO_VIPD = "-j VIPD-SERVICES"
FOREIGN = (
    '-j LOG --log-prefix "before -j VIPD-SERVICES "',
    "-j LOG --log-prefix -j",
    '-m comment --comment "-j VIPD-SERVICES" -j ACCEPT',
    '-m comment --comment "say \\"-j VIPD-SERVICES\\"" -j ACCEPT',
    '-m string --string "GET -j VIPD-SERVICES" --algo bm',
    "-j NFLOG --nflog-prefix -j",
)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", []),
        ("a  b\tc", ["a", "b", "c"]),
        ('-a "b c" d', ["-a", "b c", "d"]),
        (r'"b \"c\" \\ d"', ['b "c" \\ d']),
        ('a"b c"d', ["ab c", "d"]),
        ('""', [""]),
        (r"a\ b", ["a\\", "b"]),
    ],
)
def test_words(line: str, words: list[str]) -> None:
    assert split_words(line) == words


@pytest.mark.parametrize("line", ['"', 'a "b', r'"a\"', '"a" "'])
def test_a_quote_that_is_not_closed(line: str) -> None:
    with pytest.raises(ValueError, match="not closed"):
        split_words(line)
    assert target_of(f"-j X {line}") == ""


@pytest.mark.parametrize(
    ("rule", "target"),
    [
        (TO_VIPD, "VIPD-SERVICES"),
        ("-d 10.0.0.1/32 -g VIPD-SERVICES", "VIPD-SERVICES"),
        ('-m comment --comment "vipd services" -j VIPD-SERVICES', "VIPD-SERVICES"),
        ('-j "A B"', "A B"),
        ('"-j" X', "X"),
        ("-j", ""),
        ("-d 10.0.0.1/32", ""),
        *zip(FOREIGN, ["LOG", "LOG", "ACCEPT", "ACCEPT", "", "NFLOG"], strict=True),
    ],
)
def test_target(rule: str, target: str) -> None:
    assert target_of(rule) == target
