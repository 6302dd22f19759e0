"""The rules of one service of each kind, whole, as they were when somebody last looked at them.

A change of the compilers shows here as a difference of rules. Where it is meant, print the rules anew by
the command that the failure names, and commit them: the difference shows what changes on a host.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from vipd.cli.main import cli

FOLDER = Path(__file__).with_name("one_of_each")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("dataplane", "settings", "family"),
    [
        ("iptables", "vipd", "ipv4"),
        ("iptables", "vipd", "ipv6"),
        ("iptables", "kube-proxy", "ipv4"),
        ("nftables", "vipd", "ipv4"),
        ("nftables", "vipd", "ipv6"),
    ],
)
def test_the_rules_are_those_that_were_looked_at(
    dataplane: str, settings: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    here = FOLDER.relative_to(ROOT)
    expected = here / f"{settings}.{family}.{dataplane}"
    argv = ["--dataplane", dataplane, "--set", f"dataplane={dataplane}", "--family", family]
    argv += ["--settings", f"{here}/{settings}.yaml", f"{here}/services.yaml"]
    done = CliRunner().invoke(cli, ["render", *argv])
    assert done.exit_code == 0, done.output
    command = f"vipctl render {shlex.join(argv)} > {expected}"
    assert done.stdout.splitlines() == expected.read_text().splitlines(), command
