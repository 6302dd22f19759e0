"""Limits on programs that vipd starts."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from pathlib import Path

import pytest

from vipd.host.process import run

WRITE = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w')); "


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_program_that_prints_too_much_is_killed(tmp_path: Path, stream: str) -> None:
    """It would sleep for an hour: the limit ends it as soon as it is passed."""
    pid = tmp_path / "pid"
    code = f"{WRITE}sys.{stream}.write('x' * 100_001); sys.{stream}.flush(); time.sleep(3600)"
    with pytest.raises(OSError, match="printed more than 100000 bytes") as caught:
        asyncio.run(run([sys.executable, "-c", code, str(pid)], max_output=100_000))
    assert caught.value.errno == errno.EFBIG
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_output_up_to_the_limit_is_whole() -> None:
    """Both outputs and the input are larger than a pipe's buffer, so that none may wait for another."""
    code = "import sys; said = sys.stdin.read(); sys.stderr.write('e' * 100_000); print(end=said); exit(3)"
    result = asyncio.run(run([sys.executable, "-c", code], "i" * 100_000, max_output=100_000))
    assert result.exit_code == 3
    assert (result.stdout, result.stderr) == ("i" * 100_000, "e" * 100_000)


def test_a_program_that_reads_no_input_is_no_fault() -> None:
    result = asyncio.run(
        run([sys.executable, "-c", "import os; os.close(0)"], "i" * 1_000_000, max_output=10)
    )
    assert result.exit_code == 0
