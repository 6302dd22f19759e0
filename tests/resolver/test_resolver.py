"""The resolver: what is looked up when, how many at once, and what outlives a restart."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from vipd.declaration.native import parse_declaration
from vipd.host.observer import Observer
from vipd.model.service import Family, NameKind, Service
from vipd.resolver.answers import AnswerLimits, LookupResult, NameState, Question, Target
from vipd.resolver.lookup import LOOKUPS_AT_ONCE, LookupThreads, ServerOptions
from vipd.resolver.resolver import Resolver, ResolverOptions
from vipd.resolver.saved_answers import SavedAnswer, decode, encode, load, save

WEB = Question(NameKind.DNS, "web.internal")
SOON = 5.0


def service(name: str, *names: str, address: str = "10.96.0.10", file: str = "web.yaml") -> Service:
    backends = ", ".join(f"dns:{each}" for each in names)
    text = f'{{name: {name}, address: ["{address}"], ports: 80/tcp, backends: [{backends}]}}'
    found = parse_declaration(f"apiVersion: vipd/v1\nservices: [{text}]", file)
    assert not found.problems, found.problems
    return found.services[0]


class Server(Observer):
    """Answers as told, and counts; also receives the resolver's events."""

    def __init__(self) -> None:
        self.addresses: dict[str, tuple[str, ...]] = {}
        self.asked: list[tuple[str, frozenset[Family]]] = []
        self.running = self.most = 0
        self.gate = threading.Event()
        self.gate.set()
        self.open: set[str] = set()
        """Names that are answered at once, even while the gate is closed."""
        self.changed: list[str] = []
        self._guard = threading.Lock()

    def look_up(
        self,
        question: Question,
        families: Collection[Family],
        _: ServerOptions,
        known: NameState,
        most: int,
    ) -> LookupResult:
        with self._guard:
            self.asked.append((question.name, frozenset(families)))
            self.running += 1
            self.most = max(self.most, self.running)
        if question.name not in self.open:
            self.gate.wait(SOON)
        with self._guard:
            self.running -= 1
        if question.name == "broken.internal":
            raise RuntimeError("a fault of the library")
        found = self.addresses.get(question.name)
        if found is None:
            return LookupResult(fault="the name does not exist (NXDOMAIN)")
        return LookupResult(tuple(sorted(map(Target, found))), ttl=3600)

    def names_resolved(self, name: str, services: Collection[str]) -> None:
        self.changed.append(f"{name} {','.join(services)}")


class Running:
    """A resolver that runs."""

    def __init__(
        self,
        server: Server,
        file: Path | None = None,
        max_names: int = 1000,
        usable: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.server = server
        limits = AnswerLimits(min_ttl=0.01)
        self.resolver = Resolver(
            ResolverOptions(limits=limits, file=file, max_names=max_names),
            server,
            LookupThreads(server.look_up),
        )
        self.resolver.usable = usable
        self.resolver.load()

    async def __aenter__(self) -> Resolver:
        self.tasks = [asyncio.create_task(work()) for work in (self.resolver.run, self.resolver.save_changes)]
        return self.resolver

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.resolver.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON):
        while not condition():  # noqa: ASYNC110 (many conditions, and none has an event)
            await asyncio.sleep(0.005)


def addresses(resolver: Resolver, question: Question = WEB) -> list[str]:
    return [target.address for target in resolver.answers.get(question, ())]


def test_a_followed_name_is_looked_up_once_for_all_services_and_reported() -> None:
    async def story() -> None:
        server = Server()
        server.addresses["web.internal"] = ("10.0.0.1",)
        async with Running(server) as resolver:
            for n in range(5):
                resolver.follow(f"s{n}", service(f"s{n}", "web.internal"))
            await until(lambda: server.changed)
            assert addresses(resolver) == ["10.0.0.1"]
            assert server.asked == [("web.internal", frozenset({Family.IPV4}))]
            assert server.changed == ["dns:web.internal s0,s1,s2,s3,s4"]
            assert resolver.lookups == {"answered": 1, "failed": 0}

    asyncio.run(story())


def test_a_service_of_another_family_has_it_looked_up_again_for_both() -> None:
    async def story() -> None:
        server = Server()
        server.addresses["web.internal"] = ("10.0.0.1",)
        async with Running(server) as resolver:
            resolver.follow("a", service("a", "web.internal"))
            await until(lambda: server.changed)
            resolver.follow("b", service("b", "web.internal", address="fd00:96::1"))
            await until(lambda: len(server.asked) == 2)
            assert server.asked[1][1] == {Family.IPV4, Family.IPV6}
            resolver.follow("b", service("b", "web.internal", address="fd00:96::1"))
            await asyncio.sleep(0.05)
            assert len(server.asked) == 2

    asyncio.run(story())


