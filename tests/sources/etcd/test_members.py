"""Members that die, freeze or lose the others, and a connection that falls silent: nothing is lost."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.sources.etcd.following import PREFIX, Follower, follow, key, value, values
from tests.sources.etcd.gateway import gateway
from tests.sources.etcd.members import Cluster, KeyValue, cluster
from tests.sources.etcd.relay import relay

COUNT = 150


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("trio"), 3) as made:
        yield made


@pytest.fixture
def three(trio: Cluster) -> Cluster:
    trio.ensure()
    trio.clear()
    return trio


@contextmanager
def frozen(etcd: Cluster, *urls: str) -> Iterator[None]:
    """These members stand still meanwhile; afterwards all take writes again."""
    for url in urls:
        etcd.member(url).signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for url in urls:
            etcd.member(url).signal(signal.SIGCONT)
        etcd.wait_for_writes()


def write_all(etcd: Cluster, urls: list[str]) -> None:
    """New keys one by one, each once, at the first of these members that takes it."""
    for n in range(1, COUNT + 1):
        written = False
        while not written:
            for url in urls:
                try:
                    etcd.create(key(f"s{n:03}"), value(n), url)
                except OSError:
                    continue
                written = True
                break
            else:
                time.sleep(0.1)


@pytest.mark.nightly(each_time="killed")
@pytest.mark.parametrize("way", ["killed", "frozen"])
def test_nothing_is_lost_and_order_is_kept_when_the_watched_member_goes(three: Cluster, way: str) -> None:
    async def story(host: Follower) -> None:
        await host.until_well()
        used = (await host.etcd())["endpoint"]
        others = [url for url in three.urls if url != used]
        writing = threading.Thread(target=write_all, args=(three, others))
        writing.start()
        await host.until(lambda: len(host.names()) > 20, "changes")
        member = three.member(used)
        if way == "killed":
            member.stop()
        else:
            member.signal(signal.SIGSTOP)
        try:
            await host.until(lambda: len(host.names()) == COUNT, "all changes")
            writing.join()
            order = [f.service for change in host.vipd.kernel.writes for f in sorted(change, key=str)]
            assert order == sorted(order)

            async def moved() -> bool:
                return (await host.etcd())["endpoint"] in others

            await host.until(moved, "another member")
            await host.until_well()
        finally:
            if way == "frozen":
                member.signal(signal.SIGCONT)
            three.ensure()

    follow(three.urls, story, timeout="2s")


def test_a_member_that_lost_the_others_is_left(three: Cluster) -> None:
    async def story(host: Follower) -> None:
        await host.until_well()
        used = (await host.etcd())["endpoint"]
        with frozen(three, *(url for url in three.urls if url != used)):
            await host.until_problem("no service of it is known")
        three.put(key("s001"), value(1))
        await host.until(lambda: host.names() == {"s001"}, "followed again")

    follow(three.urls, story, timeout="2s")


def test_a_write_that_a_frozen_member_may_have_done_is_an_error_and_the_next_goes_elsewhere(
    three: Cluster,
) -> None:
    def spec(n: int) -> dict[str, object]:
        return {"name": f"n{n}", "address": f"10.96.1.{n}", "ports": [80], "backends": []}

    async def story(host: Follower) -> None:
        await host.until_well()
        first = await host.vipd.ask("POST", "/v1/services?store=etcd", {"service": spec(1)})
        assert first.status == 200
        used = (await host.etcd())["endpoint"]
        with frozen(three, used):
            failed = await host.vipd.ask("POST", "/v1/services?store=etcd", {"service": spec(2)})
            assert failed.status != 200
            assert used in str(failed.body)
            assert not [url for url in three.urls if url != used and url in str(failed.body)]

            async def added() -> bool:
                answer = await host.vipd.ask("POST", "/v1/services?store=etcd", {"service": spec(3)})
                return answer.status == 200

            await host.until(added, "another member")

    follow(three.urls, story, timeout="3s")


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["write", "removal"])
def test_a_watch_that_has_fallen_silent_is_noticed(etcd: Cluster, what: str) -> None:
    """Its connection stays open and every read is answered, so that only what it lacks gives it away."""
    etcd.put_all(values(2))

    async def story(host: Follower) -> None:
        await host.until_well()
        cable.silence()
        if what == "write":
            etcd.put(key("s002"), value(2, "10.244.0.9"))
            await host.until(lambda: host.backend("s002") == "10.244.0.9", "noticed")
        else:
            etcd.delete(key("s001"))
            await host.until(lambda: host.names() == {"s002"}, "noticed")

    with relay(etcd.urls[0]) as cable:
        follow((cable.url,), story)


def sockets_to(port: str) -> str:
    """The connections to a port, with their timers."""
    command = ["ss", "-tnoH", f"dport = :{port}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_kernel_looks_after_the_sockets_of_watches(etcd: Cluster) -> None:
    async def story(host: Follower) -> None:
        await host.until_well()
        port = etcd.urls[0].rpartition(":")[2]
        shown = await asyncio.to_thread(sockets_to, port)
        assert shown.count("timer:(keepalive") >= 3, shown

    follow(etcd.urls, story)


def test_what_changes_while_a_long_list_is_read_is_not_missed(etcd: Cluster) -> None:
    """A list comes in pages; here keys of an earlier page go and change before the next one is read."""
    etcd.put_all(values(700))
    passed = 0

    def change(path: str, line: bytes) -> bytes:
        nonlocal passed
        if path == "/v3/kv/range" and b'"more":true' in line.replace(b" ", b""):
            passed += 1
            if passed == 1:
                etcd.delete(key("s001"))
                etcd.put(key("s002"), value(2, "10.244.0.9"))
                etcd.put(key("s000"), value(0))
        return line

    async def story(host: Follower) -> None:
        await host.until(lambda: len(host.names()) == 700, "the list")
        await host.until(lambda: host.backend("s002") == "10.244.0.9", "a change meanwhile")
        assert host.names() == {f"s{n:03}" for n in (0, *range(2, 701))}
        assert passed
        said = [record.getMessage() for record in host.vipd.journal]
        assert not [text for text in said if "does not tell what is written" in text], "by the watch itself"

    with gateway(etcd.urls[0]) as there:
        there.altered = change
        follow((there.url,), story)


def test_one_change_of_many_keys_that_comes_in_fragments_is_one(etcd: Cluster) -> None:
    """etcd cuts a message at some 2 MB: 8,000 long keys that are deleted by one request."""
    etcd.put_all({f"{PREFIX}overrides/{n:0300}": "" for n in range(8000)})

    async def story(host: Follower) -> None:
        etcd.put(key("a"), value(1))
        await host.until(lambda: host.names() == {"a"}, "listed")
        etcd.delete(f"{PREFIX}overrides/*")
        etcd.put(key("b"), value(2))
        await host.until(lambda: host.names() == {"a", "b"}, "the next change")

        async def only_these() -> bool:
            return bool((await host.etcd())["keys"] == 2 and "order 0" not in str(await host.vipd.status()))

        await host.until(only_these, "all orders gone")
        await host.until_well()

    follow(etcd.urls, story)


def report_of(etcd: Cluster) -> KeyValue | None:
    return etcd.read(f"{PREFIX}hosts/host-a")


def test_a_host_reports_while_it_runs_and_takes_the_report_back(etcd: Cluster) -> None:
    async def story(host: Follower) -> None:
        await host.until(lambda: report_of(etcd), "a report")
        first = report_of(etcd)
        assert first is not None
        report = json.loads(first.value)
        assert report["name"] == "host-a"
        assert report.keys() == {
            *("name", "revision", "problems", "version", "services", "time", "announced", "maintenance"),
        }
        etcd.put(key("a"), value(1))
        await host.until(lambda: '"services": 1' in (report_of(etcd) or first).value, "another report")
        second = report_of(etcd)
        assert second is not None
        etcd.post("/v3/lease/revoke", {"ID": second.lease})
        await host.until(lambda: report_of(etcd), "a lost lease is replaced")
        third = report_of(etcd)
        assert third is not None
        assert third.lease != second.lease
        etcd.delete(f"{PREFIX}hosts/host-a")
        await host.until(lambda: report_of(etcd), "a deleted report is written again")
        await host.until_well()

    follow(etcd.urls, story)
    assert report_of(etcd) is None


@pytest.mark.slow
def test_a_report_is_written_only_when_it_is_different_and_its_lease_renewed(etcd: Cluster) -> None:
    async def story(host: Follower) -> None:
        await host.until(lambda: report_of(etcd), "a report")
        first = report_of(etcd)
        assert first is not None
        await host.until(lambda: etcd.lease_seconds(first.lease) < 24, "time passes")
        await host.until(lambda: etcd.lease_seconds(first.lease) > 27, "renewed")
        assert report_of(etcd) == first

    follow(etcd.urls, story)


def test_a_wiped_store_gets_the_report_again(tmp_path: Path) -> None:
    async def story(host: Follower) -> None:
        await host.until(lambda: report_of(etcd), "a report")
        member = etcd.members[0]
        member.stop()
        member.wipe()
        await host.until_problem("etcd cannot be reached")
        etcd.start_again(member.url)
        await host.until(lambda: report_of(etcd), "again")

    with cluster(tmp_path) as etcd:
        follow(etcd.urls, story)
