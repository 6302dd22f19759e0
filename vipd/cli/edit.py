"""`vipctl edit`: one service as YAML in the user's editor, checked and applied when the editor ends."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from vipd.cli.argument_types import OWN_TARGET
from vipd.cli.changes import print_change, service_change_options
from vipd.cli.connection import Daemon, connect
from vipd.cli.difference import print_difference, service_of
from vipd.cli.errors import INTERRUPTED, CliError
from vipd.cli.output import document
from vipd.declaration.operations import spec_of
from vipd.declaration.problems import Problem, unreadable_problem
from vipd.declaration.reader import parse_declaration
from vipd.declaration.writer import format_declaration
from vipd.model.formatting import counted
from vipd.model.limits import FILE_BYTES
from vipd.model.service import Service
from vipd.observe.api_client import DaemonError, Json

VARIABLES = ("VISUAL", "EDITOR")
EDITORS = ("editor", "vi", "nano")
"""Tried in this order where no variable names one; `editor` is Debian's alternative."""

HEADER = (
    "# Save and leave the editor: vipd checks the service and applies it.",
    "# An unchanged or an empty file changes nothing. Comments are not kept.",
)

_MENDABLE = ("invalid", "conflict", "malformed", "too-large")
"""Kinds of errors that another text may avoid."""


@click.command()
@click.argument("target", metavar="TARGET", type=OWN_TARGET)
@service_change_options
def edit(target: str, **display: Any) -> int:
    """Change a service that vipctl added, as YAML in an editor: $VISUAL, $EDITOR, else editor, vi or nano.

    The service is checked and applied when the editor ends. While it has problems, the editor opens again
    with the problems on top. Nothing changes when the text is unchanged or empty, when the editor fails, or
    when somebody else has changed the service meanwhile. A text that was not applied is kept in a file.

    \b
    vipctl edit dns
    EDITOR="nano -l" vipctl edit 10.96.0.10:53/udp --dry-run
    """
    daemon = connect(exact=True)  # the daemon's own text, not its displayed form
    found = daemon.get("services", target)
    name, spec = found["service"]["name"], found["service"]["spec"]
    service = EditedService(daemon, name, spec, found["version"], display["confirm"])
    # A change of nothing: refused now if the service is another's, or this user may change none.
    unchanged = service.send({}, dry_run=True)
    editor = find_editor()
    with _draft_of(service) as draft:
        answer, fields = _edited(service, draft, editor, display["dry_run"])
        draft.edited = answer is not None and display["dry_run"]
    if answer is None:
        return print_change({**unchanged, "applied": True, "message": ""}, "", **display)
    if display["dry_run"] and display["form"] == "text" and not display["quiet"]:
        after = {key: value for key, value in {**service.spec, **fields}.items() if value is not None}
        print_difference(service.name, "changed", service.spec, after)
        print(f"{_kept(draft)}; hint: vipctl apply -f {shlex.quote(str(draft.path))}", file=sys.stderr)
    return print_change(answer, ", ".join(fields), **display)


@dataclass(frozen=True, slots=True)
class EditedService:
    """A service as the daemon had it when the editor was opened."""

    daemon: Daemon
    name: str
    spec: Json
    version: str
    confirm: int | None
    """Seconds after which the change is taken back without a confirmation."""

    def text(self) -> str:
        """The declaration to edit."""
        service = service_of(self.spec)
        # A newer daemon may know keys that this vipctl does not: they must not be lost.
        whole = service is not None and spec_of(service) == self.spec
        return (
            format_declaration([service])
            if service is not None and whole
            else f"{document({'services': [self.spec]}, 'yaml')}\n"
        )

    def send(self, fields: Json, *, dry_run: bool) -> Json:
        """The daemon's answer to a change of these fields. Raises CliError."""
        return self.daemon.change(
            "PATCH",
            "services",
            self.name,
            body={"service": fields},
            dry_run=dry_run,
            version=self.version,
            confirm=self.confirm,
        )

    def changed_fields(self, service: Service) -> Json:
        """What is different in an edited one; None for a field that it does not have any more."""
        after = spec_of(service)
        return {key: after.get(key) for key in {**self.spec, **after} if self.spec.get(key) != after.get(key)}


