"""`python -m tests.attacks [NAME...]`, as root: runs attacks one after the other and prints the table.

A NAME is a part of an attack's; `A+B+C` runs the first of each at the same time. Without any: all, and the
chosen combinations.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from tests.attacks import by_api, by_etcd, by_files, by_network
from tests.attacks.arena import Arena
from tests.attacks.attack import ATTACKS, Attack, Row, run_attacks, table
from tests.lab.topology import Lab, Wiring

TOGETHER = (
    ("checks that wait for an hour", "registrations that come and go", "sixty readers of everything"),
    (
        "programs that answer just in time",
        "half requests to a health port",
        "dry runs of sixty thousand services",
    ),
    ("backends that flap", "registrations of 1 4 megabytes", "sixty requests for the state"),
    ("sixty thousand services", "keys with odd names", "subscribers who read nothing"),
    ("a folder that is emptied", "names with answers of 64 kilobytes", "reloads all the time"),
    ("a thousand checks ten times a second", "a key that changes all the time", "overrides all the time"),
)
"""Three different budgets each. At most one writes the attacker's file, which another would replace."""
EACH_TIME = (
    ("more names than are looked up",),
    ("half requests to a health port",),
    ("pipes and links among the files", "backends at others future addresses"),
)
"""What is tried by day, some at the same time."""
RANDOM_COMBINATIONS = 3


def combinations(seed: int = 0) -> list[tuple[Attack, ...]]:
    """The chosen combinations of three attacks, and some at random, in an order that the seed gives."""
    source = random.Random(seed)
    chosen = [tuple(ATTACKS[name] for name in names) for names in TOGETHER]
    groups = [_attacks(by_files, by_network), _attacks(by_api), _attacks(by_etcd)]
    chosen += [tuple(source.choice(group) for group in groups) for _ in range(RANDOM_COMBINATIONS)]
    source.shuffle(chosen)
    return chosen


def _attacks(*modules: ModuleType) -> list[Attack]:
    """The attacks of these modules that run with iptables, as those beside them do."""
    names = {module.__name__ for module in modules}
    return [
        each for each in ATTACKS.values() if each.run.__module__ in names and each.dataplane == "iptables"
    ]


def run_alone(attacks: tuple[Attack, ...], root: Path) -> Row:
    dataplane = "nftables" if any(each.dataplane == "nftables" for each in attacks) else "iptables"
    with_etcd = any(each.etcd for each in attacks)
    with Lab(Wiring(backends=3)) as lab, Arena(lab, root, dataplane, with_etcd) as arena:
        return run_attacks(arena, attacks)


def _wanted(words: list[str]) -> list[tuple[Attack, ...]]:
    if not words:
        return [*((each,) for each in ATTACKS.values()), *combinations()]
    found: list[tuple[Attack, ...]] = []
    for word in words:
        if "+" in word:
            found.append(tuple(_named(part.strip())[0] for part in word.split("+")))
        else:
            found += [(each,) for each in _named(word)]
    return found


def _named(part: str) -> list[Attack]:
    found = [each for name, each in ATTACKS.items() if part in name]
    if not found:
        sys.exit(f"no attack has {part!r} in its name; they are: {', '.join(ATTACKS)}")
    return found


def main() -> int:
    """Print each row as it is measured, and all in a table in the end; 1 if one does not hold."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that labs are deleted
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    rows = []
    for attacks in _wanted(parser.parse_args().names):
        with tempfile.TemporaryDirectory(prefix="vipd-attack-") as root:
            try:
                rows.append(run_alone(attacks, Path(root)))
            except AssertionError as error:
                print(f"{' + '.join(each.name for each in attacks)}: {str(error)[:2000]}", flush=True)
            else:
                print("  ".join(rows[-1].cells()), *rows[-1].problems[:3], sep="\n    ", flush=True)
    print(f"\n{table(rows)}")
    return int(any(row.failures() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
