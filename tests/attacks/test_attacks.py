"""Nobody's excess reaches another: under each attack a bystander's changes and failures are seen in time,
`/healthz` answers, and memory stays bounded and is given back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks.__main__ import EACH_TIME, combinations, run_alone
from tests.attacks.attack import ATTACKS, Attack, table
from tests.docs.markdown import ROOT

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
ATTEMPTS = 3
"""An attack that reaches others does so each time; a busy machine does not."""


def _holds(attacks: tuple[Attack, ...], root: Path) -> None:
    rows = []
    for attempt in range(ATTEMPTS):
        directory = root / str(attempt)
        directory.mkdir()
        rows.append(run_alone(attacks, directory))
        if not rows[-1].failures():
            return
    raise AssertionError(f"{attacks[0].who} reaches others:\n{table(rows)}")


@pytest.mark.parametrize("names", EACH_TIME, ids=" + ".join)
def test_attacks_of_each_day_reach_nobody_else(names: tuple[str, ...], tmp_path: Path) -> None:
    _holds(tuple(ATTACKS[name] for name in names), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_reaches_nobody_else(name: str, tmp_path: Path) -> None:
    _holds((ATTACKS[name],), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "attacks", combinations(), ids=lambda attacks: "+".join(each.name for each in attacks)
)
def test_three_attacks_at_a_time_reach_nobody_else(attacks: tuple[Attack, ...], tmp_path: Path) -> None:
    _holds(attacks, tmp_path)


def test_every_row_of_the_table_of_who_may_what_is_attacked() -> None:
    page = (ROOT / "SECURITY.md").read_text().partition("| Who |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1].strip() for line in page.splitlines()[2:]]
    nobody = {"root of the host", "etcd itself, or an attacker between it and vipd without TLS"}
    nobody |= {"client of a virtual IP"}  # packets in any number: the table promises nothing against them
    assert {each.who for each in ATTACKS.values()} == set(rows) - nobody
