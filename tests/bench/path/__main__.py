"""Measures the path of packets and prints a row for each figure.

    sudo bash tests/bench/path/prepare.sh
    sudo .venv/bin/python -m tests.bench.path [--quick] [--json FILE]

Works in network namespaces of its own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.bench.path import measure
from tests.bench.results import Measurement


def main() -> None:
    """Measure, print, and write the rows where they are wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="shorter runs, fewer rounds and services")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows, with every round, to FILE")
    arguments = parser.parse_args()
    rows = list(measure(arguments.quick))
    for row in sorted(rows, key=lambda row: row.what):
        print(_line(row))
    if arguments.json:
        arguments.json.write_text(json.dumps([row.view() for row in rows], indent=1) + "\n")


def _line(row: Measurement) -> str:
    low, high = row.spread
    who = row.subject if row.services is None else f"{row.subject}, {row.services:,} services"
    return f"{row.what:<46} {who:<46} {row.median:>11.2f} {row.unit:<7} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