@dataclass(slots=True)
class _Draft:
    """The file in the editor, in a directory of its own, which editors fill with backups."""

    path: Path
    shown: str = ""
    """The text with which the editor was opened last."""
    header: Sequence[str] = ()
    edited: bool = False
    """Whether the file has something that the daemon has not."""

    def write(self, body: str, header: Sequence[str]) -> None:
        """Put a text into the file. Raises CliError."""
        self.header = header
        self.shown = "\n".join([*header, body])
        try:
            self.path.write_bytes(self.shown.encode(errors="surrogateescape"))
        except OSError as err:
            raise CliError(f"cannot write {self.path}", err.strerror or str(err)) from None

    def read(self) -> str:
        """The text in the file. Raises CliError."""
        try:
            with self.path.open("rb") as file:
                content = file.read(FILE_BYTES + 1)
            if len(content) > FILE_BYTES:
                raise OSError(0, f"is larger than {FILE_BYTES >> 20} MiB")
        except OSError as err:
            self.edited = self.edited or not isinstance(err, FileNotFoundError)
            raise CliError(str(unreadable_problem(str(self.path), err)), hint="nothing was changed") from None
        text = content.decode(errors="surrogateescape")
        self.edited = self.edited or text != self.shown
        return text

    def body_of(self, text: str) -> str:
        """The text without the comments with which the editor was opened."""
        lines = text.split("\n")
        start = 0
        while start < len(lines) and lines[start] in self.header:
            start += 1
        return "\n".join(lines[start:])


