"""No accident removes services: what many keys at once, a wiped store or a restored backup lack serves on."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from tests.sources.etcd.following import PREFIX, Follower, follow, key, value, values
from tests.sources.etcd.members import Cluster, cluster
from tests.sources.etcd.relay import relay


def test_mass_deletion_is_held_until_it_is_accepted(etcd: Cluster, root: Path) -> None:
    etcd.put_all(values(10))
    left = [key(f"s{n:03}") for n in range(1, 11) if n != 3]

    async def before(host: Follower) -> None:
        await host.until(lambda: len(host.names()) == 10, "all")
        etcd.delete(f"{PREFIX}services/*")
        await host.until_held(*values(10))
        etcd.put(key("s003"), value(3, "10.244.0.9"))
        await host.until(lambda: host.backend("s003") == "10.244.0.9", "one comes back")
        assert len(host.names()) == 10
        await host.until_held(*left)
        (problem,) = (await host.source())["problems"]
        assert problem.startswith("9 keys are gone from etcd and go on serving: more than 50%")
        assert "vipctl accept-removal" in problem

    async def after(host: Follower) -> None:
        assert len(host.names()) == 10
        await host.until_held(*left)
        assert "vipctl accept-removal" in (await host.vipd.vipctl("status")).stdout
        accepted = (await host.vipd.vipctl("accept-removal")).stdout
        assert [name for name in left if f"removed    {name}" not in accepted] == []
        await host.until(lambda: host.names() == {"s003"}, "accepted")
        await host.until_well()

    async def last(host: Follower) -> None:
        assert host.names() == {"s003"}

    follow(etcd.urls, before, root)
    follow(etcd.urls, after, root)
    follow(etcd.urls, last, root)


def test_a_burst_of_single_deletions_comes_back(etcd: Cluster) -> None:
    """Those within ten seconds of each other count as one."""
    etcd.put_all(values(10))

    async def story(host: Follower) -> None:
        await host.until(lambda: len(host.names()) == 10, "all")
        for n in range(1, 6):
            etcd.delete(key(f"s{n:03}"))
        await host.until(lambda: len(host.names()) == 5, "half may go")
        etcd.delete(key("s006"))
        await host.until(lambda: len(host.names()) == 10, "one more is too many")
        await host.until_held(*(key(f"s{n:03}") for n in range(1, 7)))

    follow(etcd.urls, story)


def test_a_folder_that_is_emptied_holds_up_no_other(etcd: Cluster) -> None:
    etcd.put_all({key(f"a/s{n}"): value(n) for n in range(1, 10)})
    etcd.put_all({key(f"b/s{n}"): value(10 + n) for n in range(1, 4)})

    async def story(host: Follower) -> None:
        await host.until(lambda: len(host.names()) == 12, "all")
        for n in range(1, 10):
            etcd.delete(key(f"a/s{n}"))
        await host.until_held(*(key(f"a/s{n}") for n in range(1, 10)))
        etcd.delete(key("b/s1"))
        await host.until(lambda: "b/s1" not in host.names(), "another's removal")
        assert len(host.names()) == 11
        assert "more than 50% of the services of their folder at once" in await host.problems()
        assert len(await host.accept_removal()) == 9
        await host.until(lambda: host.names() == {"b/s2", "b/s3"}, "accepted")

    follow(etcd.urls, story)


def test_what_never_served_is_not_held_and_what_is_held_serves_its_last_good_value(etcd: Cluster) -> None:
    etcd.put_all({key(f"bad{n}"): "" for n in range(6)} | values(6))

    async def story(host: Follower) -> None:
        await host.until(lambda: len(host.names()) == 6, "the good ones")
        etcd.delete(key("bad*"))
        await host.until_well()
        etcd.put(key("s001"), "bad")
        await host.until_problem("services/s001")
        etcd.delete(key("s*"))
        await host.until_held(*values(6))
        assert host.names() == {f"s{n:03}" for n in range(1, 7)}
        assert host.backend("s001") == "10.244.0.5"

    follow(etcd.urls, story)


def test_what_was_deleted_while_away_is_removed(etcd: Cluster, root: Path) -> None:
    etcd.put_all(values(2))

    async def before(host: Follower) -> None:
        await host.until(lambda: len(host.names()) == 2, "both")

    async def after(host: Follower) -> None:
        await host.until(lambda: host.names() == {"s001"}, "the removal")
        assert (await host.etcd())["held"] == []

    follow(etcd.urls, before, root)
    etcd.delete(key("s002"))
    follow(etcd.urls, after, root)


def test_what_was_compacted_while_away_is_listed(etcd: Cluster) -> None:
    etcd.put_all(values(3))

    async def story(host: Follower) -> None:
        await host.until(lambda: len(host.names()) == 3, "all")
        cable.cut()
        await host.until_problem("the last known services go on serving")
        etcd.delete(key("s001"))
        etcd.compact(etcd.put(key("s009"), value(9)))
        cable.open()
        await host.until(lambda: host.names() == {"s002", "s003", "s009"}, "what is there now")
        await host.until_well()

    with relay(etcd.urls[0]) as cable:
        follow((cable.url,), story)


def test_a_wiped_store_takes_nothing_away(etcd: Cluster) -> None:
    """As many keys as before, too few for the share: only the store's revision gives it away."""
    registered = f"{PREFIX}backends/s001/10.244.0.8:80"
    for _ in range(10):  # ahead of all that is written to the new one, the host's own reports among it
        etcd.put("/elsewhere", "")
    etcd.put_all(values(2))
    etcd.put(registered, "")
    member = etcd.members[0]

    async def story(host: Follower) -> None:
        await host.until(lambda: host.names() == {"s001", "s002"}, "both")
        cable.cut()
        member.stop()
        member.wipe()
        etcd.start_again(member.url)
        etcd.put_all({key("s001"): value(1, "10.244.0.9"), key("s003"): value(3)})
        etcd.put(f"{PREFIX}backends/s003/10.244.0.8:80", "")
        cable.open()
        await host.until(lambda: "10.244.0.9:80" in host.serving()["s001"], "what is there serves")
        await host.until_held(key("s002"), registered)
        assert host.names() == {"s001", "s002", "s003"}
        assert "10.244.0.8:80" in host.serving()["s001"]
        assert "the store is another one than before" in await host.problems()
        etcd.put(key("s002"), value(2))
        etcd.put(registered, "")
        await host.until_well()

    with relay(member.url) as cable:
        follow((cable.url,), story)


