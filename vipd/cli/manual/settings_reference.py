"""The table of settings, with values, default and meaning of each, from the fields of `Settings`."""

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

from vipd.declaration.syntax import period_text
from vipd.host.settings.etcd import PERCENT, PERIOD, EtcdSettings, Url
from vipd.host.settings.field_types import (
    Address,
    ListenAddress,
    LocalListenAddress,
    Network,
    NetworksBySource,
    PortRangesBySource,
)
from vipd.host.settings.layers import ENVIRONMENT_PREFIX
from vipd.host.settings.settings import Settings

TYPES: Mapping[object, str] = {
    bool: "`true` or `false`",
    int: "a number",
    float: "a number",
    str: "text",
    Path: "an absolute path",
    Network: "a network",
    Address: "an address",
    ListenAddress: "`ADDR:PORT` or `[IPV6]:PORT`",
    LocalListenAddress: "`PORT`, `ADDR:PORT` or `[IPV6]:PORT`",
    tuple[Url, ...]: "a list of URLs",
    tuple[Network, ...]: "a list of networks",
    tuple[Address, ...]: "a list of addresses",
    get_args(NetworksBySource)[0]: "a list of networks, or a mapping by source",
    get_args(PortRangesBySource)[0]: "a range, a list of ranges, `any`, or a mapping by source",
    EtcdSettings: "a mapping",
    PERIOD: "a duration",
    PERCENT: "a share of 100%",
}
"""The values of a field of a type, or with a validator. A new type needs a line here."""


class Setting(NamedTuple):
    """One setting. `values` and `default` have the markup of `vipd.cli.manual.pages`, as `meaning` has."""

    name: str
    environment: str
    values: str
    default: str
    meaning: str


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
        found.append(Setting(name, environment, _values(name, field), _default(field), meaning))
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


def _values(name: str, field: FieldInfo) -> str:
    wanted = _required(field.annotation)
    for each in field.metadata:
        if isinstance(each, str):
            return each
        if isinstance(each, BeforeValidator) and each in TYPES:
            return TYPES[each]
    limits = [getattr(each, end) for each in field.metadata for end in ("ge", "le") if hasattr(each, end)]
    if len(limits) == 2:
        return f"{limits[0]} to {limits[1]}"
    if get_origin(wanted) is Literal:
        *others, last = (f"`{choice}`" for choice in get_args(wanted))
        return f"{', '.join(others)} or {last}" if others else last
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
