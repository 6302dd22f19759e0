"""Rules of others, and whatever else programs print: read, or said to be unreadable; nothing crashes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab.examples import examples
from tests.observe.doctor.facts import faults, ruleset, well
from tests.observe.empty_host import empty_host
from tests.observe.resident import Ended, Resident
from tests.observe.rule_tree.test_damage import BY_TABLE, TEXT
from vipd.model.service import Family

LINES = [
    "",
    "garbage",
    "-A",
    "-A VIPD-SERVICES",
    ":",
    ":VIPD-X",
    ":VIPD-X -",
    "*",
    "*nat",
    "COMMIT",
    "[1:2]",
    "[x:y] -A VIPD-SERVICES -j VIPD-SVC-AAAAAAAAAAAAAAAA",
    '-A VIPD-SERVICES -m comment --comment "not closed -j DROP',
    "-A VIPD-SERVICES -d 999.1.2.3/99 -j VIPD-GRP-AAAAAAAAAAAAAAAA",
    "-A PREROUTING -m newmatch --new-option x -j NEWTARGET --what",
    "-A VIPD-SVC-AAAAAAAAAAAAAAAA -m statistic --mode random --probability x -j VIPD-SEP-AAAAAAAAAAAAAAAA",
    "-A PREROUTING -j",
    "-A PREROUTING -g",
    "# Table `nat' is incompatible, use 'nft' tool.",
    "\x01\x02",
    "\N{SNOWMAN}",
]
MUTATIONS = examples(60)
SCRIPT = """\
#!/bin/sh
# Prints what the test has put beside it, for the listing that is asked for.
case "$*" in *--version*) exec /usr/sbin/{name} "$@" ;; esac
[ -e {here}/fails ] && {{ cat {here}/fails >&2; exit 4; }}
cat {here}/{name}
"""

Rules = Callable[[str, str], Ended]


def garbled(text: str, seed: int) -> Iterator[str]:
    """Lines left out, put in, mixed up, cut, and characters changed."""
    draw = random.Random(seed)
    for _ in range(MUTATIONS):
        lines = text.splitlines()
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(lines) + 1)
            match draw.randrange(4):
                case 0:
                    del lines[at : at + draw.randint(1, 3)]
                case 1:
                    lines.insert(at, draw.choice(LINES))
                case 2 if at < len(lines) and lines[at]:
                    place = draw.randrange(len(lines[at]))
                    lines[at] = lines[at][:place] + draw.choice('x9/:"-{}@ ') + lines[at][place + 1 :]
                case _ if at < len(lines):
                    lines[at] = lines[at][: draw.randrange(len(lines[at]) + 1)]
        yield "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of programs."""
    directory = tmp_path_factory.mktemp("programs")
    for name in ("iptables-nft-save", "ip6tables-nft-save", "nft"):
        (directory / name).with_suffix(".text").touch()
        (directory / name).write_text(SCRIPT.format(name=name, here=directory / "said"))
        (directory / name).chmod(0o755)
    (directory / "said").mkdir()
    return directory


@pytest.fixture(scope="module")
def rules(here: Path) -> Iterator[Rules]:
    """`vipctl rules` on a host with vipd's table, whose programs print what is said."""
    with empty_host() as node:
        node.run("nft", "-f", "-", text=BY_TABLE.render(Family.IPV4, "nftables"))
        vipctl = Resident(node.with_environment(PATH=f"{here}:{os.environ['PATH']}"))
        listing = node.run("nft", "-a", "-t", "list", "table", "ip", "vipd").stdout

        def said(iptables: str, nft: str) -> Ended:
            texts = {"iptables-nft-save": iptables, "ip6tables-nft-save": "", "nft": nft or listing}
            for name, text in texts.items():
                (here / "said" / name).write_text(text)
            return vipctl.run("--socket", "/nobody", "rules", "--all", "-o", "json")

        yield said
        vipctl.end()


@pytest.mark.root
@pytest.mark.parametrize("seed", range(2))
def test_what_programs_print(rules: Rules, seed: int) -> None:
    assert rules(TEXT, "").code == 0
    listing = BY_TABLE.render(Family.IPV4, "nftables")
    for iptables, nft in zip(garbled(TEXT, seed), garbled(listing, seed), strict=True):
        ended = rules(iptables, nft)
        assert ended.code in (0, 1), ended.err
        assert "please report it" not in ended.err, iptables


@pytest.mark.root
def test_programs_that_fail(rules: Rules, here: Path) -> None:
    (here / "said" / "fails").write_text("another app is currently holding the xtables lock")
    ended = rules(TEXT, "")
    (here / "said" / "fails").unlink()
    assert (ended.code, ended.out) == (1, "")
    assert "another app is currently holding the xtables lock" in ended.err
    ended = rules("*nat\n\x01garbage\n-A\n# handle 3\n", "")
    assert (ended.code, "iptables-nft-save" in ended.err) == (1, True)


@pytest.mark.parametrize("seed", range(2))
def test_what_iptables_prints_for_the_doctor(seed: int) -> None:
    judged = 0
    for text in garbled(TEXT, seed):
        try:
            found = faults(well(rulesets=[ruleset(text)]))
        except ValueError:
            continue  # what is no listing is refused when it is read
        judged += 1
        assert found.get("forward-policy", "") in ("", "problem", "warning")
    assert judged > MUTATIONS / 5
