"""The layers of settings: `/etc/vipd/vipd.yaml`, `VIPD_*` in the environment, flags. A later layer wins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from operator import itemgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
)

from vipd.host.settings.error_text import fault_text
from vipd.host.settings.etcd import EtcdSettings
from vipd.host.settings.settings_file import SettingsFile

ENVIRONMENT_PREFIX = "VIPD_"


class Layers:
    """The layers that the values of one `Settings` come from. Problems name the layer that has the value."""

    def __init__(
        self, config: Path | None, flags: Mapping[str, object], environment: Mapping[str, str]
    ) -> None:
        """Reads the file. Raises SettingsError."""
        self._file = SettingsFile.read(config) if config else None
        self._flags = dict(flags)
        self._environment = {name.lower(): value for name, value in environment.items() if value}

    def sources(self, settings: type[BaseSettings]) -> tuple[PydanticBaseSettingsSource, ...]:
        """The layers in the order of pydantic-settings: the first that contains a setting wins."""
        return (
            InitSettingsSource(settings, self._flags),
            _Environment(settings, self._environment),
            _File(settings, self._file.values if self._file else {}),
        )

    def problems(self, error: ValidationError, known: tuple[str, ...]) -> list[str]:
        """One line for each problem, in the order of the file. `known`: the names of all settings."""
        found = sorted(((self._line(_location(item)), item) for item in error.errors()), key=itemgetter(0))
        return [problem for line, item in found for problem in self._problem_lines(item, line, known)]

    def _line(self, location: list[str]) -> int:
        return self._file.line_of(location) if self._file else 0

    def _problem_lines(self, error: Any, line: int, known: tuple[str, ...]) -> list[str]:
        location = _location(error)
        of_etcd = location[:1] == ["etcd"]
        name = ".".join(location) if of_etcd else (location or [""])[0]
        if of_etcd:
            known = tuple(field.name for field in fields(EtcdSettings))
        place = self._place(location[0] if location else "", line)
        said = fault_text(error, known).split("\n")
        return [": ".join(part for part in (place, name, each) if part) for each in said]

    def _place(self, name: str, line: int) -> str:
        """The layer that a setting's value comes from: empty for flags; the file with its line, if known."""
        if name in self._flags:
            return ""
        if f"{ENVIRONMENT_PREFIX}{name}".lower() in self._environment:
            return "the environment"
        if self._file is None:
            return ""
        return f"{self._file.path}:{line}" if line and name else str(self._file.path)


class _Environment(EnvSettingsSource):
    """Reads `VIPD_*` from the given environment instead of the environment of this process."""

    def __init__(self, settings: type[BaseSettings], variables: Mapping[str, str]) -> None:
        self._variables = variables
        super().__init__(settings, env_prefix=ENVIRONMENT_PREFIX)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return self._variables


class _File(InitSettingsSource):
    """The settings file. It replaces the YAML source of pydantic-settings, which ignores a missing file and
    a duplicate key, and knows no line numbers.
    """

    def __call__(self) -> dict[str, Any]:
        """The file's values, without settings that a layer with precedence contains. Without this,
        pydantic-settings would merge mappings of two layers; here one mapping replaces the other."""
        return {name: value for name, value in super().__call__().items() if name not in self.current_state}


def _location(error: Any) -> list[str]:
    """The location of an error, as keys and numbers of items."""
    # Two kinds of parts are not keys: tags of unions begin with a colon, and "[key]" says that the error is
    # in the key before it.
    return [str(part) for part in error["loc"] if not str(part).startswith((":", "[key]"))]
