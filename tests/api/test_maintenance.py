"""Maintenance of a host over the API: stored before it is answered, and nothing is announced then."""

from __future__ import annotations

import json
import stat

import pytest

from tests.api.serving import WEB, Api, served
from vipd.control.address_policy import AddressPolicy
from vipd.control.announcements import OtherHosts
from vipd.model.service import AnnounceMethod
from vipd.sources.maintenance_store import MaintenanceStore

ANNOUNCED = {**WEB, "external_addresses": ["203.0.113.10", "203.0.113.11"], "announce": "routes"}


async def announced(api: Api) -> list[str]:
    """The addresses that are announced after the last step."""
    api.announcer.take()
    await api.announcer.update()
    return sorted(api.announcer.state.announced(AnnounceMethod.ROUTES))


def allow(api: Api) -> None:
    """Let services announce a network."""
    api.claims = AddressPolicy(announced=("203.0.113.0/24",))


def test_a_service_shows_what_is_announced_of_it() -> None:
    async def story(api: Api) -> None:
        assert (await api.add(ANNOUNCED)).status == 200
        assert await announced(api) == ["203.0.113.10", "203.0.113.11"]
        view = (await api.ask("GET", "/v1/services/web")).body["service"]
        assert [(a["address"], a["announced"], a["reason"]) for a in view["announced"]] == [
            ("203.0.113.10", True, "served"),
            ("203.0.113.11", True, "served"),
        ]
        told = (await api.ask("GET", "/v1/announcements")).body
        assert (told["maintenance"], len(told["addresses"]), told["faults"]) == (None, 2, {})
        assert (await api.ask("GET", "/v1/status")).body["announcements"]["announced"] == 2

    served(story, allow)


def test_maintenance_withdraws_everything_and_survives_a_restart() -> None:
    async def story(api: Api) -> None:
        await api.add(ANNOUNCED)
        await announced(api)
        body = {"reason": "kernel update", "for": 3600}
        dry = await api.ask("POST", "/v1/maintenance?dry_run=1", body)
        assert (dry.status, dry.body["applied"], dry.body["announced"]) == (200, False, 2)
        assert api.maintenance.current is None
        answer = (await api.ask("POST", "/v1/maintenance", body)).body
        assert (answer["changed"], answer["applied"], answer["announced"]) == (True, True, 0)
        assert answer["maintenance"]["reason"] == "kernel update"
        path = api.root / "maintenance.json"
        assert stat.S_IMODE(path.stat().st_mode) & 0o007 == 0
        again = MaintenanceStore(path, api.reconciler.clock)
        again.load()
        assert again.current == api.maintenance.current
        why = (await api.ask("GET", "/v1/announcements")).body["addresses"][0]["why"]
        assert why == "this host is in maintenance (kernel update)"
        ended = (await api.ask("DELETE", "/v1/maintenance")).body
        assert (ended["changed"], ended["announced"], ended["was"]["reason"]) == (True, 2, "kernel update")
        assert not path.exists()
        assert (await api.ask("DELETE", "/v1/maintenance")).body["changed"] is False

    served(story, allow)


def test_maintenance_withdraws_before_etcd_is_asked_whether_this_host_was_the_last() -> None:
    async def story(api: Api) -> None:
        await api.add(ANNOUNCED)
        await announced(api)
        body = (await api.ask("POST", "/v1/maintenance", {})).body
        assert at_the_question == [0]
        told = "no other host announces 203.0.113.10, 203.0.113.11: clients elsewhere reach it nowhere then"
        assert body["warnings"] == [told]

    at_the_question: list[int] = []

    def prepare(api: Api) -> None:
        async def others() -> OtherHosts:
            at_the_question.append(len(api.announcer.state.announced(AnnounceMethod.ROUTES)))
            return OtherHosts()

        allow(api)
        api.others = others

    served(story, prepare)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"reason": "two\nlines"}, "reason must be one line"),
        ({"for": 0}, "for must be seconds"),
        ({"for": "2h"}, "for must be seconds"),
        ({"wait": True}, 'unknown member "wait"'),
    ],
)
def test_what_is_no_maintenance_is_refused(body: dict[str, object], what: str) -> None:
    async def story(api: Api) -> None:
        answer = await api.ask("POST", "/v1/maintenance", body)
        assert answer.status in (400, 422)
        assert what in answer.body["error"]["what"]
        assert api.maintenance.current is None

    served(story)


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"by": 1, "at": "2026-01-01"}), "{" * 10_000])
def test_a_file_that_cannot_be_read_counts_as_maintenance(text: str) -> None:
    async def story(api: Api) -> None:
        assert api.maintenance.current is not None
        assert "vipctl host resume" in api.maintenance.faults()[0]
        assert (await api.ask("DELETE", "/v1/maintenance")).body["changed"] is True
        assert api.maintenance.faults() == ()

    def damage(api: Api) -> None:
        (api.root / "maintenance.json").write_text(text)

    served(story, damage)
