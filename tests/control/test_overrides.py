"""Orders of operators: what they come to, how they end, and that none is lost."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.specs import WEB
from tests.lab.inside import Answer, Vipd, keep_overrides, running
from tests.lab.stored import overrides, stored
from tests.model.samples import block
from vipd.model.override import MAX_TEXT, MalformedOverrideError, from_json, to_json
from vipd.model.text import is_encodable

ETCD = {"endpoints": ["http://etcd:2379"]}
FIRST: dict[str, Any] = {"service": "dns", "backend": "10.244.0.5"}
Json = dict[str, Any]


def declared(vipd: Vipd) -> None:
    vipd.declare(
        block("10.96.0.10", "dns", "10.244.0.5", "10.244.0.6", "fd00::5").replace(
            "10.96.0.10", "[10.96.0.10, 'fd00:96::10']"
        ),
        block("10.96.0.11", "web", "10.244.0.5"),
        "  - {name: api, address: 10.96.0.12, ports: [53/udp], backends: [10.244.0.2:8080, 10.244.0.3:1, "
        "10.244.0.3:2], fallback: {backends: ['10.244.9.9:53']}}\n",
    )


def draining(service: str, backend: str) -> tuple[str, str]:
    """An order as a row of the database."""
    order = {"service": service, "backend": backend, "by": "x", "at": "2026-01-01T00:00:00+00:00"}
    target = f"{service}/{backend}" if service else f"address {backend}"
    return target, json.dumps({**order, "admin": "draining"})


def rows(vipd: Vipd) -> list[str]:
    """The texts of orders on disk."""
    with closing(sqlite3.connect(vipd.state_dir / "state.db")) as database:
        return [text for (text,) in database.execute("select text from override")]


async def order(vipd: Vipd, body: Json, *, fleet: bool = False) -> Answer:
    return await vipd.ask("POST", f"/v1/overrides?fleet={int(fleet)}", body)


async def resume(vipd: Vipd, body: Json, *, fleet: bool = False) -> Answer:
    return await vipd.ask("DELETE", f"/v1/overrides?fleet={int(fleet)}", body)


async def listed(vipd: Vipd) -> list[Json]:
    return list((await vipd.ask("GET", "/v1/overrides")).body["overrides"])


def serving(vipd: Vipd, service: str = "dns") -> dict[str, int]:
    (found,) = [rules for place, rules in vipd.kernel.serving().items() if place.startswith(f"{service} 10.")]
    return {backend.rpartition(":")[0]: weight for backend, weight in found.items()}


def test_the_severest_order_and_the_nearest_weight_win() -> None:
    async def story(vipd: Vipd) -> None:
        await order(vipd, {"address": "10.244.0.5", "weight": 7})
        assert serving(vipd) == {"10.244.0.5": 7, "10.244.0.6": 1}
        assert serving(vipd, "web") == {"10.244.0.5": 7}
        await order(vipd, {**FIRST, "weight": 2})
        assert serving(vipd)["10.244.0.5"] == 2
        assert serving(vipd, "web") == {"10.244.0.5": 7}
        await order(vipd, {**FIRST, "admin": "draining"})
        await order(vipd, {"address": "10.244.0.5", "admin": "disabled"})
        dns = next(f for key, f in vipd.kernel.rules.items() if key.service == "dns")
        assert [e.address for e in dns.unavailable] == ["10.244.0.5"]

    running(story, declared)


@pytest.mark.parametrize("timed_first", [True, False])
def test_a_permanent_part_outlives_a_timed_one_in_either_order(timed_first: bool) -> None:
    async def story(vipd: Vipd) -> None:
        state, weight = {"admin": "draining"}, {"weight": 5}
        for timed, kept in ((state, weight), (weight, state)):
            parts: list[Json] = [{**timed, "for": 3600}, kept]
            for part in parts if timed_first else parts[::-1]:
                await order(vipd, {**FIRST, **part})
            await asyncio.sleep(3599)
            assert len(await listed(vipd)) == 2
            await asyncio.sleep(2)
            (left,) = await listed(vipd)
            assert left.items() >= kept.items()
            await resume(vipd, FIRST)
            assert await listed(vipd) == []

    running(story, declared, simulated=True)


WRONG: tuple[tuple[Json, str], ...] = (
    ({"service": "dns", "backend": "10.244.9.9", "admin": "draining"}, "not-found"),
    ({"service": "dns", "backend": "10.244.0.6:54", "admin": "draining"}, "not-found"),
    ({"service": "nope", "backend": "10.244.0.5", "admin": "draining"}, "not-found"),
    ({"service": "api", "backend": "10.244.9.9:53", "admin": "draining"}, "invalid"),
    ({"address": "10.244.8.9", "admin": "draining"}, "not-found"),
    ({"address": "nonsense", "admin": "draining"}, "invalid"),
    (FIRST, "malformed"),
    ({"service": "dns", "admin": "draining"}, "malformed"),
    ({**FIRST, "admin": "active"}, "invalid"),
    ({**FIRST, "weight": 65536}, "invalid"),
    ({**FIRST, "admin": "draining", "for": 0}, "invalid"),
    ({**FIRST, "admin": "draining", "reason": "a\nb"}, "invalid"),
    ({**FIRST, "admin": "disabled", "pins": 5}, "malformed"),
)


def test_an_order_is_about_what_there_is() -> None:
    async def story(vipd: Vipd) -> None:
        everywhere = await order(vipd, {"address": "10.244.0.5", "admin": "draining", "for": 60})
        assert [b["service"] for b in everywhere.body["backends"]] == ["dns", "web"]
        for words in (
            {"service": "10.96.0.10:53/udp", "backend": "10.244.0.6"},
            {"service": "dns", "backend": "10.244.0.6:53"},
        ):
            named = (await order(vipd, {**words, "weight": 0})).body["override"]
            assert (named["service"], named["backend"]) == ("dns", "10.244.0.6"), "as describe shows it"
        answers = [await order(vipd, body) for body, _ in WRONG]
        kinds = [(body, answer.kind) for (body, _), answer in zip(WRONG, answers, strict=True)]
        assert [row for row in kinds if row not in WRONG] == []
        assert answers[1].body["error"]["hint"] == "did you mean 10.244.0.6?"
        assert "whose backends take no orders" in str(answers[3].body)
        for words in ({"service": "dns", "backend": "10.244.0.9"}, {"address": "10.244.0.9"}):
            assert (await resume(vipd, words)).kind == "not-found"
        nothing = await resume(vipd, {"service": "api", "backend": "10.244.0.2"})
        assert (nothing.status, nothing.body["changed"]) == (200, False)

    running(story, declared)


KNOWN: tuple[tuple[str, str, str], ...] = (
    ("dns", "10.244.0.5:53", "10.244.0.5:53"),
    ("dns", "10.244.0.9:53", "10.244.0.9:53"),
    ("api", "10.244.0.2", "10.244.0.2"),
    ("api", "10.244.0.3", "10.244.0.3"),
    ("10.96.0.10:53/udp", "10.244.0.5", "10.244.0.5"),
    ("10.96.0.10:53/udp", "10.244.0.9", "10.244.0.9"),
    ("dns", "fd00::5", "FD00:0::5"),
    ("dns", "web-1", "web-1"),
    ("old", "10.244.0.5", "10.244.0.5"),
    ("", "fd00::5", "FD00:0::5"),
)
"""Orders that an earlier run was given, of what has a port now, has lost it, has become several, or whose
service has got a name; and the words that take each back."""


def test_an_order_is_taken_back_by_the_words_that_list_it_whatever_has_become_of_its_backend() -> None:
    def kept(vipd: Vipd) -> None:
        declared(vipd)
        for service, backend, _ in (*KNOWN, ("dns", "10.244.0.6", ""), ("", "10.244.0.5", "")):
            keep_overrides(vipd.state_dir, draining(service, backend))

    async def story(vipd: Vipd) -> None:
        for service, backend, word in KNOWN:
            words = {"service": service, "backend": word} if service else {"address": word}
            gone = [(o["service"], o["backend"]) for o in (await resume(vipd, words)).body["overrides"]]
            assert (service, backend) in gone, words
        assert {(o["service"], o["backend"]) for o in await listed(vipd)} >= {("dns", "10.244.0.6")}

    running(story, kept)


def test_orders_survive_a_restart_and_what_was_taken_back_does_not_return(tmp_path: Path) -> None:
    async def before(vipd: Vipd) -> list[Json]:
        body = {**FIRST, "admin": "draining", "for": 3600, "reason": "disk"}
        dry = await vipd.ask("POST", "/v1/overrides?dry_run=1", body)
        assert (dry.body["changed"], dry.body["applied"], await listed(vipd)) == (True, False, [])
        done = (await order(vipd, body)).body
        assert (done["changed"], done["applied"]) == (True, True)
        assert done["backends"] == [{"service": "dns", "backend": "10.244.0.5"}]
        endpoints = (await vipd.service("dns"))["forwardings"][0]["endpoints"]
        (reason,) = [each["reason"] for each in endpoints if each["address"] == "10.244.0.5"]
        assert (reason.startswith("draining by "), reason.endswith(": disk")) == (True, True)
        await order(vipd, {"address": "10.244.0.6", "weight": 3})
        await order(vipd, {"service": "web", "backend": "10.244.0.5", "weight": 0})
        await resume(vipd, {"service": "web", "backend": "10.244.0.5"})
        kept = overrides(vipd.state_dir)
        assert len(kept) == 2, "an answer comes after the disk, as a crash may follow it"
        return await listed(vipd)

    orders = running(before, declared, tmp_path)
    assert len(orders) == 2
    assert running(listed, root=tmp_path) == orders


def test_orders_end_in_time_without_a_disk_and_then_stay_so(tmp_path: Path) -> None:
    async def story(vipd: Vipd) -> None:
        await order(vipd, {**FIRST, "admin": "draining", "for": 60})
        await order(vipd, {**FIRST, "weight": 5})
        path = vipd.state_dir / "state.db"
        path.rename(vipd.state_dir / "kept")
        path.mkdir()
        await asyncio.sleep(62)
        assert serving(vipd) == {"10.244.0.5": 5, "10.244.0.6": 1}
        assert (await resume(vipd, FIRST)).status == 500, "what has no end is taken back on disk first"
        assert serving(vipd)["10.244.0.5"] == 5
        await asyncio.sleep(600)
        lines = [record.getMessage() for record in vipd.journal]
        assert sum("saving ended overrides fails" in line for line in lines) == 1
        assert sum("the order for dns/10.244.0.5 has ended" in line for line in lines) == 1
        assert any("saving ended overrides" in warning for warning in (await vipd.status())["warnings"])
        path.rmdir()
        await asyncio.sleep(90)
        assert [part["admin"] for part in overrides(vipd.state_dir)] == ["active"]
        assert not any("overrides" in warning for warning in (await vipd.status())["warnings"])

    running(story, declared, tmp_path, simulated=True)


@pytest.mark.parametrize("text", ["{", "{" * 10_000, "[]", '{"admin": "perhaps"}'])
def test_an_order_that_cannot_be_read_is_named_and_stays_until_it_is_given_again(text: str) -> None:
    def damage(vipd: Vipd) -> None:
        declared(vipd)
        keep_overrides(vipd.state_dir, draining("dns", "10.244.0.5"), ("dns/10.244.0.6", text))

    async def story(vipd: Vipd) -> None:
        assert serving(vipd) == {"10.244.0.6": 1}
        why = "state.db: what is stored for dns/10.244.0.6 cannot be read"
        assert any(why in record.getMessage() for record in vipd.journal)
        assert why in " ".join((await vipd.status())["warnings"])
        await vipd.reload()
        assert (await order(vipd, {"address": "10.244.0.2", "weight": 3})).status == 200
        assert (await resume(vipd, FIRST)).body["changed"] is True
        assert text in rows(vipd)
        assert (await order(vipd, {**FIRST, "backend": "10.244.0.6", "weight": 3})).status == 200
        assert serving(vipd) == {"10.244.0.5": 1, "10.244.0.6": 3}
        assert text not in rows(vipd)
        assert (await vipd.status())["warnings"] == []

    running(story, damage)


def test_a_table_that_cannot_be_read_is_left_alone_until_it_is_mended() -> None:
    def change(vipd: Vipd, statement: str) -> None:
        with closing(sqlite3.connect(vipd.state_dir / "state.db", isolation_level=None)) as database:
            database.execute(statement)

    def damage(vipd: Vipd) -> None:
        declared(vipd)
        keep_overrides(vipd.state_dir, draining("dns", "10.244.0.5"))
        change(vipd, "alter table override rename to another")

    async def story(vipd: Vipd) -> None:
        assert serving(vipd) == {"10.244.0.5": 1, "10.244.0.6": 1}
        assert "no override is in force" in " ".join((await vipd.status())["warnings"])
        refused = await order(vipd, {"address": "10.244.0.6", "weight": 3})
        assert (refused.status, "no such table: override" in str(refused.body)) == (500, True)
        change(vipd, "alter table another rename to override")
        await vipd.reload()
        await vipd.until(lambda: serving(vipd) == {"10.244.0.6": 1})
        assert (await order(vipd, {"address": "10.244.0.6", "weight": 3})).status == 200
        assert len(overrides(vipd.state_dir)) == 2

    running(story, damage)


def test_orders_that_are_given_at_once_are_all_kept(tmp_path: Path) -> None:
    async def before(vipd: Vipd) -> list[Json]:
        backends = ("10.244.0.5", "fd00::5")
        bodies = [{**FIRST, "backend": b, "weight": weight} for weight in (2, 3, 4) for b in backends]
        answers = await asyncio.gather(
            *(order(vipd, body) for body in bodies),
            order(vipd, {"address": "10.244.0.6", "admin": "draining"}),
            vipd.ask("POST", "/v1/maintenance", {"reason": "disk"}),
            vipd.add({**WEB, "name": "shop", "address": "10.96.0.20"}),
        )
        assert {answer.status for answer in answers} == {200}
        known = await listed(vipd)
        weights = {str(o["backend"]): o["weight"] for o in overrides(vipd.state_dir) if "weight" in o}
        assert weights == {str(o["backend"]): o["weight"] for o in known if "weight" in o}
        assert (len(known), len(overrides(vipd.state_dir)), stored(vipd.state_dir).count("name")) == (3, 4, 1)
        return known

    known = running(before, declared, tmp_path)
    assert running(listed, root=tmp_path) == known


@pytest.mark.parametrize("fleet", [True, False])
def test_a_resume_of_what_has_left_the_declaration_says_where_it_worked(fleet: bool) -> None:
    async def story(vipd: Vipd) -> None:
        await order(vipd, {**FIRST, "admin": "draining"}, fleet=fleet)
        vipd.declare()
        await vipd.reload()
        other = (await resume(vipd, FIRST, fleet=not fleet)).body
        assert (other["changed"], len(other["elsewhere"])) == (False, 1)
        done = (await resume(vipd, FIRST, fleet=fleet)).body
        assert (done["changed"], done["elsewhere"], len(done["overrides"])) == (True, [], 1)
        assert await listed(vipd) == []

    running(story, declared, simulated=True, etcd=ETCD)


def test_an_order_for_the_fleet_ends_by_this_hosts_clock_while_etcd_is_away() -> None:
    async def story(vipd: Vipd) -> None:
        await order(vipd, {**FIRST, "admin": "draining", "for": 60}, fleet=True)
        await order(vipd, {**FIRST, "weight": 5}, fleet=True)
        vipd.etcd.away = True
        await asyncio.sleep(50)
        assert "10.244.0.5" not in serving(vipd)
        await asyncio.sleep(12)
        assert serving(vipd)["10.244.0.5"] == 5
        refused = await order(vipd, {**FIRST, "admin": "disabled"}, fleet=True)
        assert refused.status != 200, "who cannot be told"
        assert (await order(vipd, {**FIRST, "admin": "disabled"})).status == 200

    running(story, declared, simulated=True, etcd=ETCD)


ORDER = to_json(from_json({**FIRST, "by": "x", "at": "2026-01-01T00:00:00+00:00", "admin": "draining"}))


@given(st.text(st.characters(), max_size=2000), st.text(st.characters(), max_size=5))
def test_what_somebody_else_has_stored_is_one_line_and_then_stays_so(reason: str, by: str) -> None:
    stored = {**ORDER, "reason": reason, "by": by}
    if not all(map(is_encodable, (reason, by))):
        with pytest.raises(MalformedOverrideError, match="must be text"):
            from_json(stored)
        return
    found = from_json(stored)
    assert all(text.isprintable() and len(text) <= MAX_TEXT for text in (found.reason, found.by))
    assert from_json(json.loads(json.dumps(to_json(found)))) == found
