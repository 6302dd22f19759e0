"""The mutants of small sources, and that the list of accepted ones names mutants that there are."""

from __future__ import annotations

import pytest

from tests.mutation.mutants import mutants_of, mutate, read_accepted, read_seams
from tests.mutation.targets import ROOT, TARGETS


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b == c", ["x = a {< -> <=} b == c", "x = a < b {== -> !=} c"]),
        ("x = a and b", ["x = a {and -> or} b", "x = {a and b -> b}", "x = {a and b -> a}"]),
        (
            "x = b if a else not c",
            [
                "x = {b if a else not c -> b}",
                "x = {b if a else not -> not} c",
                "x = b if a else {not c -> c}",
            ],
        ),
        ("x = a + 1", ["x = a {+ -> -} 1", "x = a + {1 -> 2}"]),
        ("x = a - b | c", ["x = a - b {| -> &} c", "x = a {- b  -> }| c"]),
        ("x = min(-1)", ["x = {min -> max}(-1)", "x = min({-1 -> 1})", "x = min(-{1 -> 2})"]),
        ("x = sorted(a, key=b)", ["x = {sorted(a, key=b -> list(a})"]),
        ("x = a.startswith(b)", ["x = a.{startswith -> endswith}(b)"]),
        (
            "x = True, 'word', 'a sentence'",
            ["x = ({True -> False}, 'word', 'a sentence')", "x = (True, '{word -> wordX}', 'a sentence')"],
        ),
        ("x = f'{a} is wrong', f'{a}:'", ["x = (f'{a} is wrong', f'{a}:{ -> X}')"]),
        ("if a: b()", ["if {a -> not a}:", "{b() -> pass}"]),
        (
            "a.x = [a for a in b if c]",
            ["{a.x = [a for a in b if c] -> pass}", "a.x = [a for a in {b if c -> b}]"],
        ),
        ("x: int | None = None\n'text'", []),
    ],
)
def test_what_is_changed(source: str, expected: list[str]) -> None:
    assert [mutant.name for mutant in mutants_of("x.py", source)] == [f"module: {each}" for each in expected]


def test_names_say_the_function_and_are_unique() -> None:
    source = (
        "class A:\n    @cached(1)\n    def f(self, a: int = 1) -> bool:\n        return 0\n        return 0"
    )
    names = [mutant.name for mutant in mutants_of("x.py", source)]
    assert names == [
        "A.f: def f(self, a: {int=1 -> int=2}) -> bool:",
        "A.f: return {0 -> None}",
        "A.f: return {0 -> 1}",
        "A.f: return {0 -> None} #2",
        "A.f: return {0 -> 1} #2",
    ]
    assert mutate(source, names[-1]).endswith("return 0\n        return 1")


def test_what_is_accepted_is_a_mutant_and_has_a_reason() -> None:
    accepted = read_accepted()
    files = {file for target in TARGETS for file in target.files()} & {mutant.path for mutant in accepted}
    there = {mutant for file in files for mutant in mutants_of(file, (ROOT / file).read_text())}
    assert [mutant for mutant in accepted if mutant not in there] == []
    assert all(accepted.values())


def test_the_tests_of_each_target_exist() -> None:
    rows = [*(target.tests for target in TARGETS), *(seam.tests for seam in read_seams())]
    named = [test for tests in rows for test in tests]
    assert [test for test in named if not (ROOT / test).exists()] == []


def test_each_fault_between_packages_has_its_place() -> None:
    for seam in read_seams():
        compile(seam.changed((ROOT / seam.path).read_text()), seam.path, "exec")
