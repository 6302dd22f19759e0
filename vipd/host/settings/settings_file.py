"""The text of `vipd.yaml` as a mapping, with the lines of its values. Nothing here needs pydantic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from vipd.declaration.reader import Places
from vipd.declaration.values import Faults
from vipd.declaration.yaml_text import Lines, lines_of, read_values

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
        path = (0, *(int(part) if part.isdecimal() else part for part in location))
        ends = range(len(path), 1, -1)
        lines = lines_of(self.text.encode(), {path[:end] for end in ends})
        nearest = next((lines[path[:end]] for end in ends if path[:end] in lines), Lines(0))
        return nearest.key or nearest.value


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
    yaml_text = read_values(text)
    if not yaml_text.faults:
        what = " ".join(str(error).split())
        several = len(yaml_text.documents) > 1
        what = "more than one document; hint: keep one" if several else f"is not YAML: {what}"
        return [f"{place}: {what}"]
    faults = []
    for problem in Places(place, yaml_text, []).problems(Faults(), yaml_text).by_line():
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
