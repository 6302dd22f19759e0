"""The setting `etcd`: its endpoints, login, and limits of trust."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from vipd.declaration.syntax import InvalidTextError, parse_period

DEFAULT_PREFIX = "/vipd/v1/"


def comma_list(value: object) -> object:
    """The items of a text with commas; anything else as it is."""
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


def _absolute(value: Path | None) -> Path | None:
    if value is not None and not value.is_absolute():
        raise ValueError("must be an absolute path")
    return value


PERIOD, PERCENT = BeforeValidator(_period), BeforeValidator(_percent)
Url = Annotated[str, "a URL"]
AbsoluteFile = Annotated[Path | None, AfterValidator(_absolute)]


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """How to reach etcd. As a setting its values are read as the annotations say; `problems` checks the rest,
    and all of one that is made directly.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", str_strip_whitespace=True)

    endpoints: Annotated[tuple[Url, ...], BeforeValidator(comma_list)] = ()
    """Client ports of the members, each as `https://10.0.0.1:2379`. One that fails is passed over for
    another. Required.
    """
    prefix: str = DEFAULT_PREFIX
    """How every key begins."""
    ca: AbsoluteFile = None
    """File of the CA that signed the members' certificates; unset: those of the system."""
    cert: AbsoluteFile = None
    """Client certificate; needs `key`. Without a common name where etcd has users."""
    key: AbsoluteFile = None
    """Private key of `cert`."""
    user: str = ""
    """User of etcd; needs `password_file`. Over `http://` the password goes unencrypted: vipd warns of that,
    unless the endpoint is on this host.
    """
    password_file: AbsoluteFile = None
    """File whose first line is the user's password."""
    timeout: Annotated[float, PERIOD] = 5.0
    """How long one member may take for an answer, up to `60s`."""
    max_removal: Annotated[int, PERCENT] = 50
    """The most of a folder's services that may go from etcd at once, and of all services. What is more goes
    on serving until `vipctl accept-removal`.
    """
    report_interval: Annotated[float, PERIOD, Field(ge=1, le=10)] = 2.0
    """How often at most this host tells the others what it has applied, `1s` to `10s`: the longer, the fewer
    writes in a large fleet.
    """

    def problems(self) -> list[str]:
        """Every problem, each as `setting: what; hint: way out`."""
        found = [] if self.endpoints else ["endpoints: none; hint: name at least one, https://10.0.0.1:2379"]
        found += [f"endpoints: {url}: {why}" for url in self.endpoints if (why := _fault_of_url(url))]
        if not self.prefix.endswith("/") or self.prefix == "/":
            found.append(
                f"prefix: {self.prefix!r} must end in a slash and hold a name; hint: {DEFAULT_PREFIX}"
            )
        if (self.cert is None) != (self.key is None):
            found.append("cert and key: only one of them is given; hint: give both, or none")
        if bool(self.user) != (self.password_file is not None):
            found.append("user and password_file: only one of them is given; hint: give both, or none")
        if not 0 < self.timeout <= 60:
            found.append(f"timeout: {self.timeout:g} s is not within 0 to 60 s")
        if not 0 <= self.max_removal <= 100:
            found.append(f"max_removal: {self.max_removal}% is not within 0% to 100%")
        return found

    def warnings(self) -> list[str]:
        """Values that work, but should be avoided."""
        open_to_all = [url for url in self.endpoints if url.startswith("http://") and not _is_local(url)]
        if not self.user or not open_to_all:
            return []
        named = ", ".join(open_to_all)
        return [f"etcd's password for {self.user} goes unencrypted to {named}; hint: use https:// endpoints"]


def _is_local(url: str) -> bool:
    """Whether a URL leads to this host, whatever the network."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _fault_of_url(url: str) -> str:
    """Why a URL is no endpoint; empty when it is one."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"{error}; hint: write it like https://10.0.0.1:2379"
    if parts.scheme not in ("http", "https") or not parts.hostname or port is None:
        return "must be scheme, host and port; hint: write it like https://10.0.0.1:2379"
    if parts.path.rstrip("/") or parts.query or parts.fragment or parts.username is not None:
        return "holds more than scheme, host and port; hint: user and password have settings of their own"
    return ""
