"""Builds the one-file program: wheels of every supported Python, vipd itself, and the code that unpacks them.

The same sources, wheels and liblzma give the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import lzma
import os
import re
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import wheels

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]

SHEBANG = b"#!/usr/bin/python3 -IS\n"
"""Debian's own Python. -I: deaf to PYTHON* variables and to the user's packages; -S: to the system's, too."""

PYTHONS = ("3.11", "3.12", "3.13")
"""Debian 12, Ubuntu 24.04, Debian 13."""

BLOCK = 4096
"""What the size of a file on a disk is a multiple of, usually."""

Files = Mapping[str, bytes]
"""Contents by path."""


def main() -> None:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(prog="build.sh", description="Build vipd as one executable file.")
    parser.add_argument("out", nargs="?", type=Path, default=PROJECT / "dist" / "vipd.pyz", metavar="OUT")
    parser.add_argument(
        "--platform",
        action="append",
        choices=tuple(wheels.PINS),
        help="machine that it is for, may be given twice (default x86_64)",
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        metavar="DIR",
        help="where the wheels and what they are packed to are, or are put when it is empty",
    )
    arguments = parser.parse_args()
    targets = [
        wheels.Target(python, machine)
        for machine in sorted(set(arguments.platform or ["x86_64"]))
        for python in PYTHONS
    ]
    with tempfile.TemporaryDirectory(prefix="vipd-wheels-") as directory:
        try:
            collected = wheels.collect(PROJECT, targets, Path(directory), arguments.wheels)
        except wheels.WheelError as error:
            sys.exit(f"error: {error}")
    data = one_file(collected, arguments.wheels)
    write_program(arguments.out, data)
    write_bill(arguments.out, targets)
    print(f"{arguments.out}: {len(data) / 1e6:.1f} MB, {suits(targets)}")  # noqa: T201


def one_file(collected: Mapping[wheels.Target, Files], kept: Path | None = None) -> bytes:
    """The program. What is the same for all targets is in it once. Parts that were packed before are taken
    from `kept`."""
    first, *rest = collected.values()
    common = {path for path, data in first.items() if all(files.get(path) == data for files in rest)}
    parts = {"common": {path: first[path] for path in common}}
    for target, files in collected.items():
        parts[target.part] = {path: data for path, data in files.items() if path not in common}
    packed = {f"{name}.tar.xz": _packed(name, files, kept) for name, files in parts.items()}
    parts["vipd"] = own_package()
    packed["vipd.tar.xz"] = _compressed(_tar(parts["vipd"]))
    boot = {path.name: path.read_bytes() for path in (HERE / "boot").glob("*.py")}
    about = _contents(list(collected), {**boot, **packed}, parts)
    return _zip({**boot, "contents.py": about, "LICENSE": (PROJECT / "LICENSE").read_bytes(), **packed})


def own_package() -> dict[str, bytes]:
    """The package vipd, with what pyproject.toml declares as its data."""
    paths = [
        path
        for pattern in ("*.py", "*.html", "README.md", "py.typed")
        for path in (PROJECT / "vipd").rglob(pattern)
    ]
    return {path.relative_to(PROJECT).as_posix(): path.read_bytes() for path in paths}


def suits(targets: Iterable[wheels.Target]) -> str:
    """For people: what the file is for."""
    machines = " or ".join(dict.fromkeys(target.machine for target in targets))
    return f"Python {', '.join(PYTHONS[:-1])} or {PYTHONS[-1]} on {machines} (Linux, glibc)"


def write_program(out: Path, data: bytes) -> None:
    """Write an executable file in one step: a program that runs from the old one is not disturbed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    new = out.with_name(f".{out.name}.new")
    new.write_bytes(data)
    new.chmod(0o755)
    new.replace(out)


def write_bill(out: Path, targets: Iterable[wheels.Target]) -> None:
    """Write what is in the file beside it: debian/sbom.py."""
    pins = [
        PROJECT / "debian" / file for file in dict.fromkeys(wheels.PINS[target.machine] for target in targets)
    ]
    argv = [sys.executable, PROJECT / "debian/sbom.py", out.with_name(f"{out.name}.cdx.json"), *pins]
    subprocess.run(argv, check=True)


def _contents(targets: list[wheels.Target], packed: Files, parts: Mapping[str, Files]) -> bytes:
    """The module `contents`, as boot/contents.pyi describes it. Plain assignments, for Pythons of any age."""
    version = re.search(r'^__version__ = "([^"]+)"', (PROJECT / "vipd/__init__.py").read_text(), re.MULTILINE)
    if version is None:
        sys.exit("error: vipd/__init__.py: no __version__")
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(packed.items())}
    digest = hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest()[:16]
    sizes = {
        name: sum(-(-len(data) // BLOCK) * BLOCK for data in files.values()) for name, files in parts.items()
    }
    everywhere = sizes.pop("common") + sizes.pop("vipd")
    space = max(sizes.values()) + 2 * everywhere  # bytecode takes about as much as its source
    values = {
        "VERSION": version[1],
        "DIGEST": digest,
        "SUITS": suits(targets),
        "PARTS": {target.suffix: target.part for target in targets},
        "SHA256": {name: value for name, value in sums.items() if name.endswith(".tar.xz")},
        "MEGABYTES": space // 10**6 + 1,
    }
    return "".join(f"{name} = {value!r}\n" for name, value in values.items()).encode()


def _packed(name: str, files: Files, kept: Path | None) -> bytes:
    """A packed part that is kept, if it is these files packed, or packed and kept."""
    plain, place = _tar(files), kept and kept / f"{name}.tar.xz"
    if place and place.exists():
        with contextlib.suppress(lzma.LZMAError):
            data = place.read_bytes()
            # Only what is compared is trusted, as only wheels with a pinned hash are.
            if lzma.LZMADecompressor().decompress(data, len(plain) + 1) == plain:
                return data
    packed = _compressed(plain)
    if place:
        new = place.with_name(f".{place.name}.{os.getpid()}")  # others may build at the same time
        with contextlib.suppress(OSError):  # what cannot be kept is packed again next time
            new.write_bytes(packed)
            new.replace(place)
    return packed


def _compressed(plain: bytes) -> bytes:
    """The best compression would make the file 12 % smaller, and building it 20 s longer."""
    return lzma.compress(plain, preset=1)


def _tar(files: Files) -> bytes:
    """The files as one, before they are compressed."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, data in sorted(files.items()):
            member = tarfile.TarInfo(path)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _zip(files: Files) -> bytes:
    """An executable ZIP archive, stored: the parts are packed already, and the rest is read faster so."""
    buffer = io.BytesIO()
    buffer.write(SHEBANG)
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted(files.items()):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(entry, data)
    return buffer.getvalue()


if __name__ == "__main__":
    main()
