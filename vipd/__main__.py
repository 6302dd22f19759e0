"""Entry point of the daemon: `vipd`, or `python -m vipd`."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import os
import sys
from pathlib import Path

from vipd import __version__
from vipd.daemon import daemon
from vipd.host.preflight import StartError
from vipd.host.settings.settings import (
    DEFAULT_CONFIG,
    Settings,
    SettingsError,
    load_settings,
    parse_assignments,
    unknown_environment,
)
from vipd.host.systemd.fields import Event, fields
from vipd.host.systemd.journal import stderr_handler
from vipd.host.systemd.notify import Notifier, one_line
from vipd.model.text import one_line as as_line

EXIT_CONFIGURATION = 78
"""EX_CONFIG of sysexits.h: a restart would not help."""


LIBRARIES = ("aiohttp", "asyncio", "pyroute2", "watchfiles")
"""What these tell below a warning is for those who write them."""


def main() -> None:
    """Run the daemon until it is told to stop. Exit codes: 0 stopped, 1 failed, 77 not permitted,
    78 unusable settings."""
    arguments = _parser().parse_args()
    notifier = Notifier.from_environment(os.environ)
    if arguments.once or arguments.check:
        notifier = Notifier()  # the manager waits for the daemon, not for these
    try:
        settings = _settings(arguments)
    except SettingsError as error:
        for problem in error.problems:
            print(f"vipd: {as_line(problem)}", file=sys.stderr)  # noqa: T201 (no logging yet)
        notifier.send(f"STATUS={one_line('; '.join(error.problems))}", f"ERRNO={errno.EINVAL}")
        raise SystemExit(EXIT_CONFIGURATION) from None
    _log_to_stderr(settings)
    for name in unknown_environment(os.environ):
        logging.getLogger("vipd").warning("environment variable %s is no setting and is ignored", name)
    raise SystemExit(_run(arguments, settings, notifier))


def _run(arguments: argparse.Namespace, settings: Settings, notifier: Notifier) -> int:
    try:
        if arguments.check:
            return daemon.check(settings)
        return asyncio.run(daemon.once(settings) if arguments.once else daemon.serve(settings, notifier))
    except StartError as error:
        logging.getLogger("vipd").error("%s", error, extra=fields(Event.START_FAILED))
        number = [f"ERRNO={error.number}"] if error.number else []
        notifier.send(f"STATUS={one_line(str(error))}", *number)
        return error.code
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


def _settings(arguments: argparse.Namespace) -> Settings:
    named = ("services_dir", "state_dir", "socket", "log_level")
    flags = {name: value for name in named if (value := getattr(arguments, name)) is not None}
    config = arguments.config or (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None)
    return load_settings(config, {**parse_assignments(arguments.set), **flags}, os.environ)


def _log_to_stderr(settings: Settings) -> None:
    """One line an event; under systemd as the journal wants it, and with no time of its own."""
    handler = stderr_handler(os.environ, "vipd")
    handler.setLevel(settings.log_level.upper())  # of its own: events are told to others at any level
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    handler.addFilter(_concerns_us)


def _concerns_us(record: logging.LogRecord) -> bool:
    # No level of their loggers: pyroute2 sets its own when it is imported.
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] not in LIBRARIES


if __name__ == "__main__":
    main()
