"""A backend that registers itself cannot have a program run on every host."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from vipd.fleet.door import Fleet
from vipd.model import Backend
from vipd.settings import load_settings
from vipd.sources.etcd import EtcdSource
from vipd.sources.etcd_values import read_registration

URL = "http://127.0.0.1:1"


def registered(address: str, value: str) -> Backend:
    found = read_registration(f"/vipd/v1/backends/web/{address}", f"web/{address}", value)
    assert isinstance(found, tuple), found
    return found[1]


def fleet(state_dir: Path, exec_checks: str) -> Fleet:
    flags = {"state_dir": str(state_dir), "etcd": {"endpoints": [URL]}, "exec_checks": exec_checks}
    settings = load_settings(flags=flags)
    assert settings.etcd is not None
    return Fleet(settings, settings.etcd, lambda: datetime.now(UTC))


@pytest.mark.parametrize(("exec_checks", "left"), [("files", 1), ("off", 1), ("anywhere", 2)])
def test_checks_that_run_programs_are_left_out(
    exec_checks: str, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = registered("10.244.0.1:80", "{weight: 2}")
    program = registered("10.244.0.2:80", "{check: {type: exec, command: [/bin/true]}}")
    known = {"web": (plain, program), "dns": (plain,)}
    monkeypatch.setattr(EtcdSource, "registrations", known)
    made = fleet(tmp_path, exec_checks)
    found = made.registrations()
    assert found["web"] == (plain, program)[:left]
    assert found["dns"] is known["dns"]
    assert ["left out" in warning for warning in made.warnings()] == [True] * (2 - left)
