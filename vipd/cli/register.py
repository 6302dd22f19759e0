"""`vipctl register`: a backend that takes part in a service while this runs. Talks to etcd itself."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from random import Random

import click

from vipd.cli.argument_types import FILE, TARGET
from vipd.cli.errors import OK, USAGE, CliError
from vipd.cli.words import seconds
from vipd.declaration.operations import RefusedError
from vipd.declaration.syntax import InvalidTextError, parse_backend
from vipd.host.settings.etcd import EtcdSettings
from vipd.host.settings.settings import load_settings
from vipd.host.settings.settings_file import DEFAULT_CONFIG, SettingsError, SettingsFile
from vipd.host.systemd.notify import Notifier, one_line
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.fleet import registration
from vipd.sources.etcd.leases import Registration
from vipd.sources.etcd.values import Layout

FILES = ("ca", "cert", "key", "password_file")
MIN_TTL, MAX_TTL = 2, 3600


@click.command()
@click.argument("service", metavar="SERVICE", type=TARGET)
@click.argument("backend", metavar="ADDR[:PORT][@WEIGHT]")
@click.option(
    "--ttl", metavar="TIME", default="10s", show_default=True, help="It ends so long after its keeper."
)
@click.option(
    "--config", metavar="FILE", type=FILE, help=f"Settings, of which etcd counts; default: {DEFAULT_CONFIG}."
)
@click.option("--endpoint", "endpoints", metavar="URL", multiple=True, help="A member of etcd; repeatable.")
@click.option("--prefix", metavar="TEXT", help="How every key begins.")
@click.option("--ca", metavar="FILE", type=FILE, help="CA of the members' certificates.")
@click.option("--cert", metavar="FILE", type=FILE, help="Client certificate.")
@click.option("--key", metavar="FILE", type=FILE, help="Private key of the client certificate.")
@click.option("--user", metavar="NAME", help="User of etcd.")
@click.option("--password-file", metavar="FILE", type=FILE, help="File with the user's password.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
def register(
    *, service: str, backend: str, ttl: str, config: str | None, quiet: bool, **options: object
) -> int:
    """Have a backend take part in SERVICE on every host, for as long as this runs.

    It stays in the foreground, and gets over whatever keeps it from etcd. SIGTERM and SIGINT take the
    registration back; when this is killed, or its machine dies, the backend goes after the TTL.

    \b
    vipctl register shop/web 10.244.0.11:8080 --ttl 10s
    vipctl register dns 10.244.0.5@2 --endpoint http://10.0.0.1:2379
    """
    lasting = seconds(ttl)
    if not MIN_TTL <= lasting <= MAX_TTL:
        raise CliError(f"--ttl {ttl} is not within {MIN_TTL}s to 1h", hint="10s", code=USAGE)
    settings = _settings(config, options)
    try:
        key, value = registration(Layout(settings.prefix), service, parse_backend(backend))
    except InvalidTextError as error:
        raise CliError(error.what, hint=error.hint, code=USAGE) from None
    except RefusedError as error:
        raise CliError(error.what, code=USAGE, details=tuple(map(str, error.problems))) from None
    for warning in () if quiet else settings.warnings():
        print(f"vipctl: warning: {warning}", file=sys.stderr, flush=True)
    asyncio.run(_keep(settings, key, value, lasting, quiet))
    return OK


def _settings(config: str | None, options: dict[str, object]) -> EtcdSettings:
    """The settings of the file, overridden by the options. Raises CliError."""
    file = Path(config) if config else DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None
    given = {name: value for name, value in options.items() if value}
    given |= {name: str(Path(str(given[name])).absolute()) for name in FILES if name in given}
    wanted = file is not None and (config or not given.get("endpoints"))
    try:
        written = SettingsFile.read(file).values.get("etcd") if file and wanted else None
        settings = load_settings(flags={"etcd": {**(written if isinstance(written, dict) else {}), **given}})
    except SettingsError as error:
        raise CliError("unusable settings", code=USAGE, details=tuple(error.problems)) from None
    assert settings.etcd is not None  # noqa: S101 (given right here)
    return settings.etcd


async def _keep(settings: EtcdSettings, key: str, value: str, ttl: int, quiet: bool) -> None:
    notifier = Notifier.from_environment(os.environ)

    def report(standing: bool, what: str) -> None:
        notifier.send(*(["READY=1"] if standing else []), f"STATUS={one_line(f'{key}: {what}')}")
        if not (quiet and standing):
            print(f"vipctl: {key}: {what}", file=sys.stderr, flush=True)

    client = EtcdClient(settings, Random())  # noqa: S311 (spreads members; nothing secret)
    work = asyncio.create_task(Registration(client, key, value, ttl, report).run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    try:
        await asyncio.gather(work, return_exceptions=True)
    finally:
        await client.close()
    if not work.cancelled():
        work.result()
