"""Entry point of the daemon: `vipd`, or `python -m vipd`."""

from __future__ import annotations

import argparse
import asyncio
import errno
import faulthandler
import logging
import os
import sys
from typing import NoReturn

from vipd.daemon import daemon
from vipd.host.gc_control import use_one_heap
from vipd.host.preflight import StartError
from vipd.host.settings.command_line import EXIT_CONFIGURATION, argument_parser
from vipd.host.settings.settings import Settings, load_settings, unknown_environment
from vipd.host.settings.settings_file import DEFAULT_CONFIG, SettingsError, parse_assignments
from vipd.host.systemd.fields import Event, fields
from vipd.host.systemd.journal import stderr_handler
from vipd.host.systemd.notify import Notifier, one_line
from vipd.model.text import one_line as as_line

STDERR = 2
_OUT_OF_MEMORY = "out of memory: vipd ends, the rules stay in the kernel; hint: raise the limit of its memory"
_LAST_WORDS = f"vipd: {_OUT_OF_MEMORY}\n".encode()
"""Made before there is no memory for them."""
LIBRARIES = ("aiohttp", "asyncio", "pyroute2", "watchfiles")
"""Their messages below a warning are for their developers."""


def main() -> None:
    """Run the daemon until a signal stops it. Exit codes: 0 stopped, 1 failed, 77 not permitted,
    78 unusable settings."""
    arguments = argument_parser().parse_args()
    use_one_heap()
    faulthandler.enable(STDERR)  # a crash in a library in C says where it was, besides its signal
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
        with asyncio.Runner() as runner:
            try:
                return runner.run(
                    daemon.once(settings) if arguments.once else daemon.serve(settings, notifier)
                )
            except MemoryError as error:
                _end_at_once(error)
    except StartError as error:
        logging.getLogger("vipd").error("%s", error, extra=fields(Event.START_FAILED))
        number = [f"ERRNO={error.number}"] if error.number else []
        notifier.send(f"STATUS={one_line(str(error))}", *number)
        return error.code
    except KeyboardInterrupt:
        return 130


def _end_at_once(error: MemoryError) -> NoReturn:
    """End with exit code 1, for whoever starts vipd again. What asyncio had no memory for is lost, maybe the
    wakeup of a task. An ordinary end would wait for threads that nobody wakes."""
    try:
        logging.getLogger("vipd").error("%s", _OUT_OF_MEMORY, exc_info=error)
    except MemoryError:
        os.write(STDERR, _LAST_WORDS)
    os._exit(1)


def _settings(arguments: argparse.Namespace) -> Settings:
    named = ("services_dir", "state_dir", "socket", "log_level")
    flags = {name: value for name in named if (value := getattr(arguments, name)) is not None}
    config = arguments.config or (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None)
    return load_settings(config, {**parse_assignments(arguments.set), **flags}, os.environ)


def _log_to_stderr(settings: Settings) -> None:
    """One line an event; under systemd as the journal wants it, and with no time of its own."""
    handler = stderr_handler(os.environ, "vipd")
    handler.setLevel(settings.log_level.upper())  # of its own: events are reported to others at any level
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    handler.addFilter(_concerns_us)


def _concerns_us(record: logging.LogRecord) -> bool:
    # No level of their loggers: pyroute2 sets its own when it is imported.
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] not in LIBRARIES


if __name__ == "__main__":
    main()
