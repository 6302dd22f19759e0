"""The text of `vipd.yaml` as a mapping, with the lines of its values. Nothing here needs pydantic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from vipd.declaration import nodes
from vipd.declaration.nodes import Node
from vipd.declaration.yaml_tree import read_tree

DEFAULT_CONFIG = Path("/etc/vipd/vipd.yaml")


class SettingsError(ValueError):
    """Settings that cannot be used, with every problem as one line of text."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class SettingsFile:
    """A settings file (YAML or JSON) as read."""

    path: Path
    text: str
    values: dict[str, object]

    @classmethod
    def read(cls, path: Path) -> SettingsFile:
        """Raises SettingsError when it cannot be read, or is no mapping."""
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise SettingsError([f"{path}: cannot be read: {error.strerror}"]) from None
        except UnicodeDecodeError as error:
            raise SettingsError([f"{path}: is not UTF-8 text (byte {error.start})"]) from None
        return cls(path, text, read_settings_text(text, str(path)))

    def line_of(self, location: Sequence[str]) -> int:
        """The line of a value, by keys and numbers of items, or of the nearest one around it; 0: unknown."""
        line, node = 0, self._root
        for part in location:
            if isinstance(node, nodes.Mapping) and part in node.items:
                line, node = node.key_lines[part], node.items[part]
            elif isinstance(node, nodes.Sequence) and part.isdecimal() and int(part) < len(node.items):
                node = node.items[int(part)]
                line = node.line
            else:
                break
        return line

    @cached_property
    def _root(self) -> Node | None:
        """Read for the first problem only: a file without one needs no lines."""
        documents = read_tree(self.text, str(self.path)).documents
        return documents[0] if documents else None


def read_settings_text(text: str, place: str) -> dict[str, object]:
    """The mapping that a settings text is; `place` names it in errors. Raises SettingsError."""
    try:
        loaded = _UniqueKeyLoader(text).get_single_data()
    except (yaml.YAMLError, ValueError) as error:
        raise SettingsError(_syntax_faults(text, place, error)) from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise SettingsError([f"{place}: must be a mapping of settings, not {type(loaded).__name__}"])
    return {str(key): value for key, value in loaded.items()}


def parse_assignments(assignments: Iterable[str]) -> dict[str, object]:
    """`KEY=VALUE` flags as settings, the value read as in the settings file. Raises SettingsError."""
    values: dict[str, object] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise SettingsError([f"--set {assignment}: must be KEY=VALUE"])
        values.update(read_settings_text(f"{key.strip()}: {value}", f"--set {assignment}"))
    return values


def _syntax_faults(text: str, place: str, error: Exception) -> list[str]:
    """`file:line: what; hint: ...` for each fault of a text that PyYAML rejects with `error`."""
    tree = read_tree(text, place)
    if not tree.problems:
        what = " ".join(str(error).split())
        what = "more than one document; hint: keep one" if len(tree.documents) > 1 else f"is not YAML: {what}"
        return [f"{place}: {what}"]
    faults = []
    for problem in tree.problems:
        hint = f"; hint: {problem.hint}" if problem.hint else ""
        # Text of a command line has no lines.
        line = problem.line if "\n" in text else 0
        faults.append(f"{replace(problem, line=line, hint='')}{hint}")
    return faults


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a word", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)
