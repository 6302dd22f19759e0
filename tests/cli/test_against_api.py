"""`vipctl` against the real API in this process: what words it takes, and what then is changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.api.serving import Api, served
from tests.cli.conftest import Ended
from vipd.cli.main import run

Say = Callable[[str], Ended]


@pytest.fixture
def conversation(capsys: pytest.CaptureFixture[str]) -> Callable[[Callable[[Api, Say], None]], None]:
    """Runs a story, which says command lines to a served API, in a thread beside its event loop."""

    def converse(story: Callable[[Api, Say], None]) -> None:
        async def beside(api: Api) -> None:
            def say(line: str) -> Ended:
                capsys.readouterr()
                code = run(["--socket", str(api.socket), *line.split()])
                return Ended(code, *capsys.readouterr())

            await asyncio.to_thread(story, api, say)

        served(beside)

    return converse


Conversation = Callable[[Callable[[Api, Say], None]], None]


def orders(api: Api) -> set[tuple[str, str]]:
    """The backends that orders are about."""
    return {key.target for key in api.overrides.overrides}


@pytest.mark.parametrize("verb", ["drain", "disable"])
def test_an_order_for_several_backends_is_given_for_all_or_none(
    conversation: Conversation, verb: str
) -> None:
    def story(api: Api, say: Say) -> None:
        say("add 10.96.0.11:80/tcp 10.244.0.7 10.244.0.8 --name web")
        wrong = say(f"{verb} web/10.244.0.7 web/10.9.9.9 web/10.244.0.8 nope/10.244.0.7")
        assert (wrong.code, wrong.out) == (3, "")
        assert "web has no backend 10.9.9.9" in wrong.err
        assert "no service nope" in wrong.err
        assert wrong.err.endswith("vipctl: 2 of 4 cannot be changed, so none was\n")
        assert orders(api) == set()
        assert say(f"{verb} web/10.244.0.7 web/10.244.0.8").code == 0
        both = {("web", "10.244.0.7"), ("web", "10.244.0.8")}
        assert orders(api) == both
        wrong = say("resume web/10.244.0.7 web/10.9.9.9 web/10.244.0.8")
        assert (wrong.code, wrong.out) == (3, "")
        assert orders(api) == both
        assert say("resume web/10.244.0.7 web/10.244.0.8").code == 0
        assert orders(api) == set()

    conversation(story)


def test_several_services_are_removed_all_or_none(conversation: Conversation) -> None:
    def story(api: Api, say: Say) -> None:
        for number in (1, 2, 3):
            say(f"add 10.96.0.{number}:80/tcp 10.244.0.7 --name web{number}")
        wrong = say("remove web1 nope web2 neither")
        assert (wrong.code, wrong.out) == (3, "")
        assert wrong.err.count("vipctl: no service") == 2
        assert wrong.err.endswith("vipctl: 2 of 4 cannot be changed, so none was\n")
        assert api.stored() == {"web1", "web2", "web3"}
        assert say("remove web1 web3 --dry-run").out.count("removed") == 2
        assert api.stored() == {"web1", "web2", "web3"}
        # The same service twice, by its name and by its frontend.
        removed = say("remove web1 10.96.0.1:80/tcp web2")
        assert (removed.code, removed.out.count("removed")) == (0, 2)
        assert api.stored() == {"web3"}

    conversation(story)


def test_the_same_order_again_is_no_event(
    conversation: Conversation, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def story(api: Api, say: Say) -> None:
        say("add 10.96.0.11:80/tcp 10.244.0.7 --name web")
        caplog.set_level("INFO")
        first = say("drain web/10.244.0.7")
        monkeypatch.setattr("vipd.api.peers.Peer.__str__", lambda _: "root (pid 5)")
        again = say("drain web/10.244.0.7")
        assert (first.out, again.out.partition(":")[0]) == (
            "draining web/10.244.0.7; ends by vipctl resume\n",
            "unchanged",
        )
        say("drain web/10.244.0.7 --reason disk")
        told = [record.message for record in caplog.records if "draining" in record.message]
        assert len(told) == 2, told

    conversation(story)
