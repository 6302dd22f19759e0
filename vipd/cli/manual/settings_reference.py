"""The table of settings, with values, default and meaning of each, from the fields of `Settings`.

A type of values has its words and its JSON Schema here; a schema describes what a settings file may say.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from vipd.declaration.service import IPV6_PATTERN, PERIOD_TEXT, PORT_PATTERN, reference
from vipd.declaration.syntax import IPV4_PATTERN, MAX_PORT, period_text
from vipd.declaration.values import FLAG, Kind, Schema, choice, matching
from vipd.host.settings.etcd import PERCENT, PERIOD, EtcdSettings, Url
from vipd.host.settings.field_types import (
    UID_RANGE,
    AcceptForwarded,
    Address,
    ListenAddress,
    LocalListenAddress,
    NamesBySource,
    NameServer,
    Network,
    NetworksBySource,
    PortRangesBySource,
)
from vipd.host.settings.layers import ENVIRONMENT_PREFIX
from vipd.host.settings.settings import Settings
from vipd.model.claim_limits import SOURCES

_ADDRESS = rf"{IPV4_PATTERN}|{IPV6_PATTERN}"
_SOCKET = rf"(?:{IPV4_PATTERN}|\[{IPV6_PATTERN}\]):{PORT_PATTERN}"
_PORT_RANGE = rf"any|{PORT_PATTERN}(?: *- *{PORT_PATTERN})?"

DEFINITIONS: Mapping[str, Schema] = {
    "ip_address": matching(_ADDRESS, "an address such as 192.0.2.1"),
    "network": matching(rf"(?:{_ADDRESS})(?:/[0-9.]{{1,15}})?", "a network such as 10.244.0.0/16"),
    "port_range": {
        **matching(
            _PORT_RANGE, "a range of ports such as 30000-32767, a port, or any", ["integer", "string"]
        ),
        "minimum": 1,
        "maximum": MAX_PORT,
    },
}
"""Schemas of values that several settings have."""


def _list_of(words: str, item: Schema, characters: str) -> Kind:
    """A list, or text of these characters with commas between the items."""
    text = {"type": "string", "pattern": f"^[ ,{characters}]*$"}
    return Kind(words, {"if": {"type": "array"}, "then": {"items": item}, "else": text})


def _by_source(words: str, values: Kind) -> Kind:
    """Values for all sources, or a mapping by source."""
    mapping = {"properties": dict.fromkeys(SOURCES, values.schema), "additionalProperties": False}
    return Kind(words, {"if": {"type": "object"}, "then": mapping, "else": values.schema})


_NETWORKS = _list_of("a list of networks", reference("network"), "0-9A-Fa-f:./")
_PORT_RANGES = Kind(
    "a list of ranges",
    {
        "if": {"type": "string", "pattern": ","},
        "then": {"pattern": "^[ ,0-9-]*$"},
        "else": {
            "if": {"type": "array"},
            "then": {"items": reference("port_range"), "minItems": 1},
            "else": reference("port_range"),
        },
    },
)

_NAMES = _list_of("a list of names", {"type": "string"}, "A-Za-z0-9._-")
_NAMES = Kind(_NAMES.words, {"anyOf": [{"enum": [False]}, _NAMES.schema]})

_PROGRAM = matching("/.*", "the absolute path of a program")

TYPES: Mapping[object, Kind] = {
    bool: FLAG,
    AcceptForwarded: Kind("`true`, `false` or `first`", {"enum": [True, False, "first"]}),
    int: Kind("a number", {"type": "integer"}),
    float: Kind("a number", {"type": "number"}),
    str: Kind("text", {"type": "string"}),
    Path: Kind("an absolute path", matching("/.*", "an absolute path")),
    Network: Kind("a network", reference("network")),
    Address: Kind("an address", reference("ip_address")),
    ListenAddress: Kind(
        "`ADDR:PORT` or `[IPV6]:PORT`", matching(_SOCKET, "an address and a port such as 127.0.0.1:10256")
    ),
    LocalListenAddress: Kind(
        "`PORT`, `ADDR:PORT` or `[IPV6]:PORT`",
        {
            **matching(
                f"{PORT_PATTERN}|{_SOCKET}",
                "a port, or an address and a port such as 127.0.0.1:9100",
                ["integer", "string"],
            ),
            "minimum": 1,
            "maximum": MAX_PORT,
        },
    ),
    tuple[str, ...]: Kind(
        "a list: a program and its arguments",
        {
            "if": {"type": "array"},
            "then": {"items": [_PROGRAM], "additionalItems": {"type": "string"}},
            "else": _PROGRAM,
        },
    ),
    tuple[Url, ...]: _list_of(
        "a list of URLs", matching("https?://[^ /]+/?", "a URL such as https://10.0.0.1:2379"), "!-~"
    ),
    tuple[Network, ...]: _NETWORKS,
    tuple[Address, ...]: _list_of("a list of addresses", reference("ip_address"), "0-9A-Fa-f:."),
    get_args(NetworksBySource)[0]: _by_source("a list of networks, or a mapping by source", _NETWORKS),
    get_args(PortRangesBySource)[0]: _by_source(
        "a range, a list of ranges, `any`, or a mapping by source", _PORT_RANGES
    ),
    get_args(NamesBySource)[0]: _by_source("a list of names, `any`, `off`, or a mapping by source", _NAMES),
    UID_RANGE: Kind(
        "`LOW-HIGH` or `off`",
        {"anyOf": [{"enum": [False]}, matching("off|[0-9]{5,10} *- *[0-9]{5,10}", "60706-61183, or off")]},
    ),
    tuple[NameServer, ...]: _list_of(
        "a list of `ADDR`, `ADDR:PORT` or `[IPV6]:PORT`", {"type": "string"}, "0-9A-Fa-f:.[\\]"
    ),
    EtcdSettings: Kind("a mapping", reference("etcd")),
    PERIOD: Kind("a duration", {**PERIOD_TEXT, "minimum": 0}),
    PERCENT: Kind(
        "a share of 100%",
        {
            **matching("(?:100|[1-9]?[0-9]) *%?", "a share such as 50%", ["integer", "string"]),
            "minimum": 0,
            "maximum": 100,
        },
    ),
}
"""The values of a field of a type, or with a validator. A new type needs a line here."""


_LIMITS = {"ge": "minimum", "le": "maximum"}
"""What JSON Schema calls the limits of a field."""


class Setting(NamedTuple):
    """One setting. The words of `value`, `default` and `meaning` have the markup of
    `vipd.cli.manual.pages`."""

    name: str
    environment: str
    value: Kind
    default: str
    meaning: str

    @property
    def values(self) -> str:
        """Its possible values, in words."""
        return self.value.words

    @property
    def required(self) -> bool:
        """Whether its mapping must have it."""
        return self.meaning.endswith("Required.")


def settings() -> tuple[Setting, ...]:
    """Every setting, in the model's order. Raises LookupError for one with incomplete documentation in the
    model."""
    return _described(Settings)


def etcd_settings() -> tuple[Setting, ...]:
    """Every key of the setting `etcd`. Raises LookupError as `settings` does."""
    return _described(EtcdSettings)


def _described(model: type) -> tuple[Setting, ...]:
    below = docstrings(model)
    found = []
    for name, field in fields_of(model).items():
        meaning = field.description or below.get(name)
        if not meaning:
            raise LookupError(
                f"setting {name} has no docstring below it; hint: write one in vipd/host/settings/settings.py"
            )
        environment = f"{ENVIRONMENT_PREFIX}{name.upper()}" if model is Settings else ""
        found.append(Setting(name, environment, _value(name, field), _default(field), meaning))
    return tuple(found)


def fields_of(model: type) -> dict[str, FieldInfo]:
    """The fields of a model, or of a dataclass, as pydantic reads it."""
    if issubclass(model, BaseModel):
        return model.model_fields
    hints = get_type_hints(model, include_extras=True)
    return {
        field.name: FieldInfo.from_annotated_attribute(hints[field.name], field.default)
        for field in dataclasses.fields(model)  # type: ignore[arg-type]  # no model: a dataclass
    }


def docstrings(model: type) -> dict[str, str]:
    """The strings below the fields of a class, each on one line."""
    (body,) = ast.parse(dedent(inspect.getsource(model))).body
    assert isinstance(body, ast.ClassDef)  # noqa: S101 (the source of a class is one)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = below.value.value if _is_string(below) else ""  # type: ignore[attr-defined]
            if text:
                found[field.target.id] = " ".join(text.split())
    return found


def _is_string(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _value(name: str, field: FieldInfo) -> Kind:
    form = _form(name, field)
    limits = {
        limit: getattr(each, end)
        for each in field.metadata
        for end, limit in _LIMITS.items()
        if hasattr(each, end)
    }
    words = form.words
    if len(limits) == 2 and _required(field.annotation) is int:
        words = f"{limits['minimum']} to {limits['maximum']}"
    schema: Schema = {**form.schema, **limits}
    return Kind(words, {"anyOf": [schema, {"type": "null"}]} if field.default is None else schema)


def _form(name: str, field: FieldInfo) -> Kind:
    wanted = _required(field.annotation)
    for each in field.metadata:
        if isinstance(each, str):
            return Kind(each, TYPES[str].schema)
        if isinstance(each, BeforeValidator) and each in TYPES:
            return TYPES[each]
        if getattr(each, "pattern", None):
            return Kind(TYPES[str].words, {"type": "string", "pattern": each.pattern})
    if get_origin(wanted) is Literal:
        return choice(get_args(wanted))
    if wanted not in TYPES:
        hint = "add a line to TYPES in vipd/cli/manual/settings_reference.py"
        raise LookupError(
            f"setting {name} has a type that the manual has no words for: {wanted}; hint: {hint}"
        )
    return TYPES[wanted]


def _required(annotation: Any) -> object:
    """The type without `| None`."""
    if annotation in TYPES:
        return annotation
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (each for each in get_args(annotation) if each is not type(None))
    metadata = getattr(annotation, "__metadata__", None)
    # The annotation of a list contains its parser for the environment; only the item type matters.
    return get_args(annotation)[0] if metadata and annotation not in TYPES else annotation


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "the host name"
    if field.default is None:
        return "unset"
    if field.default == ():
        return "none"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    if PERIOD in field.metadata:
        return f"`{period_text(field.default)}`"
    if PERCENT in field.metadata:
        return f"`{field.default}%`"
    default = field.examples[0] if field.examples else field.default
    return f"`{default}`" if str(default) else "empty"
