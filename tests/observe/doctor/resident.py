"""A vipctl that stays: a command line as JSON on each line of input, its exit code and output as JSON back.

It saves each question the start of an interpreter in the lab's namespace.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

from tests.lab.inside import vipctl


def main() -> None:
    """Answer until standard input ends."""
    for line in sys.stdin:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = vipctl(json.loads(line))
        print(json.dumps([code, said.getvalue()]), flush=True)


if __name__ == "__main__":
    main()
