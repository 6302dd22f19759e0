"""`vipctl drain`, `disable`, `resume` and `overrides`: overrides of backends, apart from declarations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from math import ceil
from typing import Any, TypeVar

import click

from vipd.cli.argument_types import SERVICE_BACKEND
from vipd.cli.changes import change_each, change_options, rehearse_each
from vipd.cli.connection import Daemon, connect
from vipd.cli.errors import OK, USAGE, CliError, combine_errors
from vipd.cli.output import Column, document, output_option, screen, socket_option, table
from vipd.cli.waiting import TargetQuery, wait_until_drained
from vipd.cli.words import backend_names, is_backend, seconds, split_backend
from vipd.model.formatting import counted, duration
from vipd.observe.api_client import Json

COLUMNS = (
    Column("BACKEND", min_width=24),
    Column("ORDER"),
    Column("FOR"),
    Column("BY", min_width=8),
    Column("SINCE"),
    Column("UNTIL"),
    Column("REASON"),
)

T = TypeVar("T")

HOST = "host"


def _target_options(command: Callable[..., int]) -> Callable[..., int]:
    command = click.option(
        "--address", metavar="ADDR", help="That address in every service, also in those to come."
    )(command)
    return click.argument("backends", metavar="[TARGET/BACKEND]...", nargs=-1, type=SERVICE_BACKEND)(command)


def _override_options(command: Callable[..., int]) -> Callable[..., int]:
    command = click.option("--for", "lasting", metavar="TIME", help="Resume after this time, as 2h.")(command)
    return click.option("--reason", metavar="TEXT", help="Why; shown with the backend.")(command)


def _fleet_option(command: Callable[..., int]) -> Callable[..., int]:
    return click.option("--fleet", is_flag=True, help="For every host of the same etcd, not this one alone.")(
        command
    )


@click.command()
@_target_options
@_fleet_option
@click.option(
    "--wait", is_flag=True, help="Wait until no flow is left; exit code 5 when --timeout comes first."
)
@click.option("--timeout", metavar="TIME", help="Longest wait, as 5m; without it as long as it takes.")
@click.option(
    "--pins-until",
    "pins",
    metavar="TIME",
    help="For this time, as 10m, clients with affinity to it still get there; else they move at once.",
)
@_override_options
@change_options
def drain(
    *,
    backends: tuple[str, ...],
    address: str | None,
    fleet: bool,
    wait: bool,
    timeout: str | None,
    pins: str | None,
    reason: str | None,
    lasting: str | None,
    **telling: Any,
) -> int:
    """Give a backend no new flows; those it has go on. It stays so until `vipctl resume`.

    \b
    vipctl drain dns/10.244.2.21 --wait --timeout 5m
    vipctl drain --address 10.244.2.21 --wait --reason "kernel update"
    """
    if timeout is not None and not wait:
        raise CliError("--timeout is for --wait", hint="add --wait", code=USAGE)
    longest = None if timeout is None else seconds(timeout)
    order: Json = {"admin": "draining", "reason": reason, "for": _seconds(lasting), "pins": _seconds(pins)}
    subjects = _targets(backends, address, "drain")
    daemon = connect()
    _send_overrides(daemon, subjects, order, telling, fleet=fleet, over_restart=wait)
    if wait and not telling["dry_run"]:
        wait_until_drained(daemon, subjects, longest, quiet=telling["quiet"] or telling["form"] != "text")
    return OK


@click.command()
@_target_options
@_fleet_option
@_override_options
@change_options
def disable(
    *,
    backends: tuple[str, ...],
    address: str | None,
    fleet: bool,
    reason: str | None,
    lasting: str | None,
    **telling: Any,
) -> int:
    """Take a backend out: no new flows, and those it has end as if it were removed.

    \b
    vipctl disable web/10.244.2.21 --reason "disk failure"
    """
    order: Json = {"admin": "disabled", "reason": reason, "for": _seconds(lasting)}
    _send_overrides(connect(), _targets(backends, address, "disable"), order, telling, fleet=fleet)
    return OK


@click.command()
@_target_options
@_fleet_option
@click.option("--all", "everything", is_flag=True, help="Take every order back.")
@change_options
def resume(
    *, backends: tuple[str, ...], address: str | None, fleet: bool, everything: bool, **telling: Any
) -> int:
    """Take orders about a backend back: drain, disable and weight.

    \b
    vipctl resume dns/10.244.2.21
    vipctl resume --address 10.244.2.21
    """
    if backends == ("all",):
        raise CliError("all names no backend", hint="vipctl resume --all takes every order back", code=USAGE)
    if everything and (backends or address):
        raise CliError("--all is for every order", hint="leave the backends out", code=USAGE)
    subjects: list[Json] = [{"all": True}] if everything else [*_targets(backends, address, "resume")]
    daemon = connect()

    def resumed(subject: Json, rehearsal: bool) -> Json:
        return daemon.change("DELETE", "overrides", body=subject, dry_run=rehearsal, fleet=fleet)

    answers, failures = _change_all(subjects, resumed, dry_run=telling["dry_run"])
    _print_resumed(answers, failures, telling)
    return OK


@click.command()
@output_option("table", "json", "yaml")
@socket_option
def overrides(form: str) -> int:
    """List the orders in force: who gave them, when, why and until when."""
    found = connect().get("overrides")["overrides"]
    if form != "table":
        print(document({"overrides": found}, form))
    elif found:
        print("\n".join(table(COLUMNS, [_row(override) for override in found], screen())))
    else:
        print("no orders: every backend is as declared", file=sys.stderr)
    return OK


def override_text(override: Json) -> str:
    """`draining`, `disabled`, `weight 5`, or two of them."""
    words = [str(override["admin"])] if override.get("admin", "active") != "active" else []
    words += [f"weight {override['weight']}"] if "weight" in override else []
    return ", ".join(words)


def _row(override: Json) -> list[str]:
    place = f"{override['service']}/{override['backend']}" if override["service"] else override["backend"]
    until = override.get("until")
    return [
        str(place),
        override_text(override),
        "fleet" if _of_fleet(override) else "this host",
        str(override["by"]),
        f"{_time_distance(override['at'])} ago",
        f"in {time_left(until)}" if until else "resumed",
        str(override.get("reason", "")),
    ]


def _time_distance(moment: str) -> str:
    """Distance of a time from now."""
    return duration(abs((datetime.fromisoformat(moment) - datetime.now(UTC)).total_seconds()))


def time_left(moment: str) -> str:
    """Time left until then, rounded up: an override for 2h has 2h left a moment later."""
    seconds = ceil((datetime.fromisoformat(moment) - datetime.now(UTC)).total_seconds())
    unit = 3600 if seconds > 86400 else 60 if seconds > 3600 else 1
    return duration(-(-max(0, seconds) // unit) * unit)


def _targets(backends: Sequence[str], address: str | None, verb: str) -> list[TargetQuery]:
    if bool(backends) == (address is not None):
        hint = "name backends as dns/10.244.0.5, or --address ADDR for every service"
        raise CliError("no backend is named" if not backends else "too much at once", hint=hint, code=USAGE)
    if address is not None:
        return [{"address": backend_names([address])[0]}]
    target, *rest = backends
    if rest and not is_backend(target) and "/" not in target and all(map(is_backend, rest)):
        hint = f"vipctl {verb} {' '.join(f'{target}/{backend}' for backend in rest)}"
        raise CliError(f"{target} names no backend", hint=hint, code=USAGE)
    words = [place for word in backends for place in _single_places(word)]
    places = [split_backend(word, f"vipctl {verb} {{}}", f"vipctl {verb} --address {{}}") for word in words]
    return [{"service": target, "backend": backend} for target, backend in places]


def _single_places(word: str) -> list[str]:
    """`web/10.244.0.5,10.244.0.6` as two."""
    first, *others = [part for part in word.split(",") if part] or [word]
    service = first.rpartition("/")[0]
    return [first, *(other if "/" in other or not service else f"{service}/{other}" for other in others)]


def _seconds(word: str | None) -> int | None:
    return None if word is None else seconds(word)


def _send_overrides(
    daemon: Daemon,
    targets: Sequence[TargetQuery],
    override: Json,
    output_options: Json,
    *,
    fleet: bool,
    over_restart: bool = False,
) -> None:
    """Set an override for each target, or for none if one is refused. `over_restart`: a daemon that stops
    after storing it is no failure."""

    def ordered(subject: TargetQuery, rehearsal: bool) -> Json:
        body = {**subject, **{key: value for key, value in override.items() if value is not None}}
        return daemon.change("POST", "overrides", body=body, dry_run=rehearsal, fleet=fleet)

    answers, failures = _change_all(targets, ordered, dry_run=output_options["dry_run"])
    if output_options["form"] != "text":
        _print_documents(answers, output_options["form"])
    elif not output_options["quiet"]:
        for answer in answers:
            _report_given(answer, dry_run=output_options["dry_run"])
    failures += _unapplied([a for a in answers if not (over_restart and a.get("stopping"))], output_options)
    if failures:
        raise combine_errors(failures)


def _change_all(
    targets: Sequence[T], change: Callable[[T, bool], Json], *, dry_run: bool
) -> tuple[list[Json], list[CliError]]:
    """The answers, and what failed although all targets are right. Raises CliError if one is not."""
    rehearsed = rehearse_each(targets, change) if dry_run or len(targets) > 1 else []
    return (rehearsed, []) if dry_run else change_each(targets, change)


def _print_documents(answers: Sequence[Json], form: str) -> None:
    """The answer about one backend unchanged; several as `changes` of one document."""
    if len(answers) > 1:
        bare = [{key: value for key, value in each.items() if key != "apiVersion"} for each in answers]
        print(document({"changes": bare}, form))
    elif answers:
        print(document(answers[0], form))


def _report_given(answer: Json, *, dry_run: bool) -> None:
    override = answer["override"]
    state = override_text(override) if answer["changed"] else f"unchanged: {override_text(override)}"
    about = f" in {counted(len(answer['backends']), 'service')}" if not override["service"] else ""
    dry = "; dry run: nothing was done" if dry_run else f"; ends {_end(override)}"
    where = " on every host" if _of_fleet(override) else ""
    print(f"{state} {_place(override)}{about}{where}{dry}")


def _end(override: Json) -> str:
    if not override.get("until"):
        return "by vipctl resume --fleet" if _of_fleet(override) else "by vipctl resume"
    return f"in {time_left(override['until'])}"


def _print_resumed(answers: Sequence[Json], failures: Sequence[CliError], output_options: Json) -> None:
    if output_options["form"] != "text":
        _print_documents(answers, output_options["form"])
    elif not output_options["quiet"]:
        taken = [override for answer in answers for override in answer["overrides"]]
        dry = "; dry run: nothing was done" if output_options["dry_run"] else ""
        for override in taken:
            print(f"resumed {_place(override)} (was {override_text(override)}){dry}")
        if not taken and not failures:
            print("unchanged: there was no such order")
        for override in (override for answer in answers for override in answer.get("elsewhere", ())):
            way = "vipctl resume --fleet" if _of_fleet(override) else "vipctl resume"
            print(f"{_place(override)} is still {override_text(override)}; hint: {way} takes that back, too")
    if failures := [*failures, *_unapplied(answers, output_options)]:
        raise combine_errors(failures)


def _of_fleet(override: Json) -> bool:
    return str(override.get("scope", HOST)) != HOST


def _place(override: Json) -> str:
    return f"{override['service']}/{override['backend']}" if override["service"] else str(override["backend"])


def _unapplied(answers: Sequence[Json], output_options: Json) -> list[CliError]:
    if output_options["dry_run"]:
        return []
    what, hint = "the order is stored, but not in the kernel yet", "vipctl status shows how it goes"
    missing = [answer for answer in answers if not answer["applied"]]
    return [CliError(what, str(answer.get("message") or ""), hint) for answer in missing]
