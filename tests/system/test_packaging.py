"""The Debian package's files are in step with the project, and the package serves every Python."""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tomllib
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docs.markdown import anchors, prose
from tests.system.conftest import Prepared
from vipd import __version__
from vipd.host.settings.settings import Settings

ROOT = Path(__file__).parents[2]
DEBIAN = ROOT / "debian"
PYTHONS = ("3.11", "3.12", "3.13")
MODULES = (
    "vipd.daemon.daemon",
    "vipd.cli.main",
    "vipd.cli.manual.__main__",
    "pyroute2",
    "watchfiles",
    "_yaml",
)
"""Together they import every extension module that the package carries."""


def pins(name: str) -> dict[str, str]:
    text = (DEBIAN / name).read_text()
    return {canonicalize_name(found[1]): found[2] for found in re.finditer(r"(?m)^([\w.-]+)==(\S+)", text)}


@pytest.fixture(scope="module")
def unpacked(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("unpacked")
    subprocess.run(["dpkg-deb", "--extract", str(prepared.package), str(directory)], check=True, timeout=60)
    return directory


def project() -> dict[str, object]:
    read: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return read


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("requirements.txt", project()["dependencies"]),
        ("requirements-legacy.txt", project()["optional-dependencies"]["legacy"]),  # type: ignore[index]
    ],
)
def test_every_dependency_is_pinned_as_the_project_wants_it(file: str, wanted: list[str]) -> None:
    pinned = pins(file)
    for requirement in map(Requirement, wanted):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version, f"{requirement.name} is not in {file}; run debian/pin_requirements.py"
        assert requirement.specifier.contains(version), f"{requirement} is pinned to {version}"


def test_every_pin_has_a_hash() -> None:
    files = sorted(DEBIAN.glob("requirements*.txt"))
    assert len(files) == 4
    for file in files:
        for pin in re.split(r"(?m)^(?=\w)", file.read_text())[1:]:
            assert re.search(r"--hash=sha256:[0-9a-f]{64}", pin), pin


def test_the_same_versions_for_every_machine() -> None:
    assert pins("requirements-aarch64.txt") == pins("requirements.txt")


def test_nothing_is_fetched_without_hashes() -> None:
    """Every call of pip in what builds; what pip itself would fetch to build a source is pinned, too."""
    fetching = []
    for file in (DEBIAN / "bundle.sh", DEBIAN / "onefile/wheels.py"):
        text = file.read_text().replace("\\\n", " ")
        fetching += re.findall(
            r"(?m)^.*(?:pip\"? (?:install|download)|\"pip\", \"download\").*(?:\n    argv.*)?", text
        )
    assert len(fetching) == 4
    for call in fetching:
        assert "--require-hashes" in call, call
        assert "--only-binary=:all:" in call or "--no-build-isolation" in call or "argv" in call, call


def test_the_copyright_file_names_every_package_that_is_carried() -> None:
    text = (DEBIAN / "copyright").read_text()
    for name in (*pins("requirements.txt"), *pins("requirements-legacy.txt")):
        assert re.search(rf"\b{name}\b|/{name.replace('-', '_')}[/.]", text), name


def test_the_version_is_the_program_s() -> None:
    assert re.match(r"vipd \(([^)]+)\)", (DEBIAN / "changelog").read_text())[1] == __version__  # type: ignore[index]


def test_the_same_pythons_everywhere() -> None:
    control = (DEBIAN / "control").read_text()
    minors = [int(version.split(".")[1]) for version in PYTHONS]
    assert f"python3 (>= 3.{min(minors)})" in control
    assert f"python3 (<< 3.{max(minors) + 1})" in control
    assert f"pythons=({' '.join(PYTHONS)})" in (DEBIAN / "bundle.sh").read_text()
    assert f"PYTHONS = {PYTHONS!r}".replace("'", '"') in (DEBIAN / "pin_requirements.py").read_text()


