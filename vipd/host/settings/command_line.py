"""The options of the daemon's command line, which its man page lists, too."""

from __future__ import annotations

import argparse
from pathlib import Path

from vipd import __version__
from vipd.host.settings.settings_file import DEFAULT_CONFIG

EXIT_CONFIGURATION = 78
"""EX_CONFIG of sysexits.h: a restart would not help."""


def argument_parser() -> argparse.ArgumentParser:
    """The parser of the arguments of `vipd`."""
    parser = argparse.ArgumentParser(
        prog="vipd",
        description="Layer-4 load balancer for plain Linux hosts. Each option below overrides VIPD_* "
        "environment variables, which override the settings file.",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"settings file (default {DEFAULT_CONFIG})"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one setting, as in the settings file; repeatable",
    )
    parser.add_argument("--services-dir", metavar="DIR", help="directory of declarations")
    parser.add_argument("--state-dir", metavar="DIR", help="directory for what must survive a restart")
    parser.add_argument("--socket", metavar="PATH", help="UNIX socket of the API")
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        metavar="LEVEL",
        help="least weighty messages to log: debug, info, warning or error",
    )
    parser.add_argument("--once", action="store_true", help="put the declarations into the kernel, and exit")
    parser.add_argument("--check", action="store_true", help="check settings and declarations, and exit")
    parser.add_argument("--version", action="version", version=f"vipd {__version__}")
    return parser
