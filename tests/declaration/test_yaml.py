"""YAML as vipd reads it: the plain part of it, and a problem with its line for everything else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.inside import declare
from tests.model.samples import HEAD
from vipd.model.limits import YAML_DEPTH
from vipd.model.service import Affinity, Protocol, ServicePort

HERE = Path(__file__).parent
SERVICE = "  - {{name: {}, address: 10.96.0.1, ports: 80}}\n"
REFUSED = {
    "a: [1": (1, "YAML syntax"),
    "a: 1\n b: 2: 3\n": (2, "YAML syntax"),
    "a: 1\n\tb: 2\n": (2, "YAML syntax"),
    "a: 1\nb: \x00\n": (2, "U+0000"),
    "b: \ud800\n": (1, "U+D800"),
    "a: \udcff\n": (1, "byte 0xff"),
    "a: &x [*x]": (1, "contains itself"),
    "a: &x {b: {c: *x}}": (1, "contains itself"),
    "[" * 100_000: (1, "levels deep"),
    "- " * 1000: (1, "levels deep"),
    "[" * (YAML_DEPTH + 1) + "]" * (YAML_DEPTH + 1): (1, "levels deep"),
    "a: 1\nb: 2\na: 3": (3, "first on line 1"),
    "'a': 1\n\"a\": 2": (2, "first on line 1"),
    "a:\n  <<: {b: 1}": (2, "merge key"),
    "a: !!int 3": (1, "YAML tags"),
    "a: ! 3": (1, "YAML tags"),
    "a: !!python/object:os.system {}": (1, "YAML tags"),
    "? {a: 1}\n: b": (1, "key must be text"),
    "a: &x 1\n---\nb: *x\n": (3, "has no anchor"),
    "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30)): (
        5,
        "aliases stand",
    ),
}


def test_what_is_not_plain_yaml_is_a_problem_with_its_line() -> None:
    differing = {}
    for text, (line, what) in REFUSED.items():
        problems = declare(text).problems
        lines = (line, line + 1) if what == "YAML syntax" else (line,)
        if not any(p.line in lines and what in p.what for p in problems):
            differing[text[:40]] = [str(problem) for problem in problems]
    assert not differing


def test_nesting_up_to_the_limit_is_read() -> None:
    text = "x-a: " + "[" * (YAML_DEPTH - 1) + "]" * (YAML_DEPTH - 1)
    assert declare(f"{HEAD}{SERVICE.format('a')}{text}\n").ok


MEANINGS = {
    "an integer": "5 0",
    "an octal number in YAML": "010 0o10",
    "a number with a leading zero": "08",
    "a hexadecimal number in YAML": "0x10",
    "a binary number in YAML 1.1": "0b10",
    "a base-60 number in YAML 1.1": "53:22",
    "a number with digit groups in YAML 1.1": "1_000",
    "a number with a plus sign in YAML": "+5",
    "a floating-point number in YAML": "1e3 1. .5 -.inf .NaN",
    "a boolean in YAML 1.1": "yes Off",
    "a boolean": "True",
    "a date in YAML 1.1": "2026-11-21 2026-11-21T10:00:00Z",
}


def test_plain_scalars_that_are_no_text_are_explained_and_quoted_ones_are_text() -> None:
    for meaning, texts in MEANINGS.items():
        for text in texts.split():
            told = str(declare(HEAD + SERVICE.format(text)).problems[0])
            assert f"must be a name, not {text} ({meaning})" in told
            assert meaning not in str(declare(HEAD + SERVICE.format(f"'{text}'")).problems)
    for empty in ("", "~"):
        assert "has no value" in str(declare(HEAD + SERVICE.format(empty)).problems[0])
    for text in ("dns", "1d", "e3", "nowhere", "1" * 60 + "x"):
        assert declare(HEAD + SERVICE.format(text)).services[0].name == text


def test_huge_numbers_are_matched_in_linear_time() -> None:
    assert declare(HEAD + SERVICE.format("1" * 1_000_000 + "x")).problems
    assert declare(f"{HEAD}  - {{address: 10.96.0.1, ports: [{{port: {'1' * 1_000_000}}}]}}\n").problems


def test_quotes_tell_text_from_number() -> None:
    text = f"{HEAD}  - {{address: 10.96.0.1, ports: [{{port: 53}}, {{port: '54'}}, {{port: \"55\"}}]}}\n"
    assert [p.path for p in declare(text).problems] == [f"services[0].ports[{n}].port" for n in (1, 2)]


def test_documents_are_read_one_by_one_and_empty_ones_are_passed_over() -> None:
    first, second = HEAD + SERVICE.format("a"), HEAD + SERVICE.format("b").replace("0.1", "0.2")
    text = f"---\n{first}---\n---\n# no\n---\n~\n---\n{second}...\n"
    found = declare(text)
    assert found.ok
    assert [(service.name, service.origin.line) for service in found.services] == [("a", 4), ("b", 13)]
    torn = declare(f"{first}---\nb: [")
    assert [service.name for service in torn.services] == ["a"]
    assert not torn.ok


def test_an_alias_stands_for_its_anchor_which_may_be_set_again() -> None:
    text = (
        f"{HEAD}  - {{name: &x a, address: 10.96.0.1, ports: &y [80], affinity: client-ip}}\n"
        "  - {name: &x b, address: 10.96.0.2, ports: *y}\n"
        "  - {name: c, address: 10.96.0.3, ports: [{port: 81, name: *x}], affinity: &z 60s}\n"
        "  - {name: d, address: 10.96.0.4, ports: *y, affinity: *z}\n"
    )
    found = declare(text)
    assert found.problems == ()
    a, b, c, d = found.services
    assert a.ports == b.ports == d.ports == (ServicePort(80, Protocol.TCP),)
    assert (c.ports[0].name, c.affinity, d.affinity) == ("b", Affinity(60), Affinity(60))


def test_a_python_without_libyaml_reads_the_same(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import yaml\ndel yaml.CSafeLoader\n")
    root = HERE.parents[1]
    broken = sorted((HERE / "broken").glob("*.yaml"))
    ended = subprocess.run(
        [sys.executable, "-m", "vipd.cli.main", "check", *(path.name for path in broken)],
        cwd=HERE / "broken",
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{root}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    expected = "".join(path.with_suffix(".expected").read_text() for path in broken).splitlines()
    told = {line for line in expected if "YAML syntax" not in line and "UTF-8" not in line}
    assert told - set(ended.stderr.splitlines()) == set()
    # libyaml alone takes a colon at the end of a plain scalar for a fault of syntax.
    assert ended.stderr.count("YAML syntax") == sum("YAML syntax" in line for line in expected) - 1


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_no_document_declares_nothing(text: str) -> None:
    assert (declare(text).services, declare(text).problems) == ((), ())
