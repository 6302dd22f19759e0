"""A text as an editor with a JSON Schema sees it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml
from jsonschema import Draft7Validator, ValidationError


class EditorLoader(yaml.SafeLoader):
    """Reads YAML 1.2 as editors do, where PyYAML reads 1.1: `no` and `1:30` are text, 010 is ten."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (as in the base class)


def _whole_number(_: EditorLoader, node: yaml.ScalarNode) -> int:
    return int(node.value, 0 if node.value[:2] in ("0o", "0x") else 10)


for tag, pattern, first in (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", "-+.0123456789"),
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    EditorLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), list(first)
    )
EditorLoader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def documents(text: str) -> list[object]:
    """The values of the documents; raises YAMLError."""
    if text.startswith("{"):
        return [json.loads(text)]  # much faster
    return list(yaml.load_all(text, EditorLoader))


def faults(schema: Draft7Validator, text: str) -> list[tuple[str, str]]:
    """Place and message of all that the schema finds in a text; raises YAMLError."""
    return [each for document in documents(text) for each in _told(schema.iter_errors(document))]


def _told(errors: Iterable[ValidationError]) -> Iterator[tuple[str, str]]:
    for error in errors:
        yield from _told(error.context or ())
        if not error.context:
            parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
            yield "".join(parts).removeprefix("."), error.message
