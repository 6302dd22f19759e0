"""How two declarations differ, as lines of YAML.

It imports YAML: only what prints a difference imports this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import ndiff

from vipd.cli.output import Screen, screen
from vipd.declaration.operations import spec_of
from vipd.declaration.reader import parse_service
from vipd.declaration.yaml_text import dump_yaml
from vipd.model.service import Origin, Service
from vipd.observe.api_client import Json

_COLOURS = {"+": "green", "-": "red", "#": "bold"}


def service_of(spec: object) -> Service | None:
    """The service that a Spec of the daemon, or one for it, declares; None if it has a problem."""
    service, problems = parse_service(spec, Origin("daemon"))
    return None if problems else service


def canonical_spec(spec: Json) -> Json:
    """The Spec in the form that the daemon exports; unchanged if it has a problem."""
    service = service_of({key: value for key, value in spec.items() if value is not None})
    return spec_of(service) if service else spec


def difference(title: str, before: Json | None, after: Json | None) -> list[str]:
    """The lines of a service's declaration that differ, with all others; None: there is no such service."""
    return [f"# {title}", *_text_diff(_yaml_lines(before), _yaml_lines(after))]


def painted(lines: Iterable[str], terminal: Screen) -> Iterator[str]:
    """The lines of a difference, in colours on a terminal."""
    return (terminal.paint(line, _COLOURS.get(line[:1], "")) for line in lines)


def print_difference(name: str, action: str, before: Json | None, after: Json | None) -> None:
    """Print what a change would do to one service; None: it is not there. Its heading names the action."""
    print_painted(difference(f"{name}: would be {action}", before, after))


def print_painted(lines: Iterable[str]) -> None:
    """Print the lines of a difference, in colours on a terminal."""
    print("\n".join(painted(lines, screen())))


def _text_diff(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    # ndiff's lines with ? point into the line before; people read that worse than the two lines.
    return (line for line in ndiff(old, new) if not line.startswith("?"))


def _yaml_lines(spec: Json | None) -> list[str]:
    return dump_yaml(spec).rstrip("\n").split("\n") if spec else []
