"""`python -m vipd.cli.manual DIR` writes the manual pages to DIR/man, shells' scripts to DIR/completions, and
JSON Schemas to DIR/schemas, which docs/ contains, too: cp DIR/schemas/* docs/

The date in a page is that of SOURCE_DATE_EPOCH, seconds since 1970; without it a page has none, so that
builds are reproducible. All content is read from the imported program.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from pathlib import Path

from vipd import __version__
from vipd.cli.manual.completion import FILES, script
from vipd.cli.manual.pages import Page
from vipd.cli.manual.roff import roff
from vipd.cli.manual.schemas import schemas
from vipd.cli.manual.services_page import services_page
from vipd.cli.manual.settings_page import settings_page
from vipd.cli.manual.vipctl_page import vipctl_page
from vipd.cli.manual.vipd_page import vipd_page


def pages() -> tuple[Page, ...]:
    """Every page."""
    return vipd_page(), vipctl_page(), settings_page(), services_page()


def files(day: date | None) -> Iterator[tuple[str, str]]:
    """The path, below DIR, and the text of each generated file."""
    for page in pages():
        yield f"man/{page.file}", roff(page, __version__, day)
    for shell, path in FILES.items():
        yield f"completions/{path}", script(shell)
    for name, text in schemas().items():
        yield f"schemas/{name}", text


def day_of(environment: Mapping[str, str]) -> date | None:
    """The day that SOURCE_DATE_EPOCH names, in UTC. Raises ValueError when it is no number of seconds."""
    seconds = environment.get("SOURCE_DATE_EPOCH")
    return datetime.fromtimestamp(int(seconds), UTC).date() if seconds else None


def main() -> int:
    """Write the files; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m vipd.cli.manual", description="Write manual, completions and schemas."
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="made if it is not there")
    directory: Path = parser.parse_args().directory
    try:
        for path, text in files(day_of(os.environ)):
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(text, encoding="utf-8")
    except (OSError, ValueError, LookupError) as error:
        print(f"vipd.cli.manual: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
