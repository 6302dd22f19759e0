"""JSON Schemas of declarations and of vipd.yaml, for editors: from the tables that the manual is made of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from vipd.cli.manual.settings_reference import DEFINITIONS as SETTINGS_DEFINITIONS
from vipd.cli.manual.settings_reference import Setting, etcd_settings, settings
from vipd.declaration.kubernetes import KINDS, VERSIONS
from vipd.declaration.service import (
    API_VERSION,
    CHECK_TYPES,
    DEFAULTS,
    DEFINITIONS,
    GROUPS,
    SERVICE,
    definition_name,
    keys_of_check,
    reference,
)
from vipd.declaration.values import Key, Schema, Table
from vipd.model.service import NameKind

DECLARATION, SETTINGS = "declaration.schema.json", "settings.schema.json"
"""The names of the files."""

INSTALLED = "/usr/share/doc/vipd/docs"
"""Where the package has them."""

_ANCHOR_KEYS = "^x-"
"""Keys that no reader looks at, for YAML anchors."""


def schemas() -> dict[str, str]:
    """The text of each schema by the name of its file."""
    return {
        name: json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
        for name, schema in ((DECLARATION, declaration_schema()), (SETTINGS, settings_schema()))
    }


def declaration_schema() -> Schema:
    """The schema of one document of a file of declarations, which may be a Kubernetes object or empty.

    It says nothing of what several values must be together, except which keys a mapping needs: that is
    for `vipctl check`.
    """
    ours = {"properties": {"apiVersion": {"const": API_VERSION}}, "required": ["apiVersion"]}
    definitions = {definition_name(group.title): _mapping(group) for group in GROUPS.values()}
    definitions["service"]["anyOf"] = [
        {"required": [key]} for key in SERVICE.keys if key.endswith(("address", "_addresses"))
    ]
    definitions["backend"]["anyOf"] = [{"required": [key]} for key in ("address", *NameKind)]
    definitions["check"]["allOf"] = [_keys_of_check(kind) for kind in CHECK_TYPES]
    definitions["defaults"] = _object(DEFAULTS)
    for name in ("document", "defaults"):
        definitions[name]["type"] = ["object", "null"]
    return {
        **_head("A file of declarations of the load balancer vipd"),
        "if": {"type": "object", "required": ["kind"], "not": ours},
        "then": {
            "properties": {"apiVersion": {"enum": list(VERSIONS)}, "kind": {"enum": list(KINDS)}},
            "required": ["apiVersion"],
        },
        "else": reference("document"),
        "definitions": {**DEFINITIONS, **definitions},
    }


def settings_schema() -> Schema:
    """The schema of vipd.yaml."""
    return {
        **_head("Settings of the load balancer vipd"),
        **_settings(settings()),
        "type": ["object", "null"],
        "definitions": {**SETTINGS_DEFINITIONS, "etcd": _settings(etcd_settings())},
    }


def _head(title: str) -> dict[str, Any]:
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$comment": "Made by python -m vipd.cli.manual of the program itself.",
        "title": title,
    }


def _mapping(table: Table) -> dict[str, Any]:
    required = [name for name, key in table.keys.items() if key.required]
    # Of a short form the keywords for mappings say nothing, and of a mapping those for text.
    return {**_object(table.keys), "required": required, **table.short}


def _object(keys: Mapping[str, Key]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: _described(key) for name, key in keys.items()},
        "patternProperties": {_ANCHOR_KEYS: {}},
        "additionalProperties": False,
    }


def _described(key: Key) -> Schema:
    return {"description": key.meaning, **key.kind.schema}


def _keys_of_check(kind: str) -> Schema:
    names = {"anyOf": [{"enum": list(keys_of_check(kind))}, {"pattern": _ANCHOR_KEYS}]}
    return {
        "if": {"properties": {"type": {"const": kind}}, "required": ["type"]},
        "then": {"propertyNames": names, "required": list(CHECK_TYPES[kind].required)},
    }


def _settings(table: Iterable[Setting]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            each.name: {"description": f"{each.meaning} Default: {each.default}.", **each.value.schema}
            for each in table
        },
        "required": [each.name for each in table if each.required],
        "additionalProperties": False,
    }
