"""Draws the pictures of README.md into docs/pictures/.

python -m tests.docs.pictures [--record]      --record: run the first minute anew, as root
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.docs.markdown import ROOT
from tests.docs.pictures import packet_path, terminal
from tests.docs.pictures.cast import Recording
from tests.docs.pictures.session import record

PICTURES = ROOT / "docs" / "pictures"
CAST = Path(__file__).parent / "first-minute.cast"
TITLE = "vipd: the first minute"


def drawings(recording: Recording) -> dict[Path, str]:
    return {
        PICTURES / "packet-path.svg": packet_path.draw(),
        PICTURES / "first-minute.svg": terminal.draw(recording, TITLE),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.docs.pictures", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--record", action="store_true", help="run the first minute anew, as root")
    if parser.parse_args(argv).record:
        if os.geteuid() != 0:
            sys.exit(
                "error: --record needs root, for network namespaces; hint: without it the last run is drawn"
            )
        CAST.write_text(record().write(), encoding="utf-8")
    recording = Recording.read(CAST.read_text(encoding="utf-8"))
    for path, text in drawings(recording).items():
        path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {len(text.encode()):,} bytes")


if __name__ == "__main__":
    main()
