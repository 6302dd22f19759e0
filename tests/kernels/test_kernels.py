"""vipd on real kernels of distributions, each booted in qemu; skipped unless VIPD_KERNELS names some."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = os.environ.get("VIPD_KERNELS", "").split()
PREPARE_SECONDS, RUN_SECONDS = 1800, 2400

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(PREPARE_SECONDS + RUN_SECONDS + 60),
    pytest.mark.skipif(
        not KERNELS, reason='boots kernels in qemu for minutes: set VIPD_KERNELS="debian12 debian13"'
    ),
]


@pytest.mark.parametrize("name", ["guest", "fast_path"])
@pytest.mark.parametrize("kernel", KERNELS or ["none"])
def test_set_passes(kernel: str, name: str, tmp_path: Path) -> None:
    prepare = ["bash", str(HERE / "prepare.sh"), kernel]
    subprocess.run(prepare, check=True, timeout=PREPARE_SECONDS)
    environment = {**os.environ, "VIPD_PYTHON": sys.executable, "VIPD_KERNELS_SET": name}
    command = ["bash", str(HERE / "run.sh"), kernel, str(tmp_path / "console")]
    ran = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=RUN_SECONDS,
        env=environment,
    )
    print(ran.stdout)
    failed = [line for line in ran.stdout.splitlines() if line.startswith("VIPD FAIL ")]
    console = (tmp_path / "console").read_text(errors="replace") if (tmp_path / "console").exists() else ""
    assert not failed, "\n".join([*failed, console[-6000:]])
    assert ran.returncode == 0, ran.stdout[-6000:]
