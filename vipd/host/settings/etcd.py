"""Where etcd is and how to talk to it, as a value."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

DEFAULT_PREFIX = "/vipd/v1/"


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """How to reach etcd. `problems` says what cannot be used; nothing else checks."""

    endpoints: tuple[str, ...]
    """URLs of the members' client ports, `https://10.0.0.1:2379`."""
    prefix: str = DEFAULT_PREFIX
    """Start of every key; ends in a slash."""
    ca: Path | None = None
    """CA that signed the servers' certificates; None: the system's."""
    cert: Path | None = None
    """Client certificate, with `key`. Without a common name if etcd's authentication is on."""
    key: Path | None = None
    user: str = ""
    password_file: Path | None = None
    """File of which the first line is the user's password; read anew for each log-in."""
    timeout: float = 5.0
    """Seconds for one answer of one endpoint."""
    max_removal: int = 50
    """Percent of the services that may go at once; 100: any number."""

    def problems(self) -> list[str]:
        """Everything that is wrong, each as `setting: what; hint: way out`."""
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
        """What can be used, and had better not be."""
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
