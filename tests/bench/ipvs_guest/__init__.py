"""IPVS beside vipd on a kernel of Debian: that of this machine may lack IPVS.

`guest.py` measures in the guest; here its rows are read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.bench.extent import SMOKE, Extent
from tests.bench.path.programs import Programs
from tests.bench.progress import say
from tests.bench.record import Measurement

KERNEL = "debian13"
KERNELS = Path(__file__).parents[2] / "kernels"
PREPARE_SECONDS, GUEST_SECONDS = 1800, 5400


def measure(extent: Extent) -> Iterator[Measurement]:
    """Every row, again and longer after each round. Needs root, and downloads the kernel if it is not there.

    CalledProcessError when the guest fails; its console is on standard error.
    """
    if extent is SMOKE:
        return
    subprocess.run(["bash", str(KERNELS / "prepare.sh"), KERNEL], check=True, timeout=PREPARE_SECONDS)
    with tempfile.TemporaryDirectory(prefix="vipd-ipvs-") as directory:
        Programs(Path(directory))
        shutil.copy2(shutil.which("iperf3") or "iperf3", directory)
        environment = {
            **os.environ,
            "VIPD_PYTHON": sys.executable,
            "VIPD_KERNELS_SET": "tests.bench.ipvs_guest.guest",
            "VIPD_KERNELS_PROGRAMS": directory,
            "VIPD_KERNELS_SECONDS": str(GUEST_SECONDS),
            # Its processor is emulated, so its seconds say nothing; instructions can be compared.
            "VIPD_KERNELS_ICOUNT": "1",
        }
        command = ["bash", str(KERNELS / "run.sh"), KERNEL]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running:
            assert running.stdout is not None
            for line in running.stdout:
                word, _, text = line.removeprefix("VIPD ").partition(" ")
                if word == "measured":
                    yield Measurement.read(json.loads(text))
                else:
                    say(f"ipvs: {line.strip()}")
        if running.returncode:
            raise subprocess.CalledProcessError(running.returncode, command)
