#!/usr/bin/env python3
"""Writes debian/requirements*.txt: every PyPI package that the Debian package carries, pinned and hashed.

    python3 debian/pin_requirements.py    after a change of pyproject.toml's dependencies, or for newer ones

pip resolves the dependencies of pyproject.toml once for each Python that the package serves. The files name
the same versions for all of them; the hashes are those of the files that `debian/bundle.sh` takes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 37)))
"""Up to Debian 12's glibc 2.36."""
HEAD = "# {what}\n# Written by debian/pin_requirements.py.\n"

Pins = dict[tuple[str, str], set[str]]
"""(name, version) -> hashes."""


def resolve(wanted: Iterable[str], options: Iterable[str]) -> Pins:
    """What pip would install, with the hash of each file. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--report", str(report), *options, *wanted], check=True)
        found = json.loads(report.read_text())["install"]
    pins: Pins = {}
    for item in found:
        key = item["metadata"]["name"].lower().replace("_", "-"), item["metadata"]["version"]
        pins[key] = {item["download_info"]["archive_info"]["hashes"]["sha256"]}
    return pins


def for_python(version: str) -> list[str]:
    """pip's options for wheels of another Python."""
    abi = "cp" + version.replace(".", "")
    options = [
        "--target",
        "unused",
        "--only-binary=:all:",
        "--implementation",
        "cp",
        "--python-version",
        version,
    ]
    for kind in (abi, "abi3", "none"):
        options += ["--abi", kind]
    for platform in PLATFORMS:
        options += ["--platform", platform]
    return options


def written(pins: Pins, what: str) -> str:
    """The text of a requirements file."""
    names = [name for name, _ in pins]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        sys.exit(
            f"error: not one version for every Python: {', '.join(sorted(twice))}; pin it in pyproject.toml"
        )
    lines = [
        f"{name}=={version} " + " ".join(f"\\\n    --hash=sha256:{one}" for one in sorted(hashes))
        for (name, version), hashes in sorted(pins.items())
    ]
    return HEAD.format(what=what) + "\n".join(lines) + "\n"


def main() -> None:
    """Write both files."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    pins: Pins = {}
    for version in PYTHONS:
        for key, hashes in resolve(project["dependencies"], for_python(version)).items():
            pins.setdefault(key, set()).update(hashes)
    text = written(pins, f"What vipd needs, for Python {', '.join(PYTHONS)} on amd64.")
    (HERE / "requirements.txt").write_text(text)
    legacy = resolve(project["optional-dependencies"]["legacy"], ["--target", "unused", "--no-deps"])
    text = written(legacy, "The extra `legacy`: source only, compiled by debian/rules.")
    (HERE / "requirements-legacy.txt").write_text(text)


if __name__ == "__main__":
    main()
