"""What vipctl added: one file that the daemon writes, `state_dir/services.yaml`, itself a declaration.

Every change is on disk, synced, before it is answered (guarantee G4). A copy beside it is what serves when
somebody has broken the file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from vipd.catalog import Unit
from vipd.declaration.native import format_service, parse_declaration
from vipd.declaration.problems import Declaration
from vipd.durable import make_directory, read_own, why, write_aside, write_durably
from vipd.model import Service

UNIT = "cli"
COPY_SUFFIX = ".last-good"

_HEAD = """\
# Services added by vipctl. vipd writes this file; change it with vipctl.
apiVersion: vipd/v1
services:"""


class StoreError(RuntimeError):
    """The store's file cannot be used: what and why."""


class StoreSource:
    """The services that vipctl owns."""

    name = "store"
    writes = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._copy = path.with_name(path.name + COPY_SUFFIX)
        self._blocks: dict[str, tuple[Service, str]] = {}
        """Each stored service as it was written last, by name."""
        self._declaration = Declaration()
        self._unit = Unit(self._declaration, self._declaration)
        self._faults: tuple[str, ...] = ()

    @property
    def location(self) -> str:
        """The file."""
        return str(self._path)

    @property
    def services(self) -> Mapping[str, Service]:
        """What is stored, by name."""
        return {service.name: service for service in self._declaration.services}

    def load(self) -> None:
        """Read the file. One that cannot be used is left alone and reported; the last good copy serves."""
        found, self._faults = _read(self._path)
        if not self._faults:
            self._declaration = found
            return
        last_good, unusable = _read(self._copy)
        self._declaration = Declaration() if unusable else last_good
        serving = (
            "its last good copy goes on serving" if last_good.services else "there is no good copy of it"
        )
        *first, last = self._faults
        self._faults = (*first, f"{last}; {serving}")  # one fault, one problem: they are counted

    def save(self, services: Mapping[str, Service]) -> None:
        """Make these the stored services, on disk first. Raises StoreError; then nothing has changed."""
        if self._faults:
            hint = f"mend {self._path} or move it aside, then vipctl reload"
            raise StoreError(f"the store cannot be changed: {self._faults[0]}; hint: {hint}")
        blocks = {service.name: self._block(service) for service in services.values()}
        texts = [text for _, text in blocks.values()]
        lines = [_HEAD if blocks else f"{_HEAD} []", *texts, ""]
        text = "\n".join(lines).encode()
        try:
            make_directory(self._path.parent)
            write_durably(self._path, text)
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be written: {error.strerror}") from None
        with contextlib.suppress(OSError):
            # Not synced: a power cut may lose the copy, but then it has not broken the file itself.
            write_aside(self._copy, text)
        self._blocks = blocks
        self._declaration = Declaration(tuple(services.values()))

    def reload(self) -> None:
        """Read the file again when it could not be used before."""
        if self._faults:
            self.load()

    def units(self) -> Mapping[str, Unit]:
        """One unit: what is stored was accepted when it was stored."""
        if self._unit.candidate is not self._declaration:
            self._unit = Unit(self._declaration, self._declaration)
        return {UNIT: self._unit}

    def _block(self, service: Service) -> tuple[Service, str]:
        """A service with its text, which is the known one while the service is the same."""
        known = self._blocks.get(service.name)
        return known if known and known[0] is service else (service, format_service(service).rstrip("\n"))

    def faults(self) -> tuple[str, ...]:
        """Set while the file cannot be used."""
        return self._faults

    def accepted(self, chosen: Mapping[str, Declaration]) -> None:
        """Nothing to keep: the file is the accepted version."""


def _read(path: Path) -> tuple[Declaration, tuple[str, ...]]:
    """What a file stores, or why it cannot be used. No file stores nothing."""
    try:
        text = read_own(path).decode("utf-8")
    except FileNotFoundError:
        return Declaration(), ()
    except (OSError, UnicodeDecodeError) as error:
        return Declaration(), (f"{path}: cannot be read: {why(error)}",)
    found = parse_declaration(text, str(path), source="cli", accepted=True)
    return (found, ()) if found.ok else (Declaration(), tuple(map(str, found.problems)))
