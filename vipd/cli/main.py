"""`vipctl`: finds the verb, imports its module, and converts exceptions to messages and exit codes."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, NoReturn

import click

from vipd.cli.argument_types import FILE
from vipd.cli.connection import choose_socket, choose_store
from vipd.cli.errors import FAILED, INTERRUPTED, OK, USAGE, CliError
from vipd.cli.output import STORES
from vipd.cli.terminal import guarded, guarded_output
from vipd.model.text import one_line


class Verb(NamedTuple):
    """The module of a verb, and a short description: help needs no import."""

    module: str
    command: str
    summary: str


VERB_GROUPS: dict[str, dict[str, Verb]] = {
    "Services": {
        "add": Verb("services", "add", "Add a service"),
        "set": Verb("services", "set_fields", "Change a service, or the weight of a backend"),
        "edit": Verb("edit", "edit", "Change a service in an editor"),
        "remove": Verb("services", "remove", "Remove services"),
        "add-backend": Verb("backends", "add_backend", "Add backends to a service"),
        "remove-backend": Verb("backends", "remove_backend", "Remove backends from a service"),
    },
    "Backends": {
        "drain": Verb("overrides", "drain", "Give a backend no new flows"),
        "disable": Verb("overrides", "disable", "Take a backend out, its flows too"),
        "resume": Verb("overrides", "resume", "Take a drain, a disable or a weight back"),
        "overrides": Verb("overrides", "overrides", "List the orders in force"),
        "register": Verb("register", "register", "Have a backend take part while this runs; needs no daemon"),
    },
    "Look": {
        "list": Verb("list", "list_services", "List services"),
        "describe": Verb("describe", "describe", "Show all about a service"),
        "explain": Verb("explain", "explain", "Show what the rules do to one packet, and why"),
        "rules": Verb("rules", "rules", "Show the rules that the kernel has, as a tree or a drawing"),
        "trace": Verb("trace", "trace", "Show what a real packet meets in the kernel; needs root"),
        "stats": Verb("stats", "stats", "Show numbers: new flows, flows now, traffic"),
        "top": Verb("top", "top", "Show which services are busy, live"),
        "flows": Verb("flows", "flows", "Show the flows of a service, one by one"),
        "status": Verb("status", "status", "Show how the daemon is doing"),
        "doctor": Verb("doctor", "doctor", "Find what is wrong on this host, and how to mend it"),
        "events": Verb("events", "events", "Show what has happened, why, and by whom"),
        "history": Verb("history", "history", "Show who changed which services, and when"),
        "export": Verb("list", "export", "Print every service as a declaration"),
    },
    "Declarations": {
        "check": Verb("check", "check", "Look for problems in files; needs no daemon"),
        "diff": Verb("declare", "diff", "Show what applying files, or the daemon, would change"),
        "apply": Verb("declare", "apply", "Make the daemon hold the services of files"),
        "confirm": Verb("history", "confirm", "Keep a change that would be taken back"),
        "rollback": Verb("history", "rollback", "Go back to what the store held before"),
        "convert": Verb("convert", "convert", "Print other formats as declarations; needs no daemon"),
        "render": Verb("render", "render", "Print the rules that files compile to; needs no daemon"),
    },
    "Fleet": {
        "fleet": Verb("fleet", "fleet", "Show how all hosts of the same etcd are doing"),
        "host": Verb("host", "host", "Take this host out of service, and put it back"),
        "ready": Verb("ready", "ready", "Tell by its exit code whether this host serves a service"),
        "announce": Verb("announce", "announce", "Tell a program what this host announces; needs no daemon"),
        "accept-removal": Verb(
            "fleet", "accept_removal", "Let go of services that vanished from files or etcd"
        ),
    },
    "Daemon": {
        "reload": Verb("status", "reload", "Make the daemon read its files again"),
        "cleanup": Verb("cleanup", "cleanup", "Remove every rule of vipd from the kernel; needs no daemon"),
        "set-dataplane": Verb("set_dataplane", "set_dataplane", "Change what programs the kernel"),
        "version": Verb("status", "version", "Print the versions of vipctl and vipd"),
        "completion": Verb("completion", "completion", "Print the completion script of a shell"),
    },
}
"""Every verb, by family, in the order of the help."""

VERBS = {name: verb for family in VERB_GROUPS.values() for name, verb in family.items()}

HIDDEN = {"complete": Verb("completion", "complete", "Answer a shell that completes a word")}
"""Verbs that programs call; help does not list them."""

VERB_ALIASES = {
    "create": "add",
    "new": "add",
    "change": "edit",
    "delete": "remove",
    "del": "remove",
    "rm": "remove",
    "get": "list",
    "ls": "list",
    "info": "describe",
    "start": "resume",
    "stop": "disable or drain",
    "flush": "cleanup",
    "clear": "cleanup",
    "clean": "cleanup",
    "import": "apply or convert",
    "load": "apply",
    "config": "edit or export",
    "configure": "set or edit",
    "update": "set or edit",
    "modify": "set or edit",
    "dump": "export",
    "save": "export",
    "restart": "reload",
    "refresh": "reload",
    "install": "apply",
    "health": "status or doctor",
    "connections": "flows",
    "logs": "events",
    "watch": "top or events",
    "diagnose": "doctor",
    "purge": "cleanup",
    "show": "describe",
    "enable": "resume",
    "undrain": "resume",
    "maintenance": "drain",
    "validate": "check",
    "test": "check",
    "resync": "reload",
    "commit": "confirm",
    "abort": "rollback",
    "undo": "rollback",
    "revert": "rollback",
    "log": "history",
    "revisions": "history",
}
"""Words of other programs for these verbs."""


_OF_CHECK = "it belongs to the check: --check '{type: tcp, %s: %s}'"

OPTION_WORDS = {
    "--interval": _OF_CHECK % ("interval", "2s"),
    "--timeout": _OF_CHECK % ("timeout", "1s"),
    "--rise": _OF_CHECK % ("rise", "2"),
    "--fall": _OF_CHECK % ("fall", "3"),
    "--weight": "write it behind the backend: ADDR@3",
    "--backend": "write backends without an option, behind the VIP or TARGET",
    "--backends": "write backends without an option, behind the VIP or TARGET",
    "--server": "write backends without an option, behind the VIP or TARGET",
    "--vip": "write the VIP first, without an option",
    "--address": "write the VIP first, without an option",
    "--protocol": "write it behind the port: 53/udp",
    "--proto": "write it behind the port: 53/udp",
}
"""How to write what other verbs or programs have an option for, by the option."""
EXTRA_WORDS = {
    "events": "vipctl events --service TARGET shows those of one service",
    "status": "vipctl describe TARGET shows one service",
    "set": "write options behind TARGET: --affinity 10m",
    "top": "vipctl stats TARGET --rate 2s shows one service",
    "explain": "the source is an option: --from ADDR",
}
"""What is meant by a word too many for these verbs."""
_HINTED_VERBS = ("add", "set", "add-backend")


class LazyGroup(click.Group):
    """Imports a verb's module when that verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the help."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name; None if there is none."""
        verb = VERBS.get(cmd_name) or HIDDEN.get(cmd_name)
        if verb is None:
            return None
        command = getattr(import_module(f"vipd.cli.{verb.module}"), verb.command)
        if not isinstance(command, click.Command):
            raise TypeError(f"vipd.cli.{verb.module}.{verb.command} is not a command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but an unknown verb is answered with those that are like it."""
        word = args[0]
        if word == "help":
            if len(args) == 1:
                print(ctx.get_help())
                ctx.exit(OK)
            word, *_ = args = [*args[1:2], "-h"]
        if self.get_command(ctx, word) is None and not word.startswith("-") and not ctx.resilient_parsing:
            raise CliError(f"no verb {word!r}", hint=_similar_verbs(word), code=2)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Verbs by family."""
        column = max(map(len, VERBS))
        for family, verbs in VERB_GROUPS.items():
            with formatter.section(family):
                formatter.write_dl([(name.ljust(column), verb.summary) for name, verb in verbs.items()])


def _similar_verbs(word: str) -> str:
    # Imported here because only a typing error needs it.
    from vipd.model.misspelling import nearest

    word = word.lower()
    close = [VERB_ALIASES[word]] if word in VERB_ALIASES else nearest(word, VERBS)
    return f"did you mean {' or '.join(close)}?" if close else "vipctl -h lists the verbs"


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from vipd import __version__

        print(f"vipctl {__version__}")
        ctx.exit(OK)


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    subcommand_metavar="VERB ...",
    epilog="A TARGET is a service's name, one of its frontends, as 10.96.0.10:53/udp or [fd00::10]:53/udp, "
    "or an address that it alone has. vipctl help VERB tells more. "
    "Exit codes: 0 done or nothing to do, 1 failed or refused, 2 usage, 3 not found, "
    "4 daemon unreachable or permission denied, 5 what was waited for did not come in time.",
)
@click.option(
    "--socket",
    envvar="VIPD_SOCKET",
    metavar="PATH",
    type=FILE,
    help="The daemon's socket; default: $VIPD_SOCKET, else /run/vipd/vipd.sock.",
)
@click.option(
    "--store",
    type=click.Choice(STORES),
    help="Where services are kept: on this host, or for all; default: as the daemon's setting says.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version; vipctl version asks the daemon for its own, too.",
)
@click.pass_context
def cli(ctx: click.Context, socket: str | None, store: str | None) -> None:
    """Look at and change what vipd balances."""
    choose_socket(ctx, socket)
    choose_store(ctx, store)
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def run(arguments: Sequence[str]) -> int:
    """Carry out one command line; the exit code. Errors are printed to stderr."""
    with guarded_output():
        return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    try:
        ended = cli.main(list(arguments), prog_name="vipctl", standalone_mode=False)
        sys.stdout.flush()
    except CliError as err:
        for line in err.lines():
            _print_error(line)
        return err.code
    except click.ClickException as err:
        _print_error(f"vipctl: {_usage_text(err)}")
        return err.exit_code
    except UnicodeEncodeError as err:
        bad = err.object[err.start : err.end].encode(errors="backslashreplace").decode()
        _print_error(f"vipctl: {bad} is no text: write UTF-8")
        return USAGE
    except (click.Abort, KeyboardInterrupt):
        _print_error("vipctl: interrupted")
        return INTERRUPTED
    except OSError as err:
        return _cannot_print(err)
    return ended if isinstance(ended, int) else OK


def _usage_text(err: click.ClickException) -> str:
    # Click lists choices on lines of their own.
    # Its own suggestions only share letters: --internal-policy for --interval.
    message = err.message if isinstance(err, click.NoSuchOption) else err.format_message()
    text = (
        " ".join(message.replace("valid integer range", "whole number").split())
        .rstrip(".")
        .replace(". Choose from: ", ": one of ")
    )
    text = text[:1].lower() + text[1:]
    if isinstance(err, click.UsageError) and err.ctx is not None:
        hint = (
            _meant_option(err) or _meant_by_more(err) or _similar_choice(err) or f"{err.ctx.command_path} -h"
        )
        return f"{text}; hint: {hint}"
    return text


def _meant_option(err: click.UsageError) -> str:
    """How to write what other programs have an option for; empty if that is unknown."""
    if not isinstance(err, click.NoSuchOption) or err.ctx is None:
        return ""
    option, command = err.option_name, err.ctx.command
    if command.name in _HINTED_VERBS and option in OPTION_WORDS:
        return OPTION_WORDS[option]
    from vipd.model.misspelling import nearest

    known = [name[2:] for param in command.params for name in param.opts if name.startswith("--")]
    close = [f"--{name}" for name in nearest(option[2:], known)] if option.startswith("--") else []
    return f"did you mean {' or '.join(close)}?" if close else ""


def _meant_by_more(err: click.UsageError) -> str:
    """What was meant by a word too many; empty if that is unknown."""
    if err.ctx is None or "unexpected extra argument" not in err.message:
        return ""
    return EXTRA_WORDS.get(err.ctx.command.name or "", "")


def _similar_choice(err: click.UsageError) -> str:
    """What was meant by a word that is none of an argument's choices; empty if nothing is like it."""
    kind = err.param.type if isinstance(err, click.BadParameter) and err.param is not None else None
    if not isinstance(kind, click.Choice):
        return ""
    from vipd.model.misspelling import nearest

    words = re.findall("'([^']*)'", err.message)
    choices = [*map(str, kind.choices)] if words else []
    close = [choice for choice in choices if choice.startswith(words[0].lower())] or (
        nearest(words[0], choices) if words else []
    )
    return f"did you mean {close[0]}?" if close else ""


def _print_error(line: str) -> None:
    line = one_line(line)
    if sys.stderr.isatty():
        # Imported here because only a person at a terminal needs it.
        from vipd.cli.output import prose, screen

        line = "\n".join(prose(line, screen(sys.stderr)))
    print(line, file=sys.stderr)


def _cannot_print(err: OSError) -> int:
    # Buffered output cannot be written either; the interpreter would try at exit, and print an error.
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123  pathlib is not needed for anything else here
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    if not isinstance(err, BrokenPipeError):
        _print_error(f"vipctl: cannot write the output: {err.strerror or err}")
    return FAILED


def main() -> NoReturn:
    """The entry point of `vipctl`."""
    # `vipctl list | head` ends like any Unix program whose reader has exited.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        # If the locale lacks a character, a mark replaces it, instead of an error in the middle of a table.
        # In a pipe, too, the next program gets a line as soon as it is printed.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace", line_buffering=True)
    sys.stdout, sys.stderr = guarded(sys.stdout), guarded(sys.stderr)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
