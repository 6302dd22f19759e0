"""`python -m tests.attacks [NAME...]`, as root: runs attacks one after the other and prints the table.

A NAME is a part of an attack's; `A+B+C` runs the first of each at the same time. Without any: all, and the
chosen combinations.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tests.attacks.arena import arena
from tests.attacks.attack import ATTACKS, Attack, Row, run_attacks, table
from tests.attacks.catalogue import combinations


def run_alone(attacks: tuple[Attack, ...], root: Path) -> Row:
    dataplane = "nftables" if any(each.dataplane == "nftables" for each in attacks) else "iptables"
    with arena(root, dataplane, any(each.etcd for each in attacks)) as place:
        return run_attacks(place, attacks)


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
