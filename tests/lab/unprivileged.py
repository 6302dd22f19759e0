"""`python -m tests.lab.unprivileged MODULE ARGUMENTS...`: runs `main` of a module without any privilege.

It imports all of vipd before: the clone that is tested may be in a directory that others cannot enter.
"""

from __future__ import annotations

import importlib
import os
import sys

from tests.lab.fork_server import import_all

NOBODY = 65534


def command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module with arguments as this does."""
    name = "vipd.__main__" if module == "vipd" else module
    return [sys.executable, "-m", "tests.lab.unprivileged", name, *arguments]


if __name__ == "__main__":
    import_all("vipd")
    program = importlib.import_module(sys.argv[1])
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    sys.argv = sys.argv[1:]
    program.main()
