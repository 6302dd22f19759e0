"""What is put into a real etcd serves, what is bad keeps its last good version, and what is deleted goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.sources.etcd.following import PREFIX, Follower, follow, key, value, values
from tests.sources.etcd.members import Cluster
from vipd.model import limits


def test_what_is_written_serves_and_what_is_deleted_does_not(etcd: Cluster) -> None:
    etcd.put(key("dns"), value(1))

    async def story(host: Follower) -> None:
        await host.until(lambda: host.names() == {"dns"}, "the first list")
        revision = etcd.put(key("shop/web"), value(2))
        await host.until(lambda: host.names() == {"dns", "shop/web"}, "a new key")
        origin = (await host.vipd.service("shop%2Fweb"))["owner"]
        assert origin == f"etcd:{key('shop/web')}"
        assert (await host.etcd())["applied_revision"] >= revision == (await host.etcd())["last_change"]
        etcd.put(key("dns"), value(1, "10.244.0.9"))
        await host.until(lambda: host.backend("dns") == "10.244.0.9", "a new value")
        etcd.delete(key("dns"))
        await host.until(lambda: host.names() == {"shop/web"}, "a deleted key")
        await host.until_well()
        state = await host.etcd()
        assert (state["endpoint"], state["keys"], state["rejected"], state["held"]) == (
            etcd.urls[0],
            1,
            [],
            [],
        )
        assert state["lag"] is not None

    follow(etcd.urls, story)


FORMS = {
    "yaml": "name: yaml\naddress: 10.96.0.1\nports: 53/udp\nbackends: [10.244.0.5]",
    "json": '{"address": "10.96.0.2", "ports": [80], "backends": ["10.244.0.5"]}',
    "document": "apiVersion: vipd/v1\nservices:\n- {address: 10.96.0.3, ports: 80, backends: [10.244.0.5]}",
}
BAD = {
    "bad/value": ("address: 10.96.0.4\nports: 80\nbackend: 10.244.0.5", ":3: unknown key"),
    "bad/yaml": ("address: [10.96.0.5", ":2: YAML syntax"),
    "bad/name": (value(6) + "name: other", "the name other is not the key's, bad/name"),
    "bad/two": ("apiVersion: vipd/v1\nservices: []", "declares 0 services, and not one"),
    "bad/empty": ("", "declares 0 services, and not one"),
    "bad/a/b": (value(7), "the key names no service"),
    "bad name": (value(8), "the key names no service"),
    "bad/deep": ("[" * 50_000, "bad/deep"),
    "bad/long": ("# " + "x" * 1_200_000 + "\n" + value(5), "1048576 are the most"),
}


def test_every_form_of_a_value_and_every_fault_alone(etcd: Cluster) -> None:
    etcd.put_all({key(name): text for name, text in FORMS.items()})
    for name, (text, _) in BAD.items():
        etcd.put(key(name), text)

    async def story(host: Follower) -> None:
        await host.until(lambda: host.names() == set(FORMS), "the good ones")
        await host.until_problem("bad/long")
        problems = (await host.source())["problems"]
        for name, (_, words) in BAD.items():
            assert any(p.startswith(f"etcd:{key(name)}:") and words in p for p in problems), (name, problems)
        assert set((await host.etcd())["rejected"]) == {key(name) for name in BAD}

    follow(etcd.urls, story)


def test_bytes_that_are_no_text_are_a_problem_of_that_key_alone(etcd: Cluster) -> None:
    etcd.put(key("good"), value(1))
    for name, text in (
        (key("").encode() + b"\xff", value(2).encode()),
        (key("\\xff").encode(), value(3).encode()),
        (key("new\nline\x1b").encode(), value(4).encode()),
        (key("bytes").encode(), b"address: \xff\xfe"),
        (f"{PREFIX}backends/good/".encode() + b"\xff", b""),
        (f"{PREFIX}backends/good/10.244.0.9:80".encode(), b"[" * 50_000),
    ):
        etcd.put_bytes(name, text)

    async def story(host: Follower) -> None:
        await host.until(lambda: host.names() == {"good"}, "the good one alone")
        await host.until_problem("10.244.0.9:80")
        state, problems = await host.etcd(), (await host.source())["problems"]
        assert len(set(state["rejected"])) == len(state["rejected"]) == 4
        assert all(map(str.isprintable, (*state["rejected"], *problems)))
        etcd.put(key("other"), value(9))
        await host.until(lambda: "other" in host.names(), "the next change")
        assert (await host.etcd())["fault"] == ""

    follow(etcd.urls, story)


def test_a_bad_value_keeps_the_last_good_one_also_without_etcd(etcd: Cluster, root: Path) -> None:
    etcd.put_all({key("dns"): value(1), key("web"): value(2)})

    async def before(host: Follower) -> None:
        await host.until(lambda: len(host.names()) == 2, "both")
        etcd.put(key("dns"), "address: nonsense")
        etcd.put(key("web"), value(2, "10.244.0.9"))
        await host.until_problem("services/dns")
        await host.until(lambda: host.backend("web") == "10.244.0.9", "a new value")
        assert host.backend("dns") == "10.244.0.5"

    async def after(host: Follower) -> None:
        assert (host.backend("dns"), host.backend("web")) == ("10.244.0.5", "10.244.0.9")
        assert "etcd:/vipd/v1/services/dns:1: address" in await host.problems()
        assert (await host.etcd())["rejected"] == [key("dns")]
        await host.until_problem("Connection refused; the last known services go on serving")
        refused = await host.vipd.vipctl("--store", "etcd", "remove", "web")
        assert (refused.code, "etcd cannot be reached" in refused.stderr) == (1, True)
        etcd.start_again(*etcd.urls)
        etcd.put(key("dns"), value(1, "10.244.0.7"))
        await host.until(lambda: host.backend("dns") == "10.244.0.7", "etcd is back")
        await host.until_well()

    follow(etcd.urls, before, root)
    etcd.member(etcd.urls[0]).stop()
    follow(etcd.urls, after, root)


def test_an_etcd_that_was_never_reached_leaves_nothing_to_serve() -> None:
    async def story(host: Follower) -> None:
        await host.until_problem("etcd cannot be reached: http://127.0.0.1:9: cannot connect")
        assert (await host.problems()).endswith("; no service of it is known")
        assert host.names() == {"here"}

    def declare(vipd: object) -> None:
        vipd.declare("  - {name: here, address: 10.96.5.5, ports: 80, backends: [10.244.0.5]}\n")  # type: ignore[attr-defined]

    follow(("http://127.0.0.1:9",), story, prepare=declare)


def test_a_value_that_is_put_back_is_the_accepted_one_again(etcd: Cluster) -> None:
    async def story(host: Follower) -> None:
        for text in (value(1), "bad", value(1)):
            etcd.put(key("dns"), text)
            await (host.until_problem("services/dns") if text == "bad" else host.until_well())
            await host.until(lambda: host.names() == {"dns"}, text)
        assert (await host.etcd())["rejected"] == []

    follow(etcd.urls, story)


CLAIMED = "10.96.0.9"


def claiming(address: str, backend: str = "10.244.0.5") -> str:
    return f"address: {address}\nports: [80]\nbackends: [{backend}]\n"


@pytest.mark.parametrize("away", [False, True], ids=["always there", "away when the newer one came"])
def test_of_two_keys_with_one_claim_the_older_one_serves_on_every_host(
    etcd: Cluster, root: Path, *, away: bool
) -> None:
    """Also on one that starts after both, and when the older one is edited after the newer one came."""
    etcd.put(key("b"), claiming(CLAIMED))

    async def first(host: Follower) -> None:
        await host.until(lambda: host.names() == {"b"}, "the older one")
        if not away:
            etcd.put(key("a"), claiming(CLAIMED))
            await host.until_problem(f"{key('a')}:1: a: {CLAIMED}:80/tcp already belongs")

    async def then(host: Follower) -> None:
        await host.until(lambda: host.backend("b") == "10.244.0.7", "the edit")
        assert host.names() == {"b"}
        await host.until_problem(f"{key('a')}:1: a: {CLAIMED}:80/tcp already belongs")

    follow(etcd.urls, first, root / "one")
    etcd.put(key("a"), claiming(CLAIMED))
    etcd.put(key("b"), claiming(CLAIMED, "10.244.0.7"))
    follow(etcd.urls, then, root / "one")
    follow(etcd.urls, then, root / "one")
    follow(etcd.urls, then, root / "two")


def test_an_older_key_takes_nothing_that_a_newer_one_has(etcd: Cluster, root: Path) -> None:
    etcd.put(key("b"), claiming("10.96.0.1"))
    etcd.put(key("a"), claiming(CLAIMED))

    async def first(host: Follower) -> None:
        await host.until(lambda: host.names() == {"a", "b"}, "both")
        etcd.put(key("b"), claiming(CLAIMED))
        await host.until_problem(f"{key('b')}:1: b: {CLAIMED}:80/tcp already belongs")

    async def then(host: Follower) -> None:
        await host.until_problem(f"{key('b')}:1: b: {CLAIMED}:80/tcp already belongs")
        assert set(host.vipd.kernel.serving()) == {f"a {CLAIMED}:80/tcp", "b 10.96.0.1:80/tcp"}

    follow(etcd.urls, first, root)
    follow(etcd.urls, then, root)


def test_registered_backends_serve_beside_the_declared_ones(etcd: Cluster) -> None:
    start = f"{PREFIX}backends/"
    dns = "address: [10.96.0.1, 'fd00:96::1']\nports: 53/udp\nbackends: [10.244.0.5]\n"
    etcd.put_all(
        {
            key("dns"): dns,
            key("shop/web"): value(2, "10.244.0.7"),
            f"{start}dns/10.244.0.6:53": "",
            f"{start}dns/[fd00::5]:53": "{weight: 3}",
            f"{start}shop/web/10.244.0.6": '{"weight": 0, "node": "n1"}',
            f"{start}shop/web/nonsense": "",
            f"{PREFIX}hosts/other": "{}",
        }
    )

    async def story(host: Follower) -> None:
        await host.until_problem(f"etcd:{start}shop/web/nonsense: ")
        rules = host.vipd.kernel.serving()
        assert rules["dns 10.96.0.1:53/udp"].keys() == {"10.244.0.5:53", "10.244.0.6:53"}
        assert rules["dns [fd00:96::1]:53/udp"] == {"[fd00::5]:53": 3}
        assert host.serving()["shop/web"] == {"10.244.0.7:80"}
        etcd.put(f"{start}dns/10.244.0.6:53", "{weight: many}")
        await host.until_problem("weight")
        assert "10.244.0.6:53" in host.serving()["dns"], "a bad one keeps the good one"
        etcd.delete(f"{start}dns/*")
        await host.until(lambda: host.serving()["dns"] == {"10.244.0.5:53"}, "gone with their leases")

    follow(etcd.urls, story)


def test_others_keys_move_the_revision_and_nothing_else(etcd: Cluster) -> None:
    """What hosts report below the prefix must not look like a change: each report would cause more."""
    last = etcd.put_all(values(1))

    async def story(host: Follower) -> None:
        await host.until_well()
        writes, applies = len(host.vipd.kernel.writes), (await host.vipd.status())["applies"]
        for n in range(20):
            etcd.put(f"{PREFIX}hosts/n{n}", "{}")
        etcd.put(f"{PREFIX}overrides/x", "{}")  # which is followed
        await host.until_problem("order x in etcd")
        assert (await host.etcd())["last_change"] >= last
        assert len(host.vipd.kernel.writes) == writes
        assert (await host.vipd.status())["applies"] == applies

    follow(etcd.urls, story)


def test_one_registrars_excess_stops_nobody_elses_services(
    etcd: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in bytes nor in keys, neither when it is listed nor when it is watched."""
    for name, limit in {
        "ETCD_BYTES": 8 * limits.MIB,
        "ETCD_FOLDER_BYTES": limits.MIB,
        "ETCD_KEYS": 400,
        "ETCD_FOLDER_KEYS": 100,
    }.items():
        monkeypatch.setattr(limits, name, limit)
    start = f"{PREFIX}backends"
    etcd.put_all(values(2))
    for n in range(9):
        etcd.put(f"{start}/large/10.244.0.{n}:80", "x" * 1_400_000)
    etcd.put(f"{start}/large/{'k' * 600_000}", "")
    etcd.put_all({f"{start}/many/10.244.0.{n}:80": "" for n in range(250)})

    async def story(host: Follower) -> None:
        await host.until(lambda: host.names() == {"s001", "s002"}, "listed")
        for n in range(3):
            etcd.put_all(
                {f"{start}/large/10.244.1.{m}:80": "y" * 16_000 for m in range(100 * n, 100 * n + 80)}
            )
            etcd.put_all({f"{start}/many/10.244.{n + 1}.{m}:80": "" for m in range(250)})
            etcd.put(f"{start}/many/{n}{'k' * 600_000}", "")
            etcd.put(key(f"w{n}"), value(10 + n))
            etcd.put(f"{start}/s001/10.244.9.{n}:80", "")
            await host.until(lambda: f"w{n}" in host.names(), "another's service")  # noqa: B023
            await host.until(lambda: f"10.244.9.{n}:80" in host.serving()["s001"], "registered")  # noqa: B023
        problems = await host.problems()
        assert "it has 1400000 bytes, of which 16384 are the most" in problems
        assert "the keys of its folder have more than 1 MiB" in problems
        assert "its folder has more than 100 keys" in problems
        assert (await host.etcd())["fault"] == ""
        etcd.put(key("many"), value(30))
        for n in range(4):
            etcd.delete(f"{start}/many/10.244.{n}.*")
        etcd.put(f"{start}/many/10.244.0.7:80", "")
        await host.until(lambda: "10.244.0.7:80" in host.serving().get("many", ()), "room again")

    follow(etcd.urls, story)


def test_overrides_beyond_their_budget_stop_nobodys_services(
    etcd: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ETCD_BYTES", 2 * limits.MIB)
    monkeypatch.setattr(limits, "ETCD_OVERRIDES_BYTES", limits.MIB)

    def order(number: int) -> str:
        drain = {"backend": f"10.244.{number}.1", "weight": 1, "by": "x", "at": "2026-01-01T00:00:00+00:00"}
        return json.dumps({**drain, "reason": "r" * 15_000})

    etcd.put_all({f"{PREFIX}overrides/addresses/10.244.{n}.1": order(n) for n in range(90)})

    async def story(host: Follower) -> None:
        for n, word in enumerate(("listed", "watched")):
            etcd.put(key(word), value(n))
            await host.until(lambda: word in host.names(), word)  # noqa: B023
            etcd.put_all({f"{PREFIX}overrides/addresses/10.244.{n}.2": order(n) for n in range(90)})
        await host.until_problem("the keys of its folder have more than 1 MiB")
        assert (await host.etcd())["fault"] == ""

    follow(etcd.urls, story)
