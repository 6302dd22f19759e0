"""The declarations in the files, directories and standard input of a verb, with every problem.

It imports the declaration language, hence YAML: only verbs that read files import this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from vipd.cli.errors import FAILED, CliError
from vipd.declaration.conflicts import claim_problem, conflicts_of, find_conflicts
from vipd.declaration.problems import Declaration, Note, Problem, printable, unreadable_problem
from vipd.declaration.reader import parse_declaration
from vipd.host.followed_links import read_followed
from vipd.model.formatting import counted
from vipd.model.limits import FILE_BYTES
from vipd.model.service import Service

DEFAULT_SERVICES_DIR = "/etc/vipd/services.d"

STDIN = "-"

_STDIN_SHOWN = "<stdin>"
_SUFFIXES = (".yaml", ".yml", ".json")


class Inputs(NamedTuple):
    """The combined declaration of files. `problems` and `notes` are sorted by file, then line."""

    files: tuple[str, ...]
    services: tuple[Service, ...]
    problems: tuple[Problem, ...]
    notes: tuple[Note, ...] = ()
    served: tuple[Service, ...] = ()
    """Those of `services` that vipd would serve of such files, unless there are `obstacles`: with Kubernetes
    objects the ones without a problem."""
    obstacles: tuple[Problem, ...] = ()
    """Those of `problems` that concern a whole file."""

    def print_notes(self) -> None:
        """Print the parts of Kubernetes objects that were left out, on stderr."""
        for note in self.notes:
            print(note, file=sys.stderr)

    def require_ok(self, code: int = FAILED) -> tuple[Service, ...]:
        """The services; raises CliError with every problem, if there is one."""
        if self.problems:
            raise CliError(problem_count(self.problems), code=code, details=tuple(map(str, self.problems)))
        return self.services

    def require_served(self, prune: bool, code: int = FAILED) -> tuple[Service, ...]:
        """The services that vipd would serve. Raises CliError with every problem if a whole file has one, and
        with `prune` for any: what has one would be removed."""
        return self.require_ok(code) if self.obstacles or prune or not self.served else self.served

    def complain(self, code: int = FAILED) -> None:
        """Raises CliError with every problem, after what has none was done."""
        if self.problems:
            left = len(self.services) - len(self.served)
            why = "what has one is left out" + (f": {counted(left, 'service')}" if left else "")
            raise CliError(
                problem_count(self.problems), why, code=code, details=tuple(map(str, self.problems))
            )


Parser = Callable[[str, str], Declaration]
"""Reads the text of a file, which has this name in problems."""


def read_inputs(names: Iterable[str], parse: Parser = parse_declaration) -> Inputs:
    """Read files, directories (their *.yaml, *.yml and *.json) and `-`, standard input. Raises nothing."""
    files: list[str] = []
    declarations: list[Declaration] = []
    for name in dict.fromkeys(names):
        found, problems = _files_of(name)
        files += found
        declarations += [_read(file, parse, named=file == name) for file in found]
        if problems:
            files.append(name)
            declarations.append(Declaration(problems=problems))
    services = tuple(service for declaration in declarations for service in declaration.services)
    # Each file has already been checked for its own conflicts.
    found_problems = {problem for declaration in declarations for problem in declaration.problems}
    notes = tuple(sorted({note for declaration in declarations for note in declaration.notes}))
    problems = tuple(sorted(found_problems | set(find_conflicts(services))))
    return Inputs(tuple(files), services, problems, notes, *_served(declarations))


def _served(declarations: Iterable[Declaration]) -> tuple[tuple[Service, ...], tuple[Problem, ...]]:
    """`Inputs.served` and `obstacles` of these declarations."""
    declarations = tuple(declarations)
    wholes = [declaration.parts.get("", declaration) for declaration in declarations]
    obstacles = [problem for whole in wholes for problem in whole.problems]
    services = [service for declaration in declarations for service in declaration.served_parts()]
    lost = set[int]()
    for service, claim, owner in conflicts_of(services):
        lost.add(id(service))
        if not service.origin.part:
            obstacles.append(claim_problem(service, claim, owner))
    return tuple(service for service in services if id(service) not in lost), tuple(obstacles)


def problem_count(problems: Iterable[Problem]) -> str:
    """`3 problems in 2 files`."""
    files = [problem.file for problem in problems]
    return f"{counted(len(files), 'problem')} in {counted(len(set(files)), 'file')}"


def _files_of(name: str) -> tuple[list[str], tuple[Problem, ...]]:
    path = Path(name)
    try:
        if name == STDIN or not path.is_dir():
            return [name], ()
        return sorted(str(file) for file in path.iterdir() if _counts(file)), ()
    except OSError as err:
        return [], (unreadable_problem(printable(name), err),)


def _counts(file: Path) -> bool:
    # Editors leave .#name.yaml and .name.yaml.swp beside a file; a daemon should not serve them.
    return file.suffix in _SUFFIXES and not file.name.startswith(".")


def _bounded(file: BinaryIO) -> bytes:
    """All of a file of vipd's size at most. Raises OSError."""
    content = file.read(FILE_BYTES + 1)
    if len(content) > FILE_BYTES:
        raise OSError(0, f"is larger than {FILE_BYTES >> 20} MiB")
    return content


def _read(name: str, parse: Parser, *, named: bool) -> Declaration:
    """A file that was `named` may be a pipe; in a directory pipes are skipped, as vipd does."""
    shown = _STDIN_SHOWN if name == STDIN else printable(name)
    try:
        if name == STDIN:
            content = _bounded(sys.stdin.buffer)
        elif named:
            with Path(name).open("rb") as file:
                content = _bounded(file)
        else:
            content = bytes(read_followed(Path(name), FILE_BYTES))
        text = content.decode()
    except OSError as err:
        return Declaration(problems=(unreadable_problem(shown, err),))
    except UnicodeDecodeError as err:
        line = content.count(b"\n", 0, err.start) + 1
        return Declaration(problems=(Problem(shown, line, "", "not UTF-8 text", "save it as UTF-8"),))
    return parse(text, shown)
