"""Services added by vipctl: one file that the daemon writes, `state_dir/services.yaml`, itself a declaration.

Every change is on disk, synced, before the request is answered (guarantee G4). A copy beside it serves if
the file has been damaged.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from vipd.declaration.native import format_service, parse_declaration
from vipd.declaration.problems import PLEASE_REPORT, Declaration
from vipd.declaration.unit import Unit
from vipd.host.durable import error_text, make_directory, read_own, write_atomically, write_durably
from vipd.model import limits
from vipd.model.service import Service
from vipd.model.text import join_surrogate_pairs

STORE_UNIT = "cli"
COPY_SUFFIX = ".last-good"

_FOREIGN = re.compile(r"[&*\r\x85\u2028\u2029]|\n(?!  - |    |\Z)")
"""In a file of the store: text that may refer to another service, or is no line of a service."""

_HEAD = """\
# Services added by vipctl. vipd writes this file; change it with vipctl.
apiVersion: vipd/v1
services:"""


_HINT = "hint: declare some of them in files"


class StoreError(RuntimeError):
    """The store's file cannot be used; the text gives the reason."""


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
        self._services: Mapping[str, Service] = {}
        self._unit = Unit(self._declaration, self._declaration)
        self._faults: tuple[str, ...] = ()
        self.change_lock = asyncio.Lock()
        """Held from the decision on a change until it is saved."""

    @property
    def location(self) -> str:
        """The file."""
        return str(self._path)

    @property
    def services(self) -> Mapping[str, Service]:
        """The stored services by name; the same object while nothing has changed."""
        return self._services

    def load(self) -> None:
        """Read the file. One that cannot be used is left alone and reported; the last good copy serves."""
        text, found, self._faults = _read(self._path)
        self._blocks = {}
        if not self._faults:
            self._set_declaration(found)
            self._blocks = _blocks_in(text, found.services)
            return
        _, last_good, unusable = _read(self._copy)
        self._set_declaration(Declaration() if unusable else last_good)
        serving = (
            "its last good copy goes on serving" if last_good.services else "there is no good copy of it"
        )
        *first, last = self._faults
        self._faults = (*first, f"{last}; {serving}")  # one fault, one problem: they are counted

    def save(self, services: Mapping[str, Service]) -> None:
        """Replace the stored services, on disk first. Raises StoreError; then nothing has changed.

        It blocks on the disk, and a second for 10,000 services: call it in a thread, one call at a time.
        """
        if self._faults:
            hint = f"mend {self._path} or move it aside, then vipctl reload"
            raise StoreError(f"the store cannot be changed: {self._faults[0]}; hint: {hint}")
        _check_limits(len(services), sum(map(limits.declared_size, services.values())))
        blocks = self._blocks_of(services.values())
        text = _file_text([block for _, block in blocks.values()]).encode()
        if len(text) > limits.FILE_BYTES:
            raise StoreError(
                f"the store would have {len(text)} bytes: {limits.FILE_BYTES} are the most; {_HINT}"
            )
        try:
            make_directory(self._path.parent)
            write_durably(self._path, text)
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be written: {error.strerror}") from None
        with contextlib.suppress(OSError):
            # Not synced: a power cut may lose the copy, but then it has not damaged the file itself.
            write_atomically(self._copy, text)
        self._blocks = blocks
        self._set_declaration(Declaration(tuple(services.values())))

    def reload(self) -> None:
        """Read the file again when it could not be used before."""
        if self._faults:
            self.load()

    def units(self) -> Mapping[str, Unit]:
        """One unit: stored services were accepted when they were stored."""
        if self._unit.candidate is not self._declaration:
            self._unit = Unit(self._declaration, self._declaration)
        return {STORE_UNIT: self._unit}

    def _set_declaration(self, declaration: Declaration) -> None:
        self._services = {service.name: service for service in declaration.services}
        self._declaration = declaration

    def _blocks_of(self, services: Iterable[Service]) -> dict[str, tuple[Service, str]]:
        """Each service with its text, which is the known one while the service is the same. Raises
        StoreError for one whose text does not parse to exactly that service."""
        blocks, fresh = {}, []
        for service in services:
            known = self._blocks.get(service.name)
            if not known or known[0] is not service:
                known = (service, format_service(service).removesuffix("\n"))
                fresh.append(known)
            blocks[service.name] = known
        if fresh and not _reads_back(fresh):
            wrong = next((service.name for service, text in fresh if not _reads_back([(service, text)])), "")
            what = f"what would be written for {wrong or 'these services'} reads back as something else"
            raise StoreError(f"{what}; nothing has changed; {PLEASE_REPORT}")
        return blocks

    def faults(self) -> tuple[str, ...]:
        """Set while the file cannot be used."""
        return self._faults

    def save_accepted(self, chosen: Mapping[str, Declaration]) -> None:
        """Does nothing: the file is the accepted version."""


def _check_limits(services: int, size: int) -> None:
    """Ensures that the file can be read again. Raises StoreError."""
    if services > limits.SERVICES:
        raise StoreError(f"the store would have {services} services: {limits.SERVICES} are the most; {_HINT}")
    if size > limits.MAX_UNIT_SIZE:
        raise StoreError(
            f"the store would have {size} endpoints: {limits.MAX_UNIT_SIZE} are the most; {_HINT}"
        )


def _read(path: Path) -> tuple[str, Declaration, tuple[str, ...]]:
    """A file's text and services, or why it cannot be used. A missing file contains none."""
    try:
        text = read_own(path, limits.FILE_BYTES).decode("utf-8")
    except FileNotFoundError:
        return "", Declaration(), ()
    except (OSError, UnicodeDecodeError) as error:
        return "", Declaration(), (f"{path}: cannot be read: {error_text(error)}",)
    text = join_surrogate_pairs(text)  # earlier versions wrote text as JSON does
    found = parse_declaration(text, str(path), source="cli", accepted=True)
    return (text, found, ()) if found.ok else ("", Declaration(), tuple(map(str, found.problems)))


def _file_text(blocks: Sequence[str]) -> str:
    return "\n".join([_HEAD if blocks else f"{_HEAD} []", *blocks, ""])


def _reads_back(blocks: Sequence[tuple[Service, str]]) -> bool:
    """Whether these texts parse to exactly their services. Each is an independent item without references, so
    that this is true beside any others."""
    text = _file_text([text for _, text in blocks])
    found = parse_declaration(text, STORE_UNIT, source="cli", accepted=True)
    return found.ok and found.services == tuple(service for service, _ in blocks)


def _blocks_in(text: str, services: Sequence[Service]) -> dict[str, tuple[Service, str]]:
    """The text of each service in a file as vipd writes it, and that was read; nothing of others."""
    head = f"{_HEAD}\n"
    if not text.startswith(head) or _FOREIGN.search(text, len(head)):
        return {}
    lines = text.split("\n")
    starts = [service.origin.line - 1 for service in services]
    ends = [*starts[1:], len(lines) - 1]
    return {
        service.name: (service, "\n".join(lines[start:end]))
        for service, start, end in zip(services, starts, ends, strict=True)
    }
