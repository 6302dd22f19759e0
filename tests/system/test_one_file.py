"""The one file as a service: docs/operations.md, done on a booted machine as it stands there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, Block, parts
from tests.system.machine import Machine

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1800)]

HEADING = "## One file instead of a package"
UNIT = "/etc/systemd/system/vipd.service"
SERVICE = "{name: web, address: 10.96.42.1, ports: [80], backends: [10.244.0.11]}"


def section() -> list[Block]:
    found: list[Block] = []
    within = False
    for part in parts(ROOT / "docs/operations.md"):
        if isinstance(part, Block):
            found += [part] if within else []
        elif part.text.startswith("## "):
            within = part.text == HEADING
    return found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("one-file") / "vipd.pyz"
    build = ["bash", str(ROOT / "debian/onefile/build.sh"), str(made)]
    subprocess.run(build, check=True, capture_output=True, timeout=600)
    return made


@pytest.mark.nightly
def test_the_page_from_its_top_to_its_end_makes_a_service_that_reloads(machine: Machine, file: Path) -> None:
    machine.offer()
    machine.apt("install", "--no-install-recommends", "python3", "iptables")
    place = machine.disk / "srv/one-file"
    (place / "dist").mkdir(parents=True)
    shutil.copy(file, place / "dist/vipd.pyz")
    for block in section():
        if block.language == "ini":
            machine.write(UNIT, block.text)
        for line in block.text.splitlines():
            if block.language == "console" and line.startswith("# "):
                machine.run("sh", "-c", f"cd /srv/one-file && {line.removeprefix('# ')}")
    assert machine.property("ActiveState") == "active"
    assert machine.property("UnitFileState") == "enabled"
    declared = machine.disk / "etc/vipd/services.d"
    declared.mkdir(parents=True, exist_ok=True)
    machine.write("/etc/vipd/services.d/web.yaml", f"apiVersion: vipd/v1\nservices: [{SERVICE}]\n")
    machine.run("systemctl", "reload", "vipd")
    assert "10.96.42.1" in machine.rules(), "the reload is over when systemctl returns"
    machine.write("/etc/vipd/services.d/web.yaml", "apiVersion: vipd/v1\nservices: [{name: web}]\n")
    assert machine.run("systemctl", "reload", "vipd", check=False).returncode != 0
    assert machine.property("ActiveState") == "active"
    assert "10.96.42.1" in machine.rules()