def test_a_name_that_no_service_uses_is_forgotten() -> None:
    async def story() -> None:
        server = Server()
        server.addresses["web.internal"] = ("10.0.0.1",)
        async with Running(server) as resolver:
            resolver.follow("a", service("a", "web.internal"))
            resolver.follow("b", service("b", "web.internal"))
            await until(lambda: server.changed)
            resolver.follow("a", None)
            assert addresses(resolver) == ["10.0.0.1"]
            resolver.follow("b", service("b", "other.internal"))
            assert (addresses(resolver), WEB in resolver.states) == ([], False)

    asyncio.run(story())


def test_few_lookups_run_at_once_and_a_stalled_server_does_not_stop_the_loop() -> None:
    async def story() -> None:
        server, share = Server(), LOOKUPS_AT_ONCE // 2
        server.gate.clear()
        async with Running(server) as resolver:
            names = [f"n{n}.internal" for n in range(3 * share)]
            resolver.follow("a", service("a", *names))
            await until(lambda: server.running == share)
            await asyncio.sleep(0.05)
            assert server.most == share
            server.addresses = dict.fromkeys(names, ("10.0.0.1",))
            server.gate.set()
            await until(lambda: len(resolver.answers) == len(names))
            assert server.most == share

    asyncio.run(story())


def test_an_unexpected_exception_is_a_fault_of_one_name() -> None:
    async def story() -> None:
        server = Server()
        server.addresses["web.internal"] = ("10.0.0.1",)
        async with Running(server) as resolver:
            resolver.follow("a", service("a", "broken.internal", "web.internal"))
            await until(lambda: len(server.changed) == 1)
            broken = resolver.states[Question(NameKind.DNS, "broken.internal")]
            await until(lambda: resolver.states[Question(NameKind.DNS, "broken.internal")].failures)
            broken = resolver.states[Question(NameKind.DNS, "broken.internal")]
            assert "a fault of the library" in broken.fault
            assert addresses(resolver) == ["10.0.0.1"]

    asyncio.run(story())


def test_a_name_is_asked_again_after_a_fault_in_handling_its_answer() -> None:
    """Whatever raises: what decides whether an address is usable, or the text of a fault."""
    faults = [RuntimeError("an answer that nobody thought of")] * 2

    def usable(_: str) -> bool:
        if faults:
            raise faults.pop()
        return True

    async def story() -> None:
        server = Server()
        server.addresses["web.internal"] = ("10.0.0.1",)
        async with Running(server, usable=usable) as resolver:
            resolver.follow("a", service("a", "web.internal"))
            await until(lambda: resolver.states[WEB].failures)
            assert "an answer that nobody thought of" in resolver.states[WEB].fault
            await until(lambda: addresses(resolver) == ["10.0.0.1"])
            assert resolver.states[WEB].fault == ""

    asyncio.run(story())


def test_beyond_the_limit_names_wait_until_others_leave() -> None:
    async def story() -> None:
        server = Server()
        server.addresses = dict.fromkeys(("a.internal", "b.internal", "c.internal"), ("10.0.0.1",))
        async with Running(server, max_names=2) as resolver:
            for name in "abc":
                resolver.follow(name, service(name, f"{name}.internal"))
            await until(lambda: len(server.changed) == 2)
            assert (resolver.beyond_limit, len(resolver.states)) == (1, 2)
            resolver.follow("a", None)
            await until(lambda: len(server.changed) == 3)
            assert (resolver.beyond_limit, server.changed[2]) == (0, "dns:c.internal c")
            for name in "bc":
                resolver.follow(name, None)
            assert (dict(resolver.states), resolver.answers) == ({}, {})

    asyncio.run(story())


def test_an_author_of_too_many_names_displaces_none_of_another_s() -> None:
    async def story() -> None:
        server = Server()
        greedy = [f"g{n}.internal" for n in range(30)]
        server.addresses = dict.fromkeys([*greedy, "a.internal", "b.internal"], ("10.0.0.1",))
        async with Running(server, max_names=20) as resolver:
            resolver.follow("g", service("g", *greedy))
            await until(lambda: len(server.changed) == 20)
            resolver.follow("a", service("a", "a.internal", file="a.yaml"))
            await until(lambda: "dns:a.internal a" in server.changed)
            assert (resolver.beyond_limit, len(resolver.states), len(resolver.answers)) == (11, 20, 21)
            # A name of several authors is in the share of the one with the fewest.
            waiting = next(name for name in greedy if Question(NameKind.DNS, name) not in resolver.states)
            resolver.follow("b", service("b", waiting, "b.internal", file="b.yaml"))
            await until(
                lambda: {Question(NameKind.DNS, n) for n in (waiting, "b.internal")} <= {*resolver.states}
            )
            resolver.follow("g", None)
            assert len(resolver.states) == 3

    asyncio.run(story())