@contextmanager
def _draft_of(service: EditedService) -> Iterator[_Draft]:
    """A file with the service. If it is edited and not applied, it stays, and the error names it."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", service.name)
    try:
        directory = Path(tempfile.mkdtemp(prefix="vipctl-edit-"))
    except OSError as err:
        hint = "set TMPDIR to a directory that you may write"
        raise CliError("cannot make a file to edit", err.strerror or str(err), hint) from None
    draft = _Draft(directory / f"{name}.yaml")
    try:
        draft.write(service.text(), HEADER)
        yield draft
    except CliError as err:
        if draft.edited:
            err.details = (*err.details, f"vipctl: {_kept(draft)}")
        raise
    except KeyboardInterrupt:
        # The editor has ended by then: it is vipd that did not answer yet.
        hint = f"vipctl describe {service.name} shows whether vipd still made the change"
        details = (f"vipctl: {_kept(draft)}",) if draft.edited else ()
        raise CliError("interrupted", hint=hint, code=INTERRUPTED, details=details) from None
    finally:
        if not draft.edited:
            shutil.rmtree(directory, ignore_errors=True)


def _kept(draft: _Draft) -> str:
    return f"the edited text is in {draft.path}"


def _edited(
    service: EditedService, draft: _Draft, editor: Sequence[str], dry_run: bool
) -> tuple[Json | None, Json]:
    """The daemon's answer, and the fields that were changed; None when there is nothing to change.

    Raises CliError.
    """
    refused: list[str] = []
    while True:
        _run_editor(editor, draft)
        text = draft.read()
        body = draft.body_of(text)
        content = _content(body)
        if not content:
            return None, {}
        edited, problems = _parse(body, service.name)
        if edited is not None and not problems:
            fields = service.changed_fields(edited)
            if not fields:
                return None, {}
            try:
                return service.send(fields, dry_run=dry_run), fields
            except CliError as err:
                if not _is_mendable(err):
                    raise
                error = err
        else:
            lines = text.count("\n") - body.count("\n")
            placed = [_moved(problem, lines, str(draft.path)) for problem in problems]
            error = CliError(
                f"{service.name}: not changed",
                counted(len(problems), "problem"),
                f"mend the file, then vipctl apply -f {shlex.quote(str(draft.path))}",
                details=tuple(map(str, placed)),
            )
        # Without a terminal nobody would mend it, and an editor that changes nothing, or comments alone, has
        # given up.
        if content == refused or not sys.stdin.isatty():
            raise error
        refused = content
        draft.write(body, _explained(error, problems))


def _content(body: str) -> list[str]:
    """The lines that are neither empty nor a comment."""
    return [line for line in body.split("\n") if line.strip() and not line.lstrip().startswith("#")]


def _parse(body: str, name: str) -> tuple[Service | None, Sequence[Problem]]:
    """The one service of a text, and its problems."""
    declared = parse_declaration(body, "")
    if declared.problems:
        return None, declared.problems
    if len(declared.services) != 1:
        number = len(declared.services)
        hint = "vipctl apply -f FILE takes several" if number else f"vipctl remove {name} removes it"
        return None, [Problem("", 0, "", f"there are {number} services instead of {name}", hint)]
    (service,) = declared.services
    if service.name != name:
        what = f"{name} would become {service.name}: a service cannot be renamed"
        hint = f"keep name: {name}, or remove the service and add it anew"
        if ":" in name:
            hint = "its name is its first frontend: keep that, or remove the service and add it anew"
        return None, [Problem("", service.origin.line, "", what, hint)]
    return service, ()


def _moved(problem: Problem, lines: int, file: str = "") -> Problem:
    """A problem of the text at its line in the file, which has comments on top."""
    line = problem.line + lines if problem.line else 0
    return replace(problem, file=file, line=line)


def _explained(error: CliError, problems: Sequence[Problem]) -> Sequence[str]:
    """The header of a file that has to be edited again: what was wrong, with the line in that file."""
    if not problems:
        lines = error.lines()
        return [*HEADER, "#", *(f"# {line.removeprefix('vipctl: ')}" for line in lines), "#"]
    size = len(HEADER) + len(problems) + 2
    in_file = [_moved(problem, size) for problem in problems]
    listed = [f"# {f'line {each.line}: ' if each.line else ''}{replace(each, line=0)}" for each in in_file]
    return [*HEADER, "#", *listed, "#"]


def _is_mendable(err: CliError) -> bool:
    return isinstance(err.__cause__, DaemonError) and err.__cause__.kind in _MENDABLE


def find_editor(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The words of the command that edits a file. Raises CliError."""
    for variable in VARIABLES:
        chosen = environment.get(variable, "").strip()
        if not chosen:
            continue
        try:
            words = shlex.split(chosen)
        except ValueError as err:
            raise CliError(
                f"{variable}={chosen} is no command", str(err).lower(), "close the quotes"
            ) from None
        if not shutil.which(words[0]):
            raise CliError(f"no editor {words[0]}", "", f"set {variable} to one that is installed")
        return words
    for name in EDITORS:
        if shutil.which(name):
            return [name]
    raise CliError("no editor", f"none of {', '.join(EDITORS)} is installed", "set EDITOR, as in EDITOR=vim")


def _run_editor(editor: Sequence[str], draft: _Draft) -> None:
    """Edit the file. Raises CliError if the editor fails, whatever it has saved."""
    sys.stdout.flush()
    try:
        with _interrupts_left_to_editor():
            code = subprocess.call([*editor, str(draft.path)])
    except OSError as err:
        raise CliError(f"cannot run {editor[0]}", err.strerror or str(err), "set EDITOR to another") from None
    if code:
        if draft.path.exists():
            draft.read()  # notes whether there is something to keep
        how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        interrupted = INTERRUPTED if -code == signal.SIGINT else 1
        raise CliError(f"{editor[0]} failed: {how}; nothing was changed", code=interrupted)


@contextmanager
def _interrupts_left_to_editor() -> Iterator[None]:
    """Ctrl-C and ctrl-\\ reach the editor, which the terminal sends them as well, and do not end vipctl.

    A handler, because an editor would inherit an ignored signal.
    """
    numbers = (signal.SIGINT, signal.SIGQUIT)
    before = [signal.signal(number, lambda *_: None) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
