"""Text of any characters through the API: what it takes is in the store, and what is no text is refused."""

from __future__ import annotations

import json
from unittest.mock import patch

import pytest

from tests.api.serving import WEB, Api, served
from vipd.model.service import Service
from vipd.sources.store import COPY_SUFFIX, StoreSource


def web(body: str) -> dict[str, object]:
    return {**WEB, "check": {"type": "http", "body": body}}


@pytest.mark.parametrize("body", ["\U0001f600", "\U0010ffff", "\u202e\x1b\x85\u2028", "\ufeff\uffff", "~"])
def test_a_check_of_any_characters_is_there_after_a_restart(body: str) -> None:
    async def story(api: Api) -> None:
        assert (await api.add(web(body))).status == 200
        before = dict(api.store.services)
        for path in (api.store_path, api.store_path.with_name(api.store_path.name + COPY_SUFFIX)):
            again = StoreSource(path)
            again.load()
            assert again.faults() == ()
            assert dict(again.services) == before

    served(story)


@pytest.mark.parametrize(
    "body",
    [
        b'{"service": "\\ud800"}',
        b'{"service": "\xed\xa0\x80"}',
        '{"service": "\ud800"}'.encode("utf-16", "surrogatepass"),
        b'{"\xed\xa0\x80": 1}',
        b'{"service": "\xff"}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/services", "/v1/apply"])
def test_half_of_a_surrogate_pair_is_no_text_however_it_is_written(path: str, body: bytes) -> None:
    async def story(api: Api) -> None:
        answer = await api.ask("POST", path, data=body)
        assert answer.status == 400
        assert "not JSON" in answer.body["error"]["what"]

    served(story)


def test_json_with_a_byte_order_mark_is_read() -> None:
    async def story(api: Api) -> None:
        body = json.dumps({"service": WEB}).encode("utf-8-sig")
        assert (await api.ask("POST", "/v1/services", data=body)).status == 200

    served(story)


def test_what_cannot_be_written_fails_that_request_alone() -> None:
    async def story(api: Api) -> None:
        def wrong(service: Service) -> str:
            return f"  - name: {service.name}\n    address: 10.96.9.9\n    ports: [9/tcp]\n"

        with patch("vipd.sources.store.format_service", wrong):
            answer = await api.add(WEB)
        assert answer.status == 500
        assert "reads back as something else; nothing has changed" in answer.body["error"]["what"]
        assert api.stored() == set()
        assert (await api.add(WEB)).status == 200
        assert api.stored() == {"web"}

    served(story)
