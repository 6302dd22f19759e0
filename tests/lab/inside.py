"""The only door to vipd's inside: what tests of many cases ask, for whom a daemon or vipctl is too slow.

A test goes through packets, the kernel's rules, the API, vipctl and files where that is fast enough. Where it
is not, it asks a function here, in values of `vipd.model` and of this file. Whoever rebuilds a package of
vipd changes the function that stands for it, and no test.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vipd.cli.main import run
from vipd.declaration import problems
from vipd.declaration.conversion.formats import convert_text, format_of
from vipd.declaration.native import format_declaration, parse_declaration, parse_service, service_to_spec
from vipd.model.service import Origin, Service

DATAPLANES = ("iptables", "nftables")


class Problem(NamedTuple):
    """A fault of a declaration. Its text is what vipctl prints, with the file."""

    line: int
    """0: the whole file."""
    path: str
    """Such as `services[2].backends[0].port`."""
    what: str
    hint: str
    printed: str
    internal: bool = False
    """An unexpected exception in vipd."""
    partial: bool = False
    """It refuses a part of a service alone."""

    def __str__(self) -> str:
        return self.printed


class Note(NamedTuple):
    """What a user is told of a declaration that is no fault."""

    line: int
    text: str
    printed: str

    def __str__(self) -> str:
        return self.printed


@dataclass(frozen=True)
class Declared:
    """What a text declares. With problems its services are those that could be read."""

    services: tuple[Service, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[Note, ...] = ()
    serving: tuple[Service, ...] = field(default=(), compare=False)
    """The services that serve when nothing of the file served before: those of no refused part."""
    understood: tuple[Service, ...] = field(default=(), compare=False)
    """The services that serve on although they stand in a text with problems, since an earlier run accepted
    it."""

    @property
    def ok(self) -> bool:
        """No fault refuses more than a part of a service."""
        return all(problem.partial for problem in self.problems)


def declare(text: str | bytes, path: str = "a.yaml", *, accepted: bool = False) -> Declared:
    """What the text of a file declares. `accepted`: an earlier run accepted it."""
    return _declared(parse_declaration(text, path, accepted=accepted))


def declare_spec(spec: object, origin: Origin = Origin("cli")) -> Declared:  # noqa: B008 (a value)
    """What a service of decoded JSON declares, as a request to the API has it."""
    service, faults = parse_service(spec, origin)
    return _declared(problems.Declaration((service,) if service else (), faults))


def spec_of(service: Service) -> dict[str, object]:
    """The decoded JSON that declares a service."""
    return service_to_spec(service)


def form_of(text: str) -> str:
    """The program whose configuration a text is recognised as, such as `haproxy`; empty: none."""
    return format_of(text)


def convert(text: str, *addresses: str, form: str = "") -> Declared:
    """What another program's configuration becomes; without `form` its format is recognised."""
    return _declared(convert_text(text, "a", form or format_of(text), addresses))


def written(services: Iterable[Service]) -> str:
    """The YAML that declares these services."""
    return format_declaration(tuple(services))


def vipctl(arguments: Sequence[str]) -> int:
    """Run vipctl in this process; returns its exit code. It prints to sys.stdout and sys.stderr."""
    return run(arguments)


def _declared(declaration: problems.Declaration) -> Declared:
    return Declared(
        declaration.services,
        tuple(
            Problem(p.line, p.path, p.what, p.hint, str(p), bool(p.trace), p.partial)
            for p in declaration.problems
        ),
        tuple(Note(note.line, note.text, str(note)) for note in declaration.notes),
        declaration.served_parts(),
        declaration.understood().services,
    )
