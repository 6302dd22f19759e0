"""`vipctl explain` and `vipctl render` of a declaration, in this process."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from tests.lab.inside import vipctl
from tests.observe.resident import Ended
from vipd.model.service import Family

Json = dict[str, Any]
GOLDEN = Path(__file__).parents[2] / "golden"
CASES = sorted(p.name for p in GOLDEN.iterdir() if p.is_dir())
"""What a real kube-proxy was given, and the rules that it wrote."""


def run(words: Sequence[str], text: str = "") -> Ended:
    """Run vipctl with a standard input."""
    out, err, given = io.StringIO(), io.StringIO(), io.TextIOWrapper(io.BytesIO(text.encode()))
    with redirect_stdout(out), redirect_stderr(err), mock.patch("sys.stdin", given):
        code = vipctl(words)
    return Ended(code, out.getvalue(), err.getvalue())


@dataclass(frozen=True)
class Declared:
    """A declaration and the settings of a daemon that has it."""

    text: str
    settings: Mapping[str, object] = field(default_factory=dict)

    def ask(self, source: str, target: str, dataplane: str = "iptables", *words: str) -> Ended:
        """`vipctl explain` of a packet."""
        own = self.words("--dataplane", dataplane)
        return run(["explain", "-f", "-", *own, "--from", source, *words, "--", target], self.text)

    def explain(self, source: str, target: str, dataplane: str = "iptables") -> Json:
        """What it says."""
        ended = self.ask(source, target, dataplane, "-o", "json")
        assert ended.code == 0, ended.err
        found: Json = json.loads(ended.out)["explanation"]
        return found

    def render(self, family: Family, dataplane: str = "iptables") -> str:
        """The rules of a family, as iptables-restore or nft reads them."""
        own = self.words("--dataplane", dataplane, "--family", str(family))
        ended = run(["render", *own, "-"], self.text)
        assert ended.code == 0, ended.err
        return ended.out

    def words(self, *words: str) -> list[str]:
        settings = (f"{name}={json.dumps(value)}" for name, value in self.settings.items())
        return [*words, *(word for setting in settings for word in ("--set", setting))]


def golden(case: str, **settings: object) -> Declared:
    """A case of kube-proxy; a setting that is None is left out."""
    recorded = json.loads((GOLDEN / case / "case.json").read_text())["settings"] | settings
    kept = {name: value for name, value in recorded.items() if value is not None}
    return Declared((GOLDEN / case / "manifest.json").read_text(), kept)


def family_of_case(case: str) -> Family:
    """The family a case was recorded in."""
    settings = json.loads((GOLDEN / case / "case.json").read_text())
    return Family.IPV6 if settings["family"] == "IPv6" else Family.IPV4


def rules_text(case: str) -> str:
    """What iptables-save printed of the rules that kube-proxy wrote."""
    return "".join((GOLDEN / case / f"{table}.rules").read_text() for table in ("filter", "nat"))
