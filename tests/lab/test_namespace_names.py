"""What an ended process left behind is found, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import namespace_names
from tests.lab.namespace_names import left_behind, new_prefix

PROGRAM = "from tests.lab.namespace_names import new_prefix; print(new_prefix())"


def test_namespaces_of_a_process_that_has_ended_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespace_names, "NAMESPACES", tmp_path / "none")
    assert left_behind() == []
    monkeypatch.setattr(namespace_names, "NAMESPACES", tmp_path)
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    theirs = f"{ended.stdout.strip()}-b1"
    for name in (theirs, f"{new_prefix()}-host", "vipd", "vipd-docs", f"{os.getpid()}", "blue"):
        (tmp_path / name).touch()
    assert left_behind() == [theirs]