def test_lookups_of_one_author_that_hang_delay_no_others() -> None:
    async def story() -> None:
        server = Server()
        names = [f"hang{n}.internal" for n in range(100)]
        server.addresses = dict.fromkeys([*names, "a.internal"], ("10.0.0.1",))
        server.gate.clear()
        server.open = {"a.internal"}
        async with Running(server) as resolver:
            resolver.follow("hang", service("hang", *names))
            await until(lambda: server.running >= LOOKUPS_AT_ONCE // 2)
            resolver.follow("a", service("a", "a.internal", file="a.yaml"))
            await until(lambda: server.changed)
            assert server.changed == ["dns:a.internal a"]
            server.gate.set()
            await until(lambda: len(resolver.answers) == 101)

    asyncio.run(story())


def test_after_a_restart_the_last_answer_serves_before_any_lookup(tmp_path: Path) -> None:
    async def story() -> None:
        server, file = Server(), tmp_path / "state" / "names.json"
        server.addresses["web.internal"] = ("10.0.0.1", "10.0.0.2")
        async with Running(server, file) as resolver:
            resolver.follow("a", service("a", "web.internal"))
            await until(lambda: server.changed)
        dead = Server()
        again = Running(dead, file)
        assert addresses(again.resolver) == ["10.0.0.1", "10.0.0.2"]
        async with again as resolver:
            resolver.follow("a", service("a", "web.internal"))
            await until(lambda: resolver.states[WEB].failures > 2)
            assert addresses(resolver) == ["10.0.0.1", "10.0.0.2"]
            assert resolver.states[WEB].answered_at is not None
            assert dead.changed == []

    asyncio.run(story())


def test_a_saved_name_that_nobody_uses_any_more_leaves_the_file(tmp_path: Path) -> None:
    async def story() -> None:
        server, file = Server(), tmp_path / "names.json"
        server.addresses = {"web.internal": ("10.0.0.1",), "b.internal": ("10.0.0.2",)}
        async with Running(server, file) as resolver:
            resolver.follow("a", service("a", "web.internal", "b.internal"))
            await until(lambda: len(server.changed) == 2)
            resolver.follow("a", service("a", "b.internal"))
        assert [question.name for question in load(file)] == ["b.internal"]

    asyncio.run(story())


TARGETS = (Target("10.0.0.1", 80, 1, 2, "a.internal"), Target("fd00::1", 80, 1, 0, "b.internal"))


def test_what_is_saved_is_read_back() -> None:
    answers = {WEB: SavedAnswer(TARGETS, 1e9), Question(NameKind.SRV, "_a._tcp.b"): SavedAnswer((), None)}
    assert decode(encode(answers)) == (answers, 0)


@pytest.mark.parametrize(
    "entry",
    [
        None,
        ["dns"],
        ["mx", "api.internal", 1, []],
        ["dns", "a b", 1, []],
        ["dns", "api.internal", "x", []],
        ["dns", "api.internal", float("inf"), []],
        ["dns", "api.internal", 1, [["10.0.0.1", 80, 0, 1]]],
        ["dns", "api.internal", 1, [["10.0.0.999", 80, 0, 1, ""]]],
        ["dns", "api.internal", 1, [["10.0.0.1", 70000, 0, 1, ""]]],
        ["dns", "api.internal", 1, [["10.0.0.1", True, 0, 1, ""]]],
        ["dns", "api.internal", 1, [["10.0.0.1", 80, -1, 1, ""]]],
        ["dns", "api.internal", 1, [["10.0.0.1", 80, 0, 65536, ""]]],
    ],
)
def test_an_invalid_entry_is_left_out_alone(entry: object) -> None:
    good = json.loads(encode({WEB: SavedAnswer(TARGETS, 1e9)}))
    good["names"].append(entry)  # of another name: it could replace the good one
    found, invalid = decode(json.dumps(good).encode())
    assert (list(found), invalid) == ([WEB], 1)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"format": 2, "names": []}', b"\xff\xfe", b"[" * 9000]
)
def test_a_file_of_another_content_is_kept_aside(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "names.json"
    file.write_bytes(content)
    assert load(file) == {}
    assert not file.exists()
    assert (tmp_path / "names.json.unreadable").read_bytes() == content


def test_a_file_that_is_damaged_in_part_serves_the_rest_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "names.json"
    good = json.loads(encode({WEB: SavedAnswer(TARGETS[::-1], 1e9)}))
    file.write_text(json.dumps(good))
    assert load(file) == {WEB: SavedAnswer(TARGETS, 1e9)}, "in the order in which they serve"
    assert not caplog.records
    good["names"].append(["mx", "web.internal", 1, []])
    file.write_text(json.dumps(good))
    assert load(file).keys() == {WEB}
    assert caplog.messages == [f"{file}: 1 invalid entries are left out"]


def test_a_file_that_cannot_be_written_is_an_error_with_the_consequence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        OSError, match=r"names.json: cannot be written: .*; hint: after a restart names serve only"
    ):
        save(tmp_path / "file" / "names.json", {})
