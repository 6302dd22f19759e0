"""The common part of verbs that change something: their options, and the output of the result."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import click

from vipd.cli.errors import OK, UNREACHABLE, CliError, combine_errors
from vipd.cli.output import document, output_option, prose, screen, socket_option, store_option
from vipd.cli.words import seconds
from vipd.model.formatting import duration
from vipd.observe.api_client import Json

T = TypeVar("T")

ACTIONS = ("created", "changed", "removed", "unchanged")


def change_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a changing verb `--dry-run`, `-q`, `-o` and `--socket`; it takes `dry_run`, `quiet` and `form`."""
    command = click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")(command)
    command = click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")(command)
    return socket_option(output_option("text", "json", "yaml")(command))


def service_change_options(command: Callable[..., int]) -> Callable[..., int]:
    """The same for a verb that changes services, with `--store` and `--confirm`; it takes `confirm`, in
    seconds."""
    command = click.option(
        "--confirm",
        metavar="TIME",
        callback=lambda _context, _option, given: None if given is None else seconds(given),
        help="Take the change back after this time, as 60s, unless vipctl confirm comes before.",
    )(command)
    return store_option(change_options(command))


def print_change(
    answer: Json, details: str, *, form: str, quiet: bool, dry_run: bool, confirm: int | None = None
) -> int:
    """Print one sentence on the change of one service; `details` follow in brackets. `confirm`: the seconds
    in which the change was to be confirmed.

    Raises CliError if the change is stored but not in the kernel, or does not wait for a confirmation.
    """
    unapplied = _unapplied(answer, dry_run)
    if form != "text":
        print(document(answer, form))
    elif not quiet and unapplied is None:
        _warn(answer)
        for result in answer["results"]:
            more = f" ({details})" if details else ""
            print(f"{result['action']} {result['name']}{more}{_kept({**answer, **result}, dry_run)}")
        _print_confirmation(answer, confirm)
    _require_confirmation(answer, confirm, dry_run)
    if unapplied is not None:
        raise unapplied
    return OK


def print_all(answer: Json, *, form: str, quiet: bool, dry_run: bool, confirm: int | None = None) -> int:
    """Print a line for each service and a summary. `confirm`, and what it raises, as for `print_change`."""
    unapplied = _unapplied(answer, dry_run)
    if form != "text":
        print(document(answer, form))
    elif not quiet:
        _warn(answer)
        for result in answer["results"]:
            print(f"{result['action']:9}  {result['name']}")
        print(summary(answer) + ("" if unapplied else _kept(answer, dry_run)))
        _print_confirmation(answer, confirm)
    _require_confirmation(answer, confirm, dry_run)
    if unapplied is not None:
        raise unapplied
    return OK


def _print_confirmation(answer: Json, confirm: int | None) -> None:
    if waits := answer.get("confirmation"):
        print("\n".join(prose(_unconfirmed(waits), screen())))
    elif confirm is not None and not answer["changed"]:
        print("nothing has changed, so nothing waits for a confirmation")


def _require_confirmation(answer: Json, confirm: int | None, dry_run: bool) -> None:
    """A version without confirmations does not look at the request for one."""
    if confirm is not None and answer["changed"] and not dry_run and "confirmation" not in answer:
        what = "the change stays without a confirmation: vipd is older than vipctl"
        raise CliError(what, hint="systemctl restart vipd; the next change can be confirmed")


def _warn(answer: Json) -> None:
    terminal = screen(sys.stderr)
    for warning in answer.get("warnings", ()):
        print("\n".join(prose(f"warning: {warning}", terminal)), file=sys.stderr)


def _unconfirmed(waits: Json) -> str:
    within = f"in {duration(waits['seconds_left'])}, at {waits['until']}"
    return f"vipctl confirm keeps this; otherwise vipd takes it back {within}"


def unconfirmed_text(waits: Json) -> str:
    """`revision 7 is taken back in 42s, at 2026-01-01T00:00:00Z, unless vipctl confirm comes before`."""
    within = f"in {duration(waits['seconds_left'])}, at {waits['until']}"
    return f"revision {waits['revision']} is taken back {within}, unless vipctl confirm comes before"


def rehearse_each(targets: Sequence[T], change: Callable[[T, bool], Json]) -> list[Json]:
    """The answers to dry runs of a change of each target: of several none is changed unless all are right.

    `change` gets a target and whether it is a dry run. Raises CliError with every refusal.
    """
    answers, failures = change_each(targets, lambda target, _: change(target, True))
    if not failures:
        return answers
    if len(targets) == 1 or failures[0].code == UNREACHABLE:
        raise failures[0]
    what = f"{len(failures)} of {len(targets)} cannot be changed, so none was"
    raise combine_errors([*failures, CliError(what, code=failures[-1].code)])


def change_each(targets: Sequence[T], change: Callable[[T, bool], Json]) -> tuple[list[Json], list[CliError]]:
    """The answers to a change of each target, and what failed; a failure does not prevent the others."""
    answers, failures = [], []
    for target in targets:
        try:
            answers.append(change(target, False))
        except CliError as err:
            failures.append(err)
    return answers, failures


def merged(answers: Sequence[Json]) -> Json:
    """Merges answers, at least one, into one."""
    whole = dict(answers[0])
    for answer in answers[1:]:
        whole["changed"] |= answer["changed"]
        if not answer["applied"]:
            whole |= {"applied": False, "message": answer.get("message")}
    # In etcd each has its own place.
    apart = len({answer.get("stored") for answer in answers}) > 1
    whole["results"] = [
        {**result, "stored": answer["stored"]} if apart else result
        for answer in answers
        for result in answer["results"]
    ]
    if any("warnings" in answer for answer in answers):
        whole["warnings"] = [warning for answer in answers for warning in answer.get("warnings", ())]
    return whole


def summary(answer: Json) -> str:
    """`2 created, 7 unchanged`, or `no services`."""
    numbers = Counter(str(result["action"]) for result in answer["results"])
    return ", ".join(f"{numbers[action]} {action}" for action in ACTIONS if numbers[action]) or "no services"


def _kept(answer: Json, dry_run: bool) -> str:
    if dry_run:
        return "; dry run: nothing was done"
    if not answer["changed"] or not answer.get("stored"):
        return ""
    if {result["action"] for result in answer["results"]} <= {"removed", "unchanged"}:
        # A removed service does not survive anything.
        return f"; no longer in {answer['stored']}"
    if answer.get("confirmation"):
        return f"; stored in {answer['stored']}"
    lasting = "for every host" if str(answer["stored"]).startswith("etcd ") else "survives reboot"
    return f"; stored in {answer['stored']}; {lasting}"


def _unapplied(answer: Json, dry_run: bool) -> CliError | None:
    if dry_run or answer["applied"]:
        return None
    names = [str(result["name"]) for result in answer["results"]]
    what = names[0] if len(names) == 1 else f"the change of {len(names)} services"
    stored = f"stored in {answer['stored']}, but " if answer.get("stored") else ""
    return CliError(
        f"{what}: {stored}not in the kernel yet",
        str(answer.get("message") or ""),
        "vipd goes on trying; vipctl status shows how it goes",
    )
