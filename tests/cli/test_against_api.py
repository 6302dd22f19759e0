"""`vipctl` against the real API in this process: what words it takes, and what then is changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.api.serving import Api, served
from tests.cli.conftest import Ended, Vipctl
from tests.lab.inside import vipctl
from tests.model.samples import HEAD, block

Say = Callable[[str], Ended]


@pytest.fixture
def conversation(capsys: pytest.CaptureFixture[str]) -> Callable[[Callable[[Api, Say], None]], None]:
    """Runs a story, which says command lines to a served API, in a thread beside its event loop."""

    def converse(story: Callable[[Api, Say], None]) -> None:
        async def beside(api: Api) -> None:
            def say(line: str) -> Ended:
                capsys.readouterr()
                code = vipctl(["--socket", str(api.socket), *line.split()])
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


def ok(said: Ended) -> str:
    """What a command line that succeeds prints."""
    assert said.code == 0, said.err
    return said.out


def test_an_address_is_a_target_where_one_service_has_it(conversation: Conversation) -> None:
    def story(api: Api, say: Say) -> None:
        ok(say("add 10.96.0.10 -p 53/udp -p 53/tcp 10.244.0.5 --name dns"))
        ok(say("add fd00::20 -p 80/tcp fd00:1::5 --name six --external 2001:db8::9"))
        ok(say("add 10.96.0.30:80/tcp 10.244.0.7 --name a"))
        ok(say("add 10.96.0.30:81/tcp 10.244.0.7"))
        for target in ("10.96.0.10", "fd00::20", "2001:db8::9", "fd00:0::20"):
            assert ok(say(f"list -o name {target}")) in ("dns\n", "six\n")
        assert "dns" in ok(say("describe 10.96.0.10"))
        assert "draining dns/10.244.0.5" in ok(say("drain 10.96.0.10/10.244.0.5"))
        assert "resumed dns/10.244.0.5" in ok(say("resume 10.96.0.10/10.244.0.5"))
        assert "six: ready" in say("ready fd00::20").out + say("ready six").out.replace("not ", "")
        both = say("describe 10.96.0.30")
        assert both.code != 0
        assert both.err.endswith("is of several services; hint: name one: a, 10.96.0.30:81/tcp\n")
        for wrong in ("10.96.0.10:54/udp", "10.96.0.10:80"):
            said = say(f"describe {wrong}")
            assert said.err.endswith(
                "hint: its address has 10.96.0.10:53/udp (dns), 10.96.0.10:53/tcp (dns)\n"
            )
        assert "without brackets; write it like [fd00::20]:80/tcp" in say("describe fd00::20:80/tcp").err
        assert "removed six" in ok(say("remove fd00::20"))

    conversation(story)


def test_explain_takes_the_same_targets(vipctl: Vipctl, tmp_path: Path) -> None:
    file = tmp_path / "services.yaml"
    file.write_text(
        HEAD + block("10.96.0.10", "dns", "10.244.0.5") + block("10.96.0.11", "web", "10.244.0.6")
    )
    assert "10.96.0.10" in vipctl("explain", "10.96.0.10", "--from", "10.9.9.9", "-f", str(file)).out
    wrong = vipctl("explain", "wbe", "--from", "10.9.9.9", "-f", str(file))
    assert wrong.err.endswith("no service wbe; hint: did you mean web?\n")


@pytest.mark.parametrize(
    ("backend", "declared"),
    [
        ("10.244.0.11", "10.244.0.11:8080"),
        ("10.244.0.11:8080", "10.244.0.11:8080"),
        ("10.244.0.12:80", "10.244.0.12"),
        ("10.244.0.12", "10.244.0.12"),
    ],
)
def test_every_verb_names_backends_alike(conversation: Conversation, backend: str, declared: str) -> None:
    def story(api: Api, say: Say) -> None:
        ok(say("add 10.96.0.11:80/tcp 10.244.0.11:8080,10.244.0.12 --name web"))
        assert f"draining web/{declared}" in ok(say(f"drain web/{backend}"))
        assert f"resumed web/{declared}" in ok(say(f"resume web/{backend}"))
        assert "changed web" in ok(say(f"set web/{backend} --weight 3"))
        assert "changed web" in ok(say(f"set web/{backend} --backup true"))
        assert "changed web" in ok(say(f"set web/{backend} --max-connections 9"))
        (found,) = (b for b in api.store.services["web"].backends if str(b) == declared)
        assert (found.weight, found.backup, found.max_connections) == (3, True, 9)
        assert "changed web" in ok(say(f"remove-backend web {backend}"))
        assert declared not in map(str, api.store.services["web"].backends)
        for verb in (
            f"set web/{backend} --weight 3",
            f"set web/{backend} --backup true",
            f"drain web/{backend}",
        ):
            assert f"web has no backend {backend}" in say(verb).err

    conversation(story)


def test_a_service_may_have_an_outer_address_alone(conversation: Conversation) -> None:
    def story(api: Api, say: Say) -> None:
        only = "--external 203.0.113.10 -p 80/tcp"
        ok(say(f"add {only} 10.244.0.5 --name one"))
        ok(say("add --load-balancer 203.0.113.11 -p 80/tcp 10.244.0.5,10.244.0.6 --name two"))
        ok(say("add --external 203.0.113.12 -p 80/tcp 10.244.0.5:8080 10.244.0.6:8080 --name three"))
        ok(say("add --external 203.0.113.13 -p 80/tcp 10.96.0.20 10.244.0.5 --name four"))
        ok(say("add --external 203.0.113.14 -p 80/tcp none 10.244.0.5 --name five"))
        services = api.store.services
        assert [services[name].addresses for name in ("one", "two", "three", "five")] == [()] * 4
        assert services["four"].addresses == ("10.96.0.20",)
        assert [len(services[name].backends) for name in ("one", "two", "three", "four", "five")] == [
            1,
            2,
            2,
            1,
            1,
        ]

    conversation(story)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("add web2 10.96.0.12:80/tcp 10.244.0.5", "vipctl add 10.96.0.12:80/tcp 10.244.0.5 --name web2"),
        ("add web2 10.96.0.12 10.244.0.5 -p 80", "vipctl add 10.96.0.12 10.244.0.5 --name web2"),
        ("add 10.244.0.5 10.96.0.12:80/tcp", "vipctl add 10.96.0.12:80/tcp 10.244.0.5"),
        ("add 10.244.0.5:80 10.96.0.12:80/tcp", "vipctl add 10.96.0.12:80/tcp 10.244.0.5:80"),
        (
            "add 10.96.0.12:80/tcp 10.244.0.5 --interval 2s",
            "it belongs to the check: --check '{type: tcp, interval: 2s}'",
        ),
        ("add 10.96.0.12:80/tcp 10.244.0.5 --weight 3", "write it behind the backend: ADDR@3"),
        ("add-backend web 10.244.0.5 --weight 3", "write it behind the backend: ADDR@3"),
        ("add 10.96.0.0/24:80/tcp 10.244.0.5", "write one address, as 10.96.0.0"),
        ("add 10.96.0.0/24 10.244.0.5 -p 80/tcp", "write one address, as 10.96.0.0"),
        ("add 10.96.0.12:80/tcp 10.244.0.0/24", "write one address, as 10.244.0.0"),
        ("add 10.96.0.12:80/tcp ,", "ADDR, or ADDR:PORT"),
        ("remove wbe", "did you mean web?"),
        ("add 10.96.0.12:http 10.244.0.5", "a port is a number from 1 to 65535: write 80"),
        ("add 10.96.0.12:80,443 10.244.0.5", "vipctl add 10.96.0.12 -p 80 -p 443"),
        ("add 10.96.0.12:80/tcp, 10.244.0.5", "one of tcp, udp, sctp"),
        (
            "add 10.96.0.12:80/tcp 10.244.0.5 --check http://10.0.0.1/x",
            "--check http:/x, or http:PORT/x",
        ),
        ("list -a", "vipctl list -h"),
        ("drain web 10.244.0.7", "vipctl drain web/10.244.0.7"),
        ("drain web:10.244.0.7", "vipctl drain web/10.244.0.7"),
        ("resume all", "vipctl resume --all takes every order back"),
        ("remove web/10.244.0.7", "web is a service; vipctl describe web shows its backends"),
        ("describe 10.244.0.7", "it is a backend of web"),
        ("events web", "vipctl events --service TARGET shows those of one service"),
        ("set-dataplane nft", "did you mean nftables?"),
        ("describe Web", "did you mean web?"),
        ("drain wbe/10.244.0.5", "did you mean web?"),
        ("remove nothing-alike", "vipctl list shows them"),
    ],
)
def test_a_slip_is_answered_with_the_line_that_was_meant(
    conversation: Conversation, line: str, hint: str
) -> None:
    def story(api: Api, say: Say) -> None:
        ok(say("add 10.96.0.11:80/tcp 10.244.0.7 --name web"))
        said = say(line)
        assert said.code != 0
        assert said.err.endswith(f"; hint: {hint}\n"), said.err
        assert "network" in said.err if "/24" in line else True
        assert api.stored() == {"web"}

    conversation(story)


def test_lists_may_have_commas(conversation: Conversation) -> None:
    def story(api: Api, say: Say) -> None:
        ok(say("add 10.96.0.11 -p 80,443/tcp -p 53/tcp,udp 10.244.0.7,10.244.0.8, --name web"))
        service = api.store.services["web"]
        assert list(map(str, service.ports)) == ["80/tcp", "443/tcp", "53/tcp", "53/udp"]
        assert list(map(str, service.backends)) == ["10.244.0.7", "10.244.0.8"]
        ok(say("drain web/10.244.0.7,10.244.0.8"))
        assert orders(api) == {("web", "10.244.0.7"), ("web", "10.244.0.8")}
        ok(say("add-backend web 10.244.0.9,10.244.0.10@3"))
        ok(say("add-backend web/10.244.0.11"))
        ok(say("remove-backend web 10.244.0.7,10.244.0.8"))
        ok(say("remove-backend web/10.244.0.9"))
        assert list(map(str, api.store.services["web"].backends)) == ["10.244.0.10", "10.244.0.11"]

    conversation(story)
