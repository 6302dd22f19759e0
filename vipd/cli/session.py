"""The address and port of this host through which the user is logged in, so that no change cuts that off."""

from __future__ import annotations

import os
from collections.abc import Mapping
from ipaddress import ip_address

_VARIABLE = "SSH_CONNECTION"
_MAX_ANCESTORS = 32
_MAX_ENVIRONMENT_BYTES = 1 << 20


def session_address(environment: Mapping[str, str] = os.environ, proc: str = "/proc") -> str:
    """`192.0.2.1:22`, or `[2001:db8::1]:22`; empty for a user who is not logged in by SSH.

    sudo removes the variable, so the parent processes are read too, as far as permitted.
    """
    found = _address_in(environment.get(_VARIABLE, ""))
    parent = os.getppid()
    for _ in range(_MAX_ANCESTORS):
        if found or parent <= 1:
            break
        found, parent = _of_process(f"{proc}/{parent}")
    return found


def _of_process(directory: str) -> tuple[str, int]:
    """The address in a process's environment, and its parent."""
    try:
        with open(f"{directory}/environ", "rb") as file:  # noqa: PTH123  pathlib is slow to import
            entries = file.read(_MAX_ENVIRONMENT_BYTES).split(b"\0")
        found = next((e for e in entries if e.startswith(_VARIABLE.encode() + b"=")), b"")
        with open(f"{directory}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            after_name = file.read().rpartition(")")[2].split()
        return _address_in(found.partition(b"=")[2].decode("ascii", "replace")), int(after_name[1])
    except (OSError, ValueError, IndexError):
        return "", 0  # another user's, or it has ended


def _address_in(value: str) -> str:
    """The end on this host of `CLIENT PORT SERVER PORT`."""
    words = value.split()
    try:
        address = ip_address(words[2].partition("%")[0].removeprefix("::ffff:"))
        port = int(words[3])
    except (ValueError, IndexError):
        return ""  # not by sshd
    if not 0 < port < 65536:
        return ""
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
