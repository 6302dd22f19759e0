#!/usr/bin/env python3
"""Writes debian/requirements*.txt: every PyPI package that is bundled, pinned and hashed.

    python3 debian/pin_requirements.py           for newer versions, or other dependencies in pyproject.toml
    python3 debian/pin_requirements.py --same    the versions that are pinned, hashed anew

pip resolves the dependencies of pyproject.toml once for each Python that the package serves. The files name
the same versions for all of them and for each machine; the hashes are those of the files that
`debian/bundle.sh` and `debian/onefile/build.sh` take, and of no other.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
PYTHONS = ("3.11", "3.12", "3.13")
GLIBC = ("manylinux2014", *(f"manylinux_2_{minor}" for minor in range(17, 37)))
"""Up to Debian 12's, 2.36."""
FILES = {"x86_64": "requirements.txt", "aarch64": "requirements-aarch64.txt"}
LEGACY = "requirements-legacy.txt"
BUILD = "requirements-build.txt"
ANY_PYTHON = ("--target", "unused", "--no-deps")
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


def for_python(version: str, machine: str) -> list[str]:
    """pip's options for wheels of another Python and machine."""
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
    for glibc in GLIBC:
        options += ["--platform", f"{glibc}_{machine}"]
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


def pinned(file: str) -> list[str]:
    """What a requirements file pins, as in `click==8.5.1`."""
    return re.findall(r"(?m)^[\w.-]+==\S+", (HERE / file).read_text())


def main() -> None:
    """Write all files."""
    same = sys.argv[1:] == ["--same"]
    read = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
    project = read["project"]
    wanted = pinned(FILES["x86_64"]) if same else project["dependencies"]
    for machine, file in FILES.items():
        pins: Pins = {}
        for version in PYTHONS:
            options = [*for_python(version, machine), *(["--no-deps"] if same else [])]
            for key, hashes in resolve(wanted, options).items():
                pins.setdefault(key, set()).update(hashes)
        text = written(pins, f"What vipd needs, for Python {', '.join(PYTHONS)} on {machine}.")
        (HERE / file).write_text(text)
        # The first machine decides on the versions.
        wanted = [f"{name}=={version}" for name, version in sorted(pins)]
    legacy = pinned(LEGACY) if same else project["optional-dependencies"]["legacy"]
    what = "The extra `legacy`: source only, compiled by debian/rules."
    (HERE / LEGACY).write_text(written(resolve(legacy, ANY_PYTHON), what))
    build = pinned(BUILD) if same else read["build-system"]["requires"]
    what = "What pip runs to read the metadata of a source, as that of requirements-legacy.txt."
    (HERE / BUILD).write_text(written(resolve(build, [*ANY_PYTHON, "--only-binary=:all:"]), what))


if __name__ == "__main__":
    main()