def test_the_settings_file_tells_the_defaults() -> None:
    text = (DEBIAN / "vipd.yaml").read_text()
    assert yaml.safe_load(text) is None, "as installed it sets nothing"
    defaults = yaml.safe_load(re.sub(r"(?m)^#(?=[a-z_]+:)", "", text))
    assert Settings(**defaults) == Settings()
    assert len(defaults) > 10


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.nightly
def test_the_package_runs_with_each_python(unpacked: Path) -> None:
    library = unpacked / "usr/lib/vipd"
    untried = []
    for version in PYTHONS:
        tag = f"cpython-{version.replace('.', '')}-"
        assert len(list(library.rglob(f"*.{tag}*.so"))) == len(list(library.rglob("*.cpython-311-*.so"))) > 5
        python = interpreter(version)
        if python is None:
            untried.append(version)
            continue
        code = f"import sys; sys.path.insert(0, {str(library)!r}); import {', '.join(MODULES)}"
        done = subprocess.run(
            [python, "-ISB", "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{python}: {done.stderr}"
    if untried:
        pytest.skip(f"not tried with Python {', '.join(untried)}: not on this machine; all others work")


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.nightly
def test_two_builds_give_the_same_package(prepared: Prepared, tmp_path: Path) -> None:
    elsewhere = tmp_path / "a-directory-of-another-length"
    elsewhere.mkdir()
    checkout = elsewhere / "checkout"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "tests", "dist", "build", "*.egg-info")
    shutil.copytree(ROOT, checkout, ignore=ignored, symlinks=True)
    for path in checkout.rglob("*"):
        os.utime(path, (10**9, 10**9))
    subprocess.run(
        ["bash", str(checkout / "debian/build.sh"), str(tmp_path / "out")],
        env={
            **os.environ,
            "TMPDIR": str(elsewhere),
            "TZ": "Asia/Kathmandu",
            "LC_ALL": "C",
            "DPKG_DEB_COMPRESSOR_TYPE": "gzip",
            "DPKG_DEB_COMPRESSOR_LEVEL": "1",
        },
        umask=0o077,
        check=True,
        capture_output=True,
        timeout=800,
    )
    (again,) = (tmp_path / "out").glob("vipd_*.deb")
    first, second = (hashlib.sha256(file.read_bytes()).hexdigest() for file in (prepared.package, again))
    assert first == second


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_bill_of_materials_is_what_is_in_the_package(unpacked: Path) -> None:
    bill = json.loads((unpacked / "usr/share/doc/vipd/vipd.cdx.json").read_text())
    listed = {(canonicalize_name(part["name"]), part["version"]) for part in bill["components"]}
    carried = {("python-iptables", pins("requirements-legacy.txt")["python-iptables"])}
    for metadata in (unpacked / "usr/lib/vipd").glob("*.dist-info/METADATA"):
        read = Parser().parsestr(metadata.read_text())
        carried.add((canonicalize_name(read["Name"]), read["Version"]))
    assert listed == carried
    assert len(listed) > 15
    assert bill["metadata"]["component"]["version"] == __version__
    hashes = {each["content"] for part in bill["components"] for each in part["hashes"]}
    text = (DEBIAN / "requirements.txt").read_text() + (DEBIAN / "requirements-legacy.txt").read_text()
    assert hashes == set(re.findall(r"sha256:([0-9a-f]{64})", text))


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_link_of_a_shipped_page_leads_to_a_shipped_file(unpacked: Path) -> None:
    shipped = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    pages = [path for path in shipped if path.endswith(".md") and path.startswith("usr/share/doc/")]
    assert len(pages) > 10, "pages are shipped as they are, not compressed: their links name them so"
    dead = []
    for page in pages:
        for link in (link for line in prose(unpacked / page) for link in line.links()):
            name, _, anchor = link.partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(page), name)) if name else page
            if "://" not in link and target not in shipped:
                dead.append(f"{page}: {link}")
            elif anchor and target.endswith(".md") and anchor not in anchors(unpacked / target):
                dead.append(f"{page}: {link}: no such heading")
    assert dead == []
    examples = "usr/share/doc/vipd/examples/"
    assert {examples + name for name in ("prometheus-alerts.yaml", "grafana-dashboard.json")} <= shipped
    named = [
        (posixpath.join(f"/{directory}", schema), file)
        for directory in ("etc/vipd", "usr/share/doc/vipd/examples")
        for file in sorted((unpacked / directory).glob("*.yaml"))
        for schema in re.findall(r"(?m)^# yaml-language-server: \$schema=(\S+)$", file.read_text())
    ]
    assert len(named) == 2, "vipd.yaml and minimal.yaml"
    assert [file for schema, file in named if posixpath.normpath(schema).lstrip("/") not in shipped] == []


def interpreter(version: str) -> str | None:
    managed = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python3"))
    own = sys.executable if sys.version_info[:2] == tuple(map(int, version.split("."))) else None
    return own or (str(managed[-1]) if managed else None) or shutil.which(f"python{version}")
