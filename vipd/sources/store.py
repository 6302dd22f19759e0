"""What vipctl added: one file that the daemon writes, `state_dir/services.yaml`, itself a declaration.

Every change is on disk, synced, before it is answered (guarantee G4).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vipd.catalog import Unit
from vipd.declaration.native import format_service, parse_declaration
from vipd.declaration.problems import Declaration
from vipd.durable import write_durably
from vipd.model import Service

UNIT = "cli"

_HEAD = """\
# Services added by vipctl. vipd writes this file; change it with vipctl.
apiVersion: vipd/v1
services:"""


class StoreError(RuntimeError):
    """The store's file cannot be used: what and why."""


class StoreSource:
    """The services that vipctl owns."""

    name = "store"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._blocks: dict[Service, str] = {}
        self._declaration = Declaration()
        self._fault = ""

    @property
    def location(self) -> str:
        """The file."""
        return str(self._path)

    @property
    def services(self) -> Mapping[str, Service]:
        """What is stored, by name."""
        return {service.name: service for service in self._declaration.services}

    def load(self) -> None:
        """Read the file. One that cannot be used is left alone, reported, and never written over."""
        try:
            text = self._path.read_bytes().decode("utf-8")
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            self._fault = f"{self._path}: cannot be read: {error}"
            return
        found = parse_declaration(text, str(self._path), source="cli")
        if found.ok:
            self._declaration = found
        else:
            self._fault = "\n".join(map(str, found.problems))

    def save(self, services: Mapping[str, Service]) -> None:
        """Make these the stored services, on disk first. Raises StoreError; then nothing has changed."""
        if self._fault:
            hint = f"mend or move {self._path} aside, then vipctl reload"
            raise StoreError(f"the store cannot be changed: {self._fault}; hint: {hint}")
        blocks = {
            service: self._blocks.get(service) or format_service(service) for service in services.values()
        }
        text = "\n".join([_HEAD if blocks else f"{_HEAD} []", *(b.rstrip("\n") for b in blocks.values()), ""])
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
            write_durably(self._path, text.encode())
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be written: {error.strerror}") from None
        self._blocks = blocks
        self._declaration = Declaration(tuple(services.values()))

    def reload(self) -> None:
        """Read the file again when it could not be used before."""
        if self._fault:
            self._fault = ""
            self.load()

    def units(self) -> Mapping[str, Unit]:
        """One unit: what is stored was accepted when it was stored."""
        return {UNIT: Unit(self._declaration, self._declaration)}

    def faults(self) -> tuple[str, ...]:
        """Set while the file cannot be used."""
        return tuple(self._fault.splitlines())

    def accepted(self, chosen: Mapping[str, Declaration]) -> None:
        """Nothing to keep: the file is the accepted version."""
