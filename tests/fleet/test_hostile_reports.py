"""Keys below `hosts/` that no vipd has written: the other hosts are shown all the same."""

from __future__ import annotations

import json

from tests.sources.etcd.following import Follower, follow
from tests.sources.etcd.members import Cluster

HOSTS = "/vipd/v1/hosts/"
GOOD = {
    "version": "0.1.0",
    "revision": 0,
    "services": 3,
    "problems": 0,
    "announced": {"l2 192.0.2.1": "served"},
    "later": 1,
}
BAD = {
    "list": "[1]",
    "deep": "[" * 10_000,
    "revision": json.dumps({**GOOD, "revision": 10**40}),
    "text for revision": json.dumps({**GOOD, "revision": "x"}),
    "version": json.dumps({**GOOD, "version": "\x1b[2J"}),
    "services": json.dumps({**GOOD, "services": []}),
    "line\nfeed": "",
}
LARGE = 14
"""So many of 1.4 MB are together above what one answer may have."""
SHOWN = 5_000


def test_hostile_keys_leave_the_others_to_be_seen(etcd: Cluster) -> None:
    for n in range(LARGE):
        etcd.put(f"{HOSTS}big{n:02}", "x" * 1_400_000)
    etcd.put_bytes(f"{HOSTS}bytes".encode(), b"\xff")
    etcd.put_all({f"{HOSTS}{name}": text for name, text in BAD.items()})
    etcd.put_all({f"{HOSTS}{name}": json.dumps(GOOD) for name in ("a", "z", "n" * 5000)})

    async def story(host: Follower) -> None:
        await host.until(lambda: etcd.read(f"{HOSTS}host-a"), "its own report")
        hosts = (await host.vipd.ask("GET", "/v1/fleet")).body["hosts"]
        by_name = {each["name"]: each for each in hosts}
        assert len(hosts) == LARGE + len(BAD) + 5
        assert [by_name[name]["fault"] for name in ("a", "z", "host-a")] == ["", "", ""]
        assert (by_name["z"]["services"], by_name["z"]["announced"]) == (3, GOOD["announced"])
        faults = {name for name, each in by_name.items() if "its report cannot be read" in each["fault"]}
        assert len(faults) == LARGE + len(BAD) + 1
        assert max(map(len, by_name)) <= 220
        assert all(map(str.isprintable, by_name))
        assert (await host.vipd.vipctl("fleet", "status")).code == 0

    follow(etcd.urls, story)


def test_of_more_hosts_than_any_fleet_has_the_rest_is_counted(etcd: Cluster) -> None:
    etcd.put_all({f"{HOSTS}n{n:04}": "" for n in range(SHOWN + 16)})

    async def story(host: Follower) -> None:
        await host.until(lambda: etcd.read(f"{HOSTS}host-a"), "its own report")
        hosts = (await host.vipd.ask("GET", "/v1/fleet")).body["hosts"]
        assert (len(hosts), hosts[-1]["name"]) == (SHOWN + 1, "17 more")

    follow(etcd.urls, story)
