"""A directory of declarations with a source on it, as the reconciler uses it."""

from __future__ import annotations

from pathlib import Path

from tests.model.samples import HEAD, block
from vipd.control.catalog import merge
from vipd.sources.files import FileSource

GOOD = HEAD + block("10.96.0.10", "dns", "10.244.0.5")
OTHER = HEAD + block("10.96.0.11", "web", "10.244.0.6")
BAD = HEAD + "  - {address: 10.96.0.300}\n"


class ServicesDirectory:
    """A services.d, the place of accepted copies, and a source on them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "services.d"
        self.kept = root / "state" / "accepted"
        self.directory.mkdir()
        self.source = FileSource(self.directory, self.kept)

    def write(self, name: str, text: str | bytes) -> Path:
        """Write a file in place."""
        path = self.directory / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def save(self, name: str, text: str) -> None:
        """Save as careful editors do: a new file renamed over the old."""
        aside = self.directory / f".{name}.tmp"
        aside.write_text(text)
        aside.rename(self.directory / name)

    def step(self, scan: bool = True) -> set[str]:
        """Scan and accept as the reconciler does; the names that serve."""
        if scan:
            self.source.scan()
        merged = merge(self.source.units())
        self.source.save_accepted(merged.chosen)
        return set(merged.services)

    def problems(self) -> str:
        """What is wrong with the candidates."""
        found = merge(self.source.units()).problems.values()
        return "\n".join(str(p) for part in found for p in part)

    def restart(self) -> None:
        """A new source on the same directories."""
        self.source = FileSource(self.directory, self.kept)


def link_swap(services_dir: ServicesDirectory, version: str, text: str) -> None:
    """What a ConfigMap volume does: files are links into `..data`, itself a link that is renamed over."""
    target = services_dir.directory / f"..{version}"
    target.mkdir()
    (target / "a.yaml").write_text(text)
    aside = services_dir.directory / "..data_tmp"
    aside.symlink_to(target.name)
    aside.rename(services_dir.directory / "..data")