def test_a_wiped_store_that_has_grown_past_the_old_revision_takes_nothing_away(etcd: Cluster) -> None:
    """It has the same identity and as many keys, none of them newer than the last known revision."""
    etcd.put_all(values(2))
    revision = etcd.put("/elsewhere", "")
    member = etcd.members[0]

    async def story(host: Follower) -> None:
        await host.until(lambda: host.names() == {"s001", "s002"}, "both")
        await host.until_well()
        position = max(revision, (await host.etcd())["store_revision"])
        cable.cut()
        member.stop()
        member.wipe()
        etcd.start_again(member.url)
        etcd.put_all({key("s001"): value(1), key("s003"): value(3)})
        while etcd.put("/elsewhere", "") <= position + 20:
            pass
        cable.open()
        await host.until_held(key("s002"))
        await host.until(lambda: host.names() == {"s001", "s002", "s003"}, "all serve")

    for _ in range(10):
        etcd.put("/elsewhere", "")
    with relay(member.url) as cable:
        follow((cable.url,), story)


def test_another_cluster_takes_nothing_away(etcd: Cluster, tmp_path: Path) -> None:
    """As many keys, none newer, and a higher revision: only its identity gives it away."""

    async def story(host: Follower) -> None:
        await host.until(lambda: host.names() == {"s001", "s002"}, "both")
        cable.cut()
        cable.open(other.urls[0])
        await host.until_held(key("s002"))
        await host.until(lambda: host.names() == {"s001", "s002", "s003"}, "what is there serves")
        other.put(key("s004"), value(4))
        await host.until(lambda: len(host.names()) == 4, "followed")

    with cluster(tmp_path / "other") as other, relay(etcd.urls[0]) as cable:
        other.put_all({key("s001"): value(1), key("s003"): value(3)})
        for _ in range(10):
            etcd.put("/elsewhere", "")
        revision = etcd.put_all(values(2))
        while other.put("/elsewhere", "") <= revision:
            pass
        follow((cable.url,), story)


NEWER = {"b", "c", "d"}


def test_a_restored_backup_that_was_written_past_the_old_revision(root: Path, tmp_path: Path) -> None:
    """Whatever is written to it: it takes nothing away."""

    async def before(host: Follower) -> None:
        await host.until(lambda: host.names() == {"a", *NEWER}, "all services")

    async def after(host: Follower) -> None:
        await host.until_held(*map(key, NEWER))
        assert host.names() >= NEWER
        assert "an older state of it" in await host.problems()

    with cluster(tmp_path / "etcd") as etcd:
        member = etcd.members[0]
        etcd.put(key("a"), value(1))
        member.stop()
        shutil.copytree(member.directory, tmp_path / "backup")
        etcd.start_again(member.url)
        for number, name in enumerate(sorted(NEWER), 2):
            etcd.put(key(name), value(number))
        follow(etcd.urls, before, root)
        known = tmp_path / "known"
        shutil.copytree(root, known, ignore=shutil.ignore_patterns("*.sock"))
        for written_past in ("", "/elsewhere", key("a"), key("e")):
            member.stop()
            member.wipe()
            shutil.copytree(tmp_path / "backup", member.directory)
            etcd.start_again(member.url)
            for _ in range(20 if written_past else 0):
                etcd.put(written_past, value(9))
            shutil.rmtree(root / "state")
            shutil.copytree(known / "state", root / "state")
            follow(etcd.urls, after, root)


def test_after_any_walk_a_restart_without_etcd_serves_the_same(etcd: Cluster, root: Path) -> None:
    """Good values, bad ones, deletions of a few or many, accepted or not."""
    walk = random.Random(7)
    names = [f"s{n:03}" for n in range(1, 9)]
    known: dict[str, set[str]] = {}
    held: set[str] = set()

    async def steps(host: Follower) -> None:
        for _ in range(12):
            for name in walk.sample(names, walk.choice([1, 2, 8])):
                choice = walk.random()
                if choice < 0.4:
                    etcd.delete(key(name))
                else:
                    good = value(int(name[1:]), f"10.244.0.{walk.randrange(1, 250)}")
                    etcd.put(key(name), good if choice < 0.8 else "no: [such")
            if walk.random() < 0.2:
                await host.accept_removal()
        address = f"10.244.1.{walk.randrange(1, 250)}"
        etcd.put(key("last/one"), value(100, address))
        await host.until(lambda: host.backend("last/one") == address, "the last change")
        known.clear()
        known.update(host.serving())
        held.clear()
        held.update((await host.etcd())["held"])

    async def again(host: Follower) -> None:
        assert host.serving() == known
        assert set((await host.etcd())["held"]) == held

    for _ in range(4):
        follow(etcd.urls, steps, root)
        follow(etcd.urls, again, root)
        etcd.member(etcd.urls[0]).stop()
        follow(etcd.urls, again, root)
        etcd.ensure()
