"""What the file is made of: pinned by hash for every machine, and listed beside it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import lzma
import re
import sys
import zipfile
from collections.abc import Callable
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


def module_of(file: str) -> ModuleType:
    """A module of the builder, by the name under which the others import it."""
    path = PROJECT / "debian/onefile" / file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where its dataclasses look for themselves
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    """debian/onefile/wheels.py."""
    return module_of("wheels.py")


def wheel(path: Path, code: str) -> str:
    """Make a wheel; its hash."""
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**ABOUT, "attr/__init__.py": code}.items():
            archive.writestr(name, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.nightly(each_time="x86_64")
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


@pytest.mark.usefixtures("builder")
@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: b"", id="empty"),
        pytest.param(lambda: b"damaged", id="damaged"),
        pytest.param(lambda: lzma.compress(b"other files"), id="other files"),
        pytest.param(lambda: lzma.compress(bytes(10**7)), id="too large"),
    ],
)
def test_what_was_packed_before_is_taken_only_if_it_is_the_same(
    tmp_path: Path, other: Callable[[], bytes]
) -> None:
    build, files = module_of("build.py"), {"attr/__init__.py": b"good = True\n"}
    packed = build._packed("common", files, tmp_path)
    kept = tmp_path / "common.tar.xz"
    assert kept.read_bytes() == packed == build._packed("common", files, None)
    slower = lzma.compress(lzma.decompress(packed), preset=9)
    kept.write_bytes(slower)
    assert build._packed("common", files, tmp_path) == slower != packed
    kept.write_bytes(other())
    assert build._packed("common", files, tmp_path) == packed == kept.read_bytes()
    assert list(tmp_path.iterdir()) == [kept]
    assert build._packed("common", files, tmp_path / "missing") == packed, "it can be built all the same"


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
