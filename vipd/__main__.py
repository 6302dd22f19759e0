"""Entry point of the daemon: `vipd`, or `python -m vipd`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from vipd import __version__, daemon
from vipd.settings import (
    DEFAULT_CONFIG,
    Settings,
    SettingsError,
    load_settings,
    parse_assignments,
    unknown_environment,
)

EXIT_CONFIGURATION = 78
"""EX_CONFIG of sysexits.h: a restart would not help."""


def main() -> None:
    """Run the daemon until it is told to stop. Exit codes: 0 stopped, 1 failed, 78 unusable settings."""
    arguments = _parser().parse_args()
    try:
        settings = _settings(arguments)
    except SettingsError as error:
        for problem in error.problems:
            print(f"vipd: {problem}", file=sys.stderr)  # noqa: T201 (no logging yet)
        raise SystemExit(EXIT_CONFIGURATION) from None
    _log_to_stderr(settings)
    for name in unknown_environment(os.environ):
        logging.getLogger("vipd").warning("environment variable %s is no setting and is ignored", name)
    raise SystemExit(_run(arguments, settings))


def _run(arguments: argparse.Namespace, settings: Settings) -> int:
    try:
        if arguments.check:
            return daemon.check(settings)
        return asyncio.run(daemon.once(settings) if arguments.once else daemon.serve(settings))
    except daemon.StartError as error:
        logging.getLogger("vipd").error("%s", error)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vipd",
        description="Layer-4 load balancer for plain Linux hosts. Each option below overrides VIPD_* "
        "environment variables, which override the settings file.",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"settings file (default {DEFAULT_CONFIG})"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one setting, as in the settings file"
    )
    parser.add_argument("--services-dir", metavar="DIR", help="directory of declarations")
    parser.add_argument("--state-dir", metavar="DIR", help="directory for what must survive a restart")
    parser.add_argument("--socket", metavar="PATH", help="UNIX socket of the API")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--once", action="store_true", help="apply the declarations to the kernel and exit")
    parser.add_argument("--check", action="store_true", help="check settings and declarations and exit")
    parser.add_argument("--version", action="version", version=f"vipd {__version__}")
    return parser


def _settings(arguments: argparse.Namespace) -> Settings:
    named = ("services_dir", "state_dir", "socket", "log_level")
    flags = {name: value for name in named if (value := getattr(arguments, name)) is not None}
    config = arguments.config or (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None)
    return load_settings(config, {**parse_assignments(arguments.set), **flags}, os.environ)


def _log_to_stderr(settings: Settings) -> None:
    """One line an event; under systemd with journald's priority prefix and no time of its own."""
    journald = "JOURNAL_STREAM" in os.environ
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(_JournalFormatter() if journald else plain)
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    logging.getLogger("watchfiles").setLevel(logging.WARNING)


_SYSLOG_PRIORITY = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}


class _JournalFormatter(logging.Formatter):
    """`<N>message`, N a syslog priority (sd-daemon(3))."""

    def format(self, record: logging.LogRecord) -> str:
        """The message with its priority."""
        return f"<{_SYSLOG_PRIORITY.get(record.levelname, 6)}>{super().format(record)}"


if __name__ == "__main__":
    main()
