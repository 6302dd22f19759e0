"""What every test relies on: tests that need root say so, and a run that is ended tidies up."""

from __future__ import annotations

import gc
import os
import signal
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.lab.namespace_names import left_behind

settings.register_profile(
    "vipd",
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "fresh",
    settings.get_profile("vipd"),
    derandomize=False,
    max_examples=1000,
    print_blob=True,
)
settings.register_profile(
    "no-shrinking",
    settings.get_profile("vipd"),
    max_examples=100,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("vipd")
"""The same examples in every run, however slow the machine: what fails, fails again. Loaded here, before any
test is read, so that what a test sets for itself builds on it. `fresh` is for `tests/run.sh --nightly`."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `root` when it is not run by root. tests/run.sh asks for root, and skips none."""
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root for network namespaces: sudo bash tests/run.sh")


LONGEST = (
    "tests/packets/test_foreign_forward",
    "tests/observe/doctor/test_faults",
    "tests/docs/test_pages",
    "tests/onefile",
    "tests/dataplane/iptables/watch/test_watch",
    "tests/dataplane/iptables/test_walks",
    "tests/dataplane/nftables/test_no_hole",
    "tests/system/test_life",
    "tests/system",
    "tests/observe/explain/test_real_packets",
    "tests/packets",
    "tests/faults",
    "tests/host/systemd",
    "tests/fleet",
    "tests/health",
    "tests/announce",
    "tests/fuzz",
    "tests/torture",
    "tests/control/overrides",
    "tests/limits/test_long_files",
    "tests/api",
    "tests/observe",
    "tests/host",
    "tests/sources",
    "tests/resolver",
    "tests/dataplane",
)
"""Beginnings of the names of tests whose files take long, the longest first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run the tests marked nightly too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for the night unless it is asked for, or its file or a test of that is named. Put the
    files in the order in which several processes take them."""
    if not config.getoption("nightly"):
        named = {Path(config.invocation_params.dir, arg.partition("::")[0]) for arg in config.args}
        left_out = {item for item in items if _nightly(item)} | _other_halves(items)
        left_out = {item for item in left_out if item.path not in named}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    places = _places(items)
    items.sort(key=lambda item: places[item.path])


MANY = 6
"""Variants of a test with one parameter of which half are enough."""


def _other_halves(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Half of the variants of each test with the kernel that has several parameters, such as dataplane,
    family and protocol, or many cases. Every value of each parameter is used each time, and with three
    parameters or more every two values together; which half it is differs from test to test. A test that has
    marks `nightly` says itself which variants run."""
    tests: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and hasattr(item, "callspec")
            and item.get_closest_marker("root")
        ):
            tests[item.nodeid.partition("[")[0]].append(item)
    return {
        item
        for name, variants in tests.items()
        if not any(item.get_closest_marker("nightly") for item in variants)
        if len(values := _values(variants)) > 1 or len(variants) >= MANY
        for item in variants
        if (
            zlib.crc32(name.encode()) + sum(values[each].index(item.callspec.params[each]) for each in values)
        )
        % 2
    }


def _values(variants: list[pytest.Function]) -> dict[str, list[object]]:
    """The values of each parameter of a test that has more than one."""
    values: defaultdict[str, list[object]] = defaultdict(list)
    for item in variants:
        for name, value in item.callspec.params.items():
            if value not in values[name]:
                values[name].append(value)
    return {name: each for name, each in values.items() if len(each) > 1}


def _nightly(item: pytest.Item) -> bool:
    """Whether it is for the night: marked `nightly`, and not the variant that runs each time."""
    mark = item.get_closest_marker("nightly")
    variant = (
        item.callspec.id.split("-") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    )
    return mark is not None and mark.kwargs.get("each_time") not in variant


def _places(items: Iterable[pytest.Item]) -> dict[Path, float]:
    """Where the file of each test comes, from 0 to 1: the longest first, for none is to be left alone in the
    end, and those with the kernel, which mostly wait, evenly between those that compute."""
    files = {item.path: item.nodeid for item in items}
    with_kernel = {item.path for item in items if item.get_closest_marker("root")}
    places: dict[Path, float] = {}
    for group in (files.keys() & with_kernel, files.keys() - with_kernel):
        ordered = sorted(group, key=lambda file: (_rank(files[file]), file))
        places |= {file: number / len(ordered) for number, file in enumerate(ordered)}
    return places


def _rank(name: str) -> int:
    ranks = (rank for rank, beginning in enumerate(LONGEST) if name.startswith(beginning))
    return next(ranks, len(LONGEST))


EXTENT = (
    "VIPD_SOAK",
    "VIPD_CHANGES",
    "VIPD_OVERRIDES",
    "VIPD_TORTURE",
    "VIPD_TORTURE_SEED",
    "VIPD_FUZZ",
    "VIPD_FUZZ_SEED",
    "VIPD_KERNELS",
)
"""How long or how often some tests run. They read it when they are imported."""


sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
"""What pytest makes of the asserts of a file, which takes longer than all else before the first test, is
kept; and vipd, which the tests start some thousand times, is compiled once."""
gc.disable()
"""Hardly anything becomes garbage while tests are collected; looking for it takes a quarter of the time."""


def pytest_collection_finish() -> None:
    """Take these out of the environment, where vipd reads every name under VIPD_ as a setting; from now on
    garbage is looked for, seldom, and not in what was imported and collected."""
    for name in EXTENT:
        os.environ.pop(name, None)
    gc.freeze()
    gc.set_threshold(10_000)  # 700, the default, takes a twentieth of the time of tests that compute
    gc.enable()


def pytest_configure() -> None:
    """Have ctrl-C and the end of a session reach the programs under test also where this run was started in
    the background by a shell, or by nohup, which have them ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # this run goes on; what it starts has the default


def pytest_sessionstart(session: pytest.Session) -> None:
    """Delete what a killed run has left."""
    _delete_left_behind(session.config)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Delete what processes of this run have left that were killed, as those that need long to end are."""
    _delete_left_behind(session.config)


def _delete_left_behind(config: pytest.Config) -> None:
    if os.geteuid() == 0 and not hasattr(config, "workerinput") and (names := left_behind()):
        # Seldom needed; as a user the tests run without it.
        from tests.lab.node import Node
        from tests.lab.topology import delete_nodes

        delete_nodes(*(Node(name, "left behind", "", "") for name in names))


@pytest.fixture(scope="session", autouse=True)
def _end_in_order() -> Iterator[None]:
    """SIGTERM ends the run as ctrl-C does, so that the labs are deleted."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    yield
    signal.signal(signal.SIGTERM, before)
