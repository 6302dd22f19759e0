"""What the file is made of: pinned by hash for every machine, and listed beside it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from types import ModuleType

import pytest

from tests.onefile.built import PROJECT, FreshHost, bill
from tests.onefile.conftest import Build

WHEEL = "attrs-1.0-py3-none-any.whl"
ABOUT = {
    "attr/__init__.py": "",
    "attrs-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: attrs\nVersion: 1.0\n",
    "attrs-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "attrs-1.0.dist-info/RECORD": "",
}


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    """debian/onefile/wheels.py."""
    spec = importlib.util.spec_from_file_location("wheels", PROJECT / "debian/onefile/wheels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["wheels"] = module  # where its dataclasses look for themselves
    spec.loader.exec_module(module)
    return module


def wheel(path: Path, code: str) -> str:
    """Make a wheel; its hash."""
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**ABOUT, "attr/__init__.py": code}.items():
            archive.writestr(name, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_wheel_with_another_hash_is_refused(builder: ModuleType, tmp_path: Path, machine: str) -> None:
    target, kept = builder.Target("3.11", machine), tmp_path / "kept"
    pinned = wheel(kept / target.part / WHEEL, "good = True\n")
    pins = tmp_path / "project/debian"
    pins.mkdir(parents=True)
    for name in ("requirements.txt", "requirements-aarch64.txt"):
        (pins / name).write_text(f"attrs==1.0 \\\n    --hash=sha256:{pinned}\n")
    scratch = tmp_path / "good"
    scratch.mkdir()
    collected = builder.collect(tmp_path / "project", [target], scratch, kept)
    assert collected[target]["attr/__init__.py"] == b"good = True\n"
    other = tmp_path / "other"
    wheel(other / target.part / WHEEL, "evil = True\n")
    scratch = tmp_path / "bad"
    scratch.mkdir()
    with pytest.raises(builder.WheelError, match="HASH"):
        builder.collect(tmp_path / "project", [target], scratch, other)


@pytest.mark.nightly
def test_the_bill_lists_what_is_in_the_file(made: Build, warm: FreshHost) -> None:
    listed = json.loads(bill(made.file).read_text())
    assert (listed["bomFormat"], listed["specVersion"]) == ("CycloneDX", "1.5")
    carried = set()
    for metadata in warm.lib.glob("*.dist-info/METADATA"):
        read = Parser().parsestr(metadata.read_text())
        carried.add((re.sub(r"[-_.]+", "-", read["Name"]).lower(), read["Version"]))
    assert {(part["name"], part["version"]) for part in listed["components"]} == carried
    wheels = {hashlib.sha256(path.read_bytes()).hexdigest() for path in made.wheels.rglob("*.whl")}
    assert {each["content"] for part in listed["components"] for each in part["hashes"]} == wheels
