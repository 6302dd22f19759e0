"""Every page is run from its top to its end, and prints what it says. What is not run has a reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.docs.markdown import pages
from tests.docs.page_lab import PageLab
from tests.docs.script import Commands, File, NotRun, script_of, stray_commands
from tests.docs.transcript import Step, mismatch

PAGES = [page for page in pages() if any(isinstance(each, Commands) for each in script_of(page))]

LONG = ("guide.md", "operations.md", "troubleshooting.md")
"""Pages of more than sixty commands, which run at night."""

SHORT = ("settings.md", "api.md", "kubernetes.md", "README.md")
"""Pages of a few commands, which run in this order in one lab."""

MOST_LEFT_OUT = 0.15
"""The share of the pages' commands that may be left to the reader alone."""


def faults_in(wanted: Iterable[Path]) -> dict[Path, list[str]]:
    """What each of these pages says otherwise than it is, in a lab of their own."""
    faults: dict[Path, list[str]] = {}
    with PageLab() as lab:
        for page in wanted:
            faults[page] = []
            for action in script_of(page):
                if isinstance(action, File):
                    lab.write(action)
                elif isinstance(action, Commands):
                    faults[page] += filter(None, (fault_of(s, action, *lab.run(s)) for s in action.steps))
    return faults


def fault_of(step: Step, actions: Commands, code: int, printed: str) -> str:
    """Why a step is not as the page says; empty when it is."""
    if not actions.shown:
        return f"{step.place}: `{step.command}` ends with {code}:\n{printed}" if code else ""
    if not step.expected and code:
        return f"{step.place}: `{step.command}` ends with {code}, which the page does not show:\n{printed}"
    different = mismatch(step.expected, printed, actions.varies)
    return f"{step.place}: `{step.command}` (- the page, + printed):\n{different}" if different else ""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Mapping[Path, Future[dict[Path, list[str]]]]]:
    """The wanted pages, all at work at the same time: most of it is waiting. Other tests have pages, too."""
    wanted: set[Path] = set()
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.function is test_a_page_does_what_it_says:
            wanted.add(item.callspec.params["page"])  # type: ignore[arg-type]  # it is one
    with ThreadPoolExecutor(len(PAGES)) as pool:
        short = sorted((p for p in wanted if p.name in SHORT), key=lambda page: SHORT.index(page.name))
        runs = {page: pool.submit(faults_in, [page]) for page in wanted.difference(short)}
        yield runs | dict.fromkeys(short, pool.submit(faults_in, short))


@pytest.mark.root
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.nightly if page.name in LONG else ()) for page in PAGES],
    ids=lambda page: page.name,
)
def test_a_page_does_what_it_says(runs: Mapping[Path, Future[dict[Path, list[str]]]], page: Path) -> None:
    faults = runs[page].result()[page]
    assert not faults, "\n\n".join(faults)


def test_what_is_not_run_has_a_reason_and_is_little() -> None:
    left_out = [each for page in pages() for each in script_of(page) if isinstance(each, NotRun)]
    ran = [
        step
        for page in pages()
        for each in script_of(page)
        if isinstance(each, Commands)
        for step in each.steps
    ]
    for each in left_out:
        print(f"{each.block}: not run: {each.reason}")
    assert [str(each.block) for each in left_out if not each.reason] == []
    nowhere = [each for each in left_out if "tests/" not in each.reason and "the tests" not in each.reason]
    commands = sum(each.block.text.count("\n") for each in nowhere)
    assert commands <= MOST_LEFT_OUT * (commands + len(ran))


def test_no_command_stands_where_nobody_would_run_it() -> None:
    assert [stray for page in pages() for stray in stray_commands(page)] == []


def test_no_output_is_still_to_be_filled_in() -> None:
    assert [page.name for page in pages() if "\n@@\n" in page.read_text(encoding="utf-8")] == []
