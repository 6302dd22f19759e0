"""Requests do what they say, or nothing: unknown parameters and members, flags, types, texts."""

from __future__ import annotations

import json

from yarl import URL

from tests.api.specs import DNS, WEB, routes, stored
from tests.lab.inside import Vipd, running
from tests.lab.stories import story_of

BACKEND = "/v1/services/web/backends/10.244.0.7"


async def state(vipd: Vipd) -> object:
    """All that requests change."""
    status = await vipd.status()
    parts = ("export", "overrides", "maintenance", "history")
    return status["dataplane"], [(await vipd.ask("GET", f"/v1/{part}")).body for part in parts]


@story_of(running)
async def test_no_route_takes_a_parameter_or_a_member_that_it_does_not_have(vipd: Vipd) -> None:
    await vipd.add(WEB)
    before = await state(vipd)
    for method, path in routes():
        path = path.replace("TARGET", "web").replace("BACKEND", "10.244.0.7").replace("REVISION", "1")
        for query, body, what in (
            ("?nonsense=1", None, "unknown parameter nonsense"),
            ("", b'{"nonsense": 1}', 'unknown member "nonsense"'),
        ):
            url = URL(f"http://vipd{path}{query}", encoded=True)
            async with vipd.session.request(method, url, data=body) as response:
                assert response.status == 400, (method, path, query)
                assert (await response.json())["error"]["what"] == what, (method, path)
    assert await state(vipd) == before


@story_of(running)
async def test_a_misspelt_dry_run_changes_nothing_and_names_the_right_one(vipd: Vipd) -> None:
    await vipd.add(WEB)
    before = await state(vipd)
    for method, path, body in (
        ("POST", "/v1/services", {"service": DNS}),
        ("DELETE", "/v1/services/web", None),
        ("PATCH", BACKEND, {"weight": 3}),
        ("POST", "/v1/overrides", {"address": "10.244.0.7", "admin": "draining"}),
        ("POST", "/v1/maintenance", None),
        ("POST", "/v1/apply", {"services": [], "prune": True}),
    ):
        for word in ("dryrun", "dry-run", "dryRun", "DRY_RUN"):
            refused = await vipd.ask(method, f"{path}?{word}=1", body)
            assert (refused.status, refused.kind) == (400, "malformed")
            assert refused.body["error"]["hint"] == 'did you mean "dry_run"?'
        refused = await vipd.ask(method, path, {**(body or {}), "dry_run": True})
        assert (refused.status, refused.kind) == (400, "malformed")
    assert await state(vipd) == before
    weight = await vipd.ask("PATCH", f"{BACKEND}?weight=3")
    assert weight.body["error"]["hint"] == "weight belongs into the body"


@story_of(running)
async def test_a_flag_is_1_or_true_0_or_false(vipd: Vipd) -> None:
    for value, dry in (("1", True), ("true", True), ("0", False), ("false", False)):
        await vipd.add(WEB)
        await vipd.ask("DELETE", f"/v1/services/web?dry_run={value}")
        assert (stored(vipd) == {"web"}) is dry, value
    await vipd.add(WEB)
    for query in (
        *("dry_run", "dry_run=", "dry_run=yes", "dry_run=TRUE", "dry_run=2", "dry_run=0&dry_run=1"),
        *("store=", "store=file&store=file", "confirm=", "confirm=soon"),
    ):
        assert (await vipd.ask("DELETE", f"/v1/services/web?{query}")).status == 400, query
    for path in ("events?follow=x", "stats?backends=x", "maintenance?flows=x"):
        assert (await vipd.ask("GET", f"/v1/{path}")).status == 400, path
    # An empty version would be no protection against a change meanwhile.
    change = {"service": {"respond_to_ping": False}}
    assert (await vipd.ask("PATCH", "/v1/services/web?version=", change)).status == 400
    assert stored(vipd) == {"web"}


WRONG_TYPES: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("POST", "/v1/services", {"service": {**DNS, "respond_to_ping": "true"}}),
    ("POST", "/v1/services", {"service": {**DNS, "backends": [{"address": "10.2.0.1", "backup": "true"}]}}),
    ("PATCH", "/v1/services/web", {"service": {"respond_to_ping": "false"}}),
    ("PATCH", BACKEND, {"weight": "2"}),
    ("PATCH", BACKEND, {"weight": True}),
    ("POST", "/v1/apply", {"services": [], "prune": "true"}),
    ("POST", "/v1/apply", {"services": [], "prune": 1}),
    ("POST", "/v1/apply", {"services": [], "apiVersion": "v1"}),
    ("DELETE", "/v1/overrides", {"all": "true"}),
    ("DELETE", "/v1/overrides", {"all": 1}),
    ("DELETE", "/v1/overrides", {"all": True, "service": "web", "backend": "10.244.0.7"}),
    ("DELETE", "/v1/overrides", {"service": "web", "backend": "10.244.0.7", "address": "10.244.0.7"}),
    ("POST", "/v1/overrides", {"service": "web", "address": "10.244.0.7", "admin": "disabled"}),
    ("POST", "/v1/overrides", {"address": "10.244.0.7", "weight": "2"}),
    ("POST", "/v1/overrides", {"address": "10.244.0.7", "admin": "draining", "for": "60"}),
    ("POST", "/v1/overrides", {"address": "10.244.0.7", "admin": "disabled", "pins": 60}),
    ("POST", "/v1/rollback", {"revision": "0"}),
    ("POST", "/v1/maintenance", {"for": "60"}),
)


@story_of(running)
async def test_types_of_members_are_strict(vipd: Vipd) -> None:
    await vipd.add(WEB)
    drained = {"service": "web", "backend": "10.244.0.7", "admin": "draining"}
    assert (await vipd.ask("POST", "/v1/overrides", drained)).status == 200
    before = await state(vipd)
    answers = [(row, (await vipd.ask(*row)).status) for row in WRONG_TYPES]
    assert [row for row, status in answers if status not in (400, 422)] == []
    assert await state(vipd) == before


@story_of(running)
async def test_an_export_can_be_applied_as_it_is(vipd: Vipd) -> None:
    await vipd.add(WEB)
    exported = (await vipd.ask("GET", "/v1/export")).body
    answer = await vipd.ask("POST", "/v1/apply", exported)
    assert (answer.status, answer.body["changed"]) == (200, False)


NO_TEXT = (
    b'{"service": "\\ud800"}',
    b'{"service": "\xed\xa0\x80"}',
    '{"service": "\ud800"}'.encode("utf-16", "surrogatepass"),
    b'{"\xed\xa0\x80": 1}',
    b'{"service": "\xff"}',
)


@story_of(running)
async def test_half_of_a_surrogate_pair_is_no_text_and_a_byte_order_mark_is_skipped(vipd: Vipd) -> None:
    for path in ("/v1/services", "/v1/apply"):
        for body in NO_TEXT:
            answer = await vipd.ask("POST", path, data=body)
            assert (answer.status, "not JSON" in answer.body["error"]["what"]) == (400, True), body
    marked = json.dumps({"service": WEB}).encode("utf-8-sig")
    assert (await vipd.ask("POST", "/v1/services", data=marked)).status == 200
