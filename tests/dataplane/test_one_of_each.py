"""The rules of one service of each kind, whole, as they were when somebody last looked at them.

A change of the compilers shows here as a difference of rules. Where it is meant, print the rules anew by
the command that the failure names, and commit them: the difference shows what changes on a host.
"""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.lab.inside import DATAPLANES
from vipd.cli.main import cli

FOLDER = Path(__file__).with_name("one_of_each")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("services", "settings", "dataplane", "family"),
    [
        *itertools.product(["services", "services-with-limits"], ["vipd"], DATAPLANES, ["ipv4", "ipv6"]),
        ("services", "kube-proxy", "iptables", "ipv4"),
    ],
)
def test_the_rules_are_those_that_were_looked_at(
    services: str, settings: str, dataplane: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    here = FOLDER.relative_to(ROOT)
    name = "limits" if services == "services-with-limits" else settings
    expected = here / f"{name}.{family}.{dataplane}"
    argv = ["--dataplane", dataplane, "--set", f"dataplane={dataplane}", "--family", family]
    argv += ["--settings", f"{here}/{settings}.yaml", f"{here}/{services}.yaml"]
    done = CliRunner().invoke(cli, ["render", *argv])
    assert done.exit_code == 0, done.output
    command = f"vipctl render {shlex.join(argv)} > {expected}"
    assert done.stdout.splitlines() == expected.read_text().splitlines(), command
