"""The dataplane that an operator has chosen in place of the settings: kept until another choice."""

from __future__ import annotations

import logging
from pathlib import Path

from vipd.dataplane.base import DATAPLANES
from vipd.host.durable import (
    error_text,
    make_directory,
    move_aside,
    read_fault,
    read_own,
    remove_own,
    write_durably,
)

log = logging.getLogger(__name__)

_MAX_NAME_BYTES = 4096


class ChosenDataplane:
    """An operator's choice instead of the settings, stored in the state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "dataplane"

    def read(self) -> str:
        """The name, or `auto`; empty if the settings count."""
        try:
            chosen = read_own(self._path, _MAX_NAME_BYTES).decode().strip()
            if chosen not in (*DATAPLANES, "auto"):
                raise ValueError("it names no dataplane")
        except FileNotFoundError:
            return ""
        except PermissionError as error:
            log.warning("%s; the settings count", read_fault(self._path, error))
            return ""
        except (OSError, ValueError) as error:
            what, aside = "the dataplane that was chosen cannot be read", move_aside(self._path)
            log.warning("%s: %s: %s; the settings count; %s", self._path, what, error_text(error), aside)
            return ""
        return chosen

    def write(self, chosen: str) -> None:
        """Make it last; empty: the settings count again. Raises OSError."""
        if chosen:
            make_directory(self._path.parent)
            write_durably(self._path, f"{chosen}\n".encode())
        else:
            remove_own(self._path)
