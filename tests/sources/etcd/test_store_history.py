"""The history of changes that vipctl made in etcd, read back from its revisions."""

from __future__ import annotations

import re
from typing import Any

from tests.sources.etcd.following import PREFIX, Follower, follow, key, value
from tests.sources.etcd.members import Cluster

HISTORY = f"{PREFIX}history/"
JUNK = (
    *("", "junk", "[]", "{}", "null", "[" * 100_000, '{"at": 7}'),
    '{"at": 7, "by": "", "reason": "", "actions": {}, "services": []}',
    '{"at": "2026-01-01T00:00:00", "by": "", "reason": "", "actions": {}, "services": []}',
    '{"at": "2026-01-01T00:00:00+00:00", "by": "", "reason": "", "actions": [], "services": []}',
    '{"at": "2026-01-01T00:00:00+00:00", "by": "", "reason": "", "actions": {}, "services": [1]}',
)


def spec(name: str, backend: str = "10.244.0.5", number: int = 1) -> dict[str, object]:
    return {"name": name, "address": f"10.96.1.{number}", "ports": [80], "backends": [backend]}


async def apply(host: Follower, *specs: dict[str, object]) -> int:
    """Apply services to etcd; the revision of that."""
    answer = await host.vipd.ask("POST", "/v1/apply?store=etcd", {"services": list(specs), "prune": False})
    assert answer.status == 200, answer
    return int((await entries(host))[0]["revision"])


async def entries(host: Follower) -> list[dict[str, Any]]:
    """The newest first."""
    answer = await host.vipd.ask("GET", "/v1/history?store=etcd")
    assert answer.status == 200, answer
    return list(answer.body["entries"])


def test_a_change_is_known_with_who_made_it_and_what_others_write_in_its_place_is_passed_over(
    etcd: Cluster,
) -> None:
    async def story(host: Follower) -> None:
        first = await apply(host, spec("a"))
        for number, junk in enumerate(JUNK):
            etcd.put(f"{HISTORY}{number}", junk)
        second = await apply(host, *(spec(f"s{n}", number=n) for n in range(2, 108)), spec("a"))
        newest, oldest = await entries(host)
        assert (oldest["revision"], newest["revision"]) == (first, second)
        assert newest["actions"] == {"created": 106}
        assert len(newest["services"]) == 100
        assert newest["by"].endswith(" on host-a")

    follow(etcd.urls, story)


def test_of_many_changes_a_hundred_are_listed_also_those_from_before_a_compaction(etcd: Cluster) -> None:
    """And few more are kept."""
    etcd.put_all({f"{HISTORY}{number:03}": "{}" for number in range(150)})

    async def story(host: Follower) -> None:
        revisions = [await apply(host, spec("a", f"10.244.1.{n}")) for n in range(105)]
        etcd.compact(revisions[-3])
        listed = [entry["revision"] for entry in await entries(host)]
        assert listed == list(reversed(revisions[-100:]))
        assert not etcd.read(f"{HISTORY}001")

    follow(etcd.urls, story)


def test_what_is_too_large_for_one_answer_hides_no_newer_change(etcd: Cluster) -> None:
    for number in range(14):
        etcd.put(f"{HISTORY}{number}", "x" * 1_400_000)

    async def story(host: Follower) -> None:
        revision = await apply(host, spec("a"))
        assert [entry["revision"] for entry in await entries(host)] == [revision]

    follow(etcd.urls, story)


def test_a_rollback_takes_back_what_has_changed_since_then(etcd: Cluster) -> None:
    """Also what others wrote; what then had a value that cannot be used is refused."""

    async def vipctl(host: Follower, *words: str) -> str:
        done = await host.vipd.vipctl(*words, "--store", "etcd")
        return done.stdout + done.stderr

    async def story(host: Follower) -> None:
        revision = await apply(host, spec("a"))
        newer = await apply(host, spec("a", "10.244.0.7"))
        assert "+ backends: [10.244.0.7]" in await vipctl(host, "history", str(newer))
        etcd.put(key("other"), value(9))
        await host.until(lambda: host.names() == {"a", "other"}, "both")
        assert "1 changed, 1 removed; dry run" in await vipctl(host, "rollback", str(revision), "--dry-run")
        assert "1 changed, 1 removed; stored in etcd" in await vipctl(host, "rollback", str(revision))
        assert host.serving() == {"a": {"10.244.0.5:80"}}
        assert (await entries(host))[0]["reason"] == f"rollback to {revision}"
        await vipctl(host, "rollback")
        assert host.serving() == {"a": {"10.244.0.7:80"}, "other": {"10.244.0.5:80"}}, (
            "before the last change"
        )
        assert "cannot wait for a confirmation" in await vipctl(host, "rollback", "--confirm", "60s")
        etcd.put(key("bad"), "junk")
        revision = await apply(host, spec("a", "10.244.0.8"))
        etcd.put(key("bad"), value(10))
        await host.until(lambda: "bad" in host.names(), "mended")
        said = await vipctl(host, "rollback", str(revision))
        assert re.search(r"services/bad of revision \d+ cannot be used", said)
        etcd.compact(revision + 1)
        assert "is not kept any more: etcd has compacted it" in await vipctl(host, "rollback", str(revision))

    follow(etcd.urls, story)
