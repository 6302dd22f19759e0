"""Text of any characters through the API: what it takes is in the store, and what is no text is refused."""

from __future__ import annotations

import json
from pathlib import Path

from tests.api.specs import WEB
from tests.lab.inside import Vipd, running
from tests.lab.stories import story_of

ODD = ("\U0001f600", "\U0010ffff", "\u202e\x1b\x85\u2028", "\ufeff\uffff", "~")
NO_TEXT = (
    b'{"service": "\\ud800"}',
    b'{"service": "\xed\xa0\x80"}',
    '{"service": "\ud800"}'.encode("utf-16", "surrogatepass"),
    b'{"\xed\xa0\x80": 1}',
    b'{"service": "\xff"}',
)


def web(number: int, text: str) -> dict[str, object]:
    check = {"type": "http", "body": text}
    return {**WEB, "name": f"w{number}", "address": f"10.96.1.{number}", "check": check}


def test_a_check_of_any_characters_is_there_after_a_restart(tmp_path: Path) -> None:
    async def add(vipd: Vipd) -> object:
        for number, text in enumerate(ODD):
            assert (await vipd.add(web(number, text))).status == 200
        return (await vipd.ask("GET", "/v1/export")).body

    async def read(vipd: Vipd) -> object:
        exported = (await vipd.ask("GET", "/v1/export")).body
        assert [spec["check"]["body"] for spec in exported["services"]] == list(ODD)
        return exported

    before = running(add, root=tmp_path)
    assert running(read, root=tmp_path) == before
    store = tmp_path / "state" / "services.yaml"
    store.write_text("broken")  # then its copy counts
    assert running(read, root=tmp_path) == before


@story_of(running)
async def test_half_of_a_surrogate_pair_is_no_text_however_it_is_written(vipd: Vipd) -> None:
    for path in ("/v1/services", "/v1/apply"):
        for body in NO_TEXT:
            answer = await vipd.ask("POST", path, data=body)
            assert (answer.status, "not JSON" in answer.body["error"]["what"]) == (400, True), body


@story_of(running)
async def test_json_with_a_byte_order_mark_is_read(vipd: Vipd) -> None:
    body = json.dumps({"service": WEB}).encode("utf-8-sig")
    assert (await vipd.ask("POST", "/v1/services", data=body)).status == 200
