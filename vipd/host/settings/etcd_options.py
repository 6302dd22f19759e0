"""The setting `etcd`: a mapping of its own, read as strictly as the rest of the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from vipd.declaration.syntax import InvalidTextError, parse_period
from vipd.host.settings.etcd import DEFAULT_PREFIX, EtcdSettings


def _listed(value: object) -> object:
    return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value


def _period(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("must be a duration; hint: 5s or 500ms")
    try:
        return parse_period(str(value))
    except InvalidTextError as error:
        raise ValueError(f"{error.what}; hint: {error.hint}") from None


def _percent(value: object) -> int:
    text = str(value).removesuffix("%").strip()
    if isinstance(value, bool) or not text.isdecimal():
        raise ValueError(f"{value!r} is no share; hint: 50%")
    return int(text)


ENDPOINTS, PERIOD, PERCENT = BeforeValidator(_listed), BeforeValidator(_period), BeforeValidator(_percent)


class EtcdOptions(BaseModel):
    """Where etcd is, how to get in, and how far it is trusted."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True)

    endpoints: Annotated[tuple[str, ...], ENDPOINTS] = ()
    """Client ports of the members, each as `https://10.0.0.1:2379`. One that fails is passed over for
    another. Required.
    """
    prefix: str = DEFAULT_PREFIX
    """How every key begins."""
    ca: Path | None = None
    """File of the CA that signed the members' certificates; unset: those of the system."""
    cert: Path | None = None
    """Client certificate; needs `key`. Without a common name where etcd has users."""
    key: Path | None = None
    """Private key of `cert`."""
    user: str = ""
    """User of etcd; needs `password_file`. Over `http://` the password goes unencrypted: vipd warns of that,
    unless the endpoint is on this host.
    """
    password_file: Path | None = None
    """File whose first line is the user's password."""
    timeout: Annotated[float, PERIOD] = Field(5.0, examples=["5s"])
    """How long one member may take for an answer, up to `60s`."""
    max_removal: Annotated[int, PERCENT] = Field(50, examples=["50%"])
    """The most of all services that may go from etcd at once. What is more goes on serving until
    `vipctl accept-removal`.
    """

    report_interval: Annotated[float, PERIOD] = Field(2.0, ge=1, le=10, examples=["2s"])
    """How often at most this host tells the others what it has applied, `1s` to `10s`: the longer, the fewer
    writes in a large fleet.
    """

    @field_validator("ca", "cert", "key", "password_file")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_absolute():
            raise ValueError("must be an absolute path")
        return value

    @model_validator(mode="after")
    def _usable(self) -> EtcdOptions:
        """Raises ValueError with one problem a line."""
        if problems := self.settings().problems():
            raise ValueError("\n".join(problems))
        return self

    def settings(self) -> EtcdSettings:
        """The same for the client and the source."""
        return EtcdSettings(**{name: value for name, value in self if name != "report_interval"})
