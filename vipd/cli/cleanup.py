"""`vipctl cleanup`: removes every trace of vipd from the kernel. Needs no daemon, settings or store."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import click

from vipd.cli.argument_types import DIRECTORY
from vipd.cli.errors import FAILED, OK, UNREACHABLE, CliError
from vipd.control.host import restore_sysctls
from vipd.dataplane.base import ApplyError
from vipd.dataplane.fast_path.driver import find_fast_paths, remove_fast_paths
from vipd.dataplane.fast_path.table import fast_path_table
from vipd.dataplane.forward_accept import removal as forward_accept
from vipd.dataplane.iptables.removal import Leftover, find_leftovers, remove, remove_empty_tables
from vipd.dataplane.nftables import removal as nftables
from vipd.host.announced_routes import remove_announced
from vipd.host.durable import open_own, read_own
from vipd.host.host_changes import HostChanges
from vipd.host.lan.answers import remove_answers
from vipd.host.preflight import LOCK
from vipd.host.process import run
from vipd.host.settings.settings import Settings
from vipd.host.settings.settings_file import DEFAULT_CONFIG, SettingsError, SettingsFile
from vipd.host.vip_routes import restore_routes

DEFAULT_PREFIX = "VIPD"
_MAX_LOCK_BYTES = 64


@click.command()
@click.option(
    "--prefix",
    multiple=True,
    metavar="PREFIX",
    help="Chain prefix besides VIPD and the recorded ones; repeatable.",
)
@click.option(
    "--state-dir",
    metavar="DIR",
    type=DIRECTORY,
    help="Where the daemon kept its record; default: as vipd.yaml says.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed.")
@click.option("--force", is_flag=True, help="Clean up even while vipd runs here; it may put its rules back.")
def cleanup(prefix: tuple[str, ...], state_dir: str | None, dry_run: bool, force: bool) -> int:
    """Remove every rule of vipd, of both address families and both iptables variants and in tables of others,
    its routes to VIPs and their device, and put back kernel settings that vipd changed. Established flows
    lose their translation. What is declared or stored stays. No daemon, settings or record are needed.
    """
    directory = Path(state_dir) if state_dir else _configured_state_dir()
    if os.geteuid() != 0 and not dry_run:
        raise CliError("cleanup needs root", hint="sudo vipctl cleanup", code=UNREACHABLE)
    if not (force or dry_run):
        _refuse_beside_daemon(directory)
    record = HostChanges(directory)
    prefixes = dict.fromkeys((DEFAULT_PREFIX, *prefix, *record.read().prefixes))
    try:
        return asyncio.run(_clean(list(prefixes), record, dry_run))
    except ApplyError as error:
        raise CliError(error.what, error.why, error.hint) from None
    except OSError as error:
        raise CliError("cleanup is not complete", str(error), "run it again as root") from None


async def _clean(prefixes: list[str], record: HostChanges, dry_run: bool) -> int:
    # First: no router is to send packets here when nothing translates them any more.
    withdrawn = [*remove_announced(record, dry_run=dry_run), *remove_answers(dry_run=dry_run)]
    print("".join(f"{'would delete' if dry_run else 'deleted'} {thing}\n" for thing in withdrawn), end="")
    leftovers = await find_leftovers(prefixes, run)
    fast_paths = await find_fast_paths(prefixes, run)
    tables = await nftables.find_leftovers(prefixes)
    accepts = await forward_accept.find_leftovers(prefixes, record.read().accepts, run)
    for leftover in leftovers:
        print(_leftover_text(leftover, dry_run))
    for table in tables:
        print(f"would remove {table}" if dry_run else f"removing {table}")
    others = [f"table {fast_path_table(prefix)}" for prefix in fast_paths]
    others += [f"vipd's accept in {accept.forward_chain}" for accept in accepts]
    for told in others:
        print(f"would remove {told}" if dry_run else f"removing {told}")
    if dry_run:
        return await _preview(prefixes, record)
    # First: its flows need the rules from now on.
    await remove_fast_paths(fast_paths, run)
    await remove(leftovers, run)
    await nftables.remove(tables, run)
    await forward_accept.remove(accepts, run)
    found = bool(withdrawn or leftovers or tables or others)
    async for undone in _undo(record):
        print(undone)
        found = True
    for warning in record.warnings():
        print(f"vipctl: {warning}", file=sys.stderr)
    record.clear()
    if await find_leftovers(prefixes, run) or await nftables.find_leftovers(prefixes):
        print("vipctl: some rules came back; is another vipd at work?", file=sys.stderr)
        return FAILED
    print("nothing of vipd is left in the kernel" if found else "there was nothing of vipd in the kernel")
    return OK


async def _undo(record: HostChanges) -> AsyncIterator[str]:
    """Undo changes besides rules; yields each one that was undone."""
    for table in await remove_empty_tables(record.read().tables, run):
        yield f"removed the empty table {table}"
    for thing in await restore_routes(record):
        yield f"deleted {thing}"
    for setting in restore_sysctls(record):
        yield f"set {setting}"


async def _preview(prefixes: list[str], record: HostChanges) -> int:
    """Print what would be done besides the removal of rules."""
    for table in await remove_empty_tables(record.read().tables, run, foretold=prefixes):
        print(f"would remove the empty table {table}")
    for thing in await restore_routes(record, dry_run=True):
        print(f"would delete {thing}")
    for setting in restore_sysctls(record, dry_run=True):
        print(f"would set {setting}")
    return OK


def _leftover_text(leftover: Leftover, dry_run: bool) -> str:
    chains = sum(not change.builtin for change in leftover.plan.changes)
    jumps = sum(len(c.before or ()) - len(c.after or ()) for c in leftover.plan.changes if c.builtin)
    if dry_run:
        return f"# {leftover.tools.version_text}\n{leftover.plan}".rstrip("\n")
    return f"{leftover.tools.version_text}: removing {chains} chains and {jumps} jumps"


def _configured_state_dir() -> Path:
    """The state directory of vipd.yaml; the usual one when that file is missing or broken."""
    default = Path(str(Settings.model_fields["state_dir"].default))
    try:
        return Path(str(SettingsFile.read(DEFAULT_CONFIG).values.get("state_dir", default)))
    except SettingsError:
        return default


def _refuse_beside_daemon(state_dir: Path) -> None:
    """A running daemon would restore everything; one in another network namespace still needs its record."""
    try:
        pid = int(read_own(state_dir / LOCK, _MAX_LOCK_BYTES))
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        here, there = Path("/proc/self/ns/net").stat(), Path(f"/proc/{pid}/ns/net").stat()
    except (OSError, ValueError):
        if _is_held(state_dir):
            hint = "systemctl stop vipd first, or --force"
            raise CliError("vipd is running", f"it holds {state_dir}", hint) from None
        return
    if b"vipd" not in command:
        return
    if (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
        hint = "systemctl stop vipd first, or --force"
        raise CliError("vipd is running", f"pid {pid} would put its rules back", hint)
    why = f"it belongs to a vipd in another network namespace (pid {pid})"
    raise CliError(f"{state_dir} is in use", why, "give this namespace's own with --state-dir")


def _is_held(state_dir: Path) -> bool:
    """Whether a process has locked a state directory, or its lock file, in which no pid could be written."""
    ways = (
        lambda: open_own(state_dir / LOCK, os.O_RDONLY),
        lambda: os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC),
    )
    return any(map(_is_locked, ways))


def _is_locked(opened: Callable[[], int]) -> bool:
    """Tried out: the kernel's list of locks has inodes, which files of several file systems share."""
    try:
        descriptor = opened()
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False
