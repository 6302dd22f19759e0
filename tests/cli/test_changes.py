"""`vipctl add`, `set`, `add-backend`, `remove-backend`, `remove`: what they declare, and what they say."""

from __future__ import annotations

import json
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml

from tests.lab.inside import Output, Vipd, running
from tests.lab.stories import story_of

Json = dict[str, Any]
Say = Callable[[str], Awaitable[Output]]
Story = Callable[[Vipd, Say], Awaitable[None]]
WEB = "add 10.96.0.11:80/tcp 10.244.0.7 --name web --check tcp"


def conversation(
    story: Story, prepare: Callable[[Vipd], object] = lambda vipd: None, **settings: Any
) -> None:
    """Run a story beside a vipd; it says lines such as `list -o name`."""

    async def whole(vipd: Vipd) -> None:
        async def say(line: str) -> Output:
            return await vipd.vipctl(*shlex.split(line))

        await story(vipd, say)

    running(whole, prepare, None, simulated=False, **settings)


async def exported(vipd: Vipd) -> list[Json]:
    services: list[Json] = (await vipd.ask("GET", "/v1/export")).body["services"]
    return services


async def empty(vipd: Vipd) -> None:
    await vipd.ask("POST", "/v1/apply", {"services": [], "prune": True})


BASE: Json = {
    "name": "web",
    "address": "10.96.0.11",
    "ports": ["80/tcp"],
    "backends": ["10.0.0.1", {"address": "10.0.0.5", "port": 8080, "weight": 2}],
}
CHANGES = (Path(__file__).parent / "changes.txt").read_text().partition("\n\n")[2].split("\n\n")


@story_of(
    conversation,
    exec_checks="anywhere",
    announce_addresses=["10.0.0.0/24"],
    node_port_addresses=["10.10.0.1"],
)
async def test_what_each_line_of_changes_txt_declares(vipd: Vipd, say: Say) -> None:
    for change in CHANGES:
        parts = dict(line.split(" ", 1) for line in change.strip().splitlines())
        await empty(vipd)
        if given := parts.get("given:"):
            assert (await vipd.add(BASE | yaml.safe_load(given))).status == 200, change
        ended = await say(parts["$"])
        assert ended.code == 0, (change, ended)
        assert "says:" not in parts or f" ({parts['says:']}); stored in " in ended.stdout, (change, ended)
        (service,) = await exported(vipd)
        then = yaml.safe_load(parts["then:"])
        if given:
            # Both in the form in which services are exported.
            await empty(vipd)
            wanted = {key: value for key, value in {**service, **then}.items() if value is not None}
            assert (await vipd.add(wanted)).status == 200, change
            assert await exported(vipd) == [service], change
        else:
            assert service == {"name": service["name"], **then}, change


TOLD = {
    "10.96.0.10:53/udp 10.244.0.5 10.244.2.21": ("10.96.0.10:53/udp (2 backends)", "dns:NAME"),
    "10.0.0.1,fd00::1 -p 80 -p 53/udp 10.1.0.5 --backup 10.1.0.9": (
        "10.0.0.1:80/tcp (10.0.0.1,fd00::1 80 53/udp, 1 backend, 1 backup)",
        "tcp",
    ),
    "10.96.0.10:53/udp --name dns": ("dns (10.96.0.10:53/udp, no backends: new flows are refused)", ""),
    "10.96.0.10:80 10.244.0.5": ("10.96.0.10:80/tcp (1 backend)", "tcp"),
    "10.96.0.10:514/udp 10.244.0.5": ("10.96.0.10:514/udp (1 backend)", "udp:TEXT"),
    "10.96.0.10:53/tcp,udp 10.244.0.5": ("10.96.0.10:53/tcp (1 backend)", "tcp"),
    "10.96.0.10:36412/sctp 10.244.0.5": ("10.96.0.10:36412/sctp (1 backend)", "exec:COMMAND"),
    "10.96.0.10:80/tcp dns:web.internal:80": ("10.96.0.10:80/tcp (1 backend)", "tcp"),
    "10.96.0.10:80 '{address: 10.244.0.5, check: tcp}' 10.244.0.6": ("10.96.0.10:80/tcp (2 backends)", "tcp"),
    "10.96.0.10:80 '{address: 10.244.0.5, check: tcp}'": ("10.96.0.10:80/tcp (1 backend)", ""),
    "10.96.0.10:80 10.244.0.5 --check none": ("10.96.0.10:80/tcp (1 backend)", ""),
    "10.96.0.10:80 10.244.0.5 --check http:/healthz": ("10.96.0.10:80/tcp (1 backend)", ""),
}
"""What is behind `add`, what `created` says, and the check of the hint on stderr, if there is one."""


@story_of(conversation)
async def test_what_add_says(vipd: Vipd, say: Say) -> None:
    stored = f"; stored in {vipd.state_dir}/state.db; survives reboot"
    for line, (told, check) in TOLD.items():
        name = told.partition(" ")[0]
        hint = f"no check is set: dead backends get flows, too; hint: vipctl set {name} --check {check}\n"
        assert await say(f"add {line}") == (0, f"created {told}{stored}\n", hint if check else ""), line
        again = await say(f"add {line}")
        assert (again.code, again.stdout.split(" (")[0], again.stderr) == (0, f"unchanged {name}", ""), line
        for quiet in ("-q", "-o json", "--json", "-o yaml") if check else ():
            await empty(vipd)
            assert (await say(f"add {line} {quiet}")).stderr == "", line
        await empty(vipd)


def spec_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line[:1] != " "]


@story_of(conversation)
async def test_a_dry_run_shows_what_would_differ(vipd: Vipd, say: Say) -> None:
    added = await say("add 10.96.0.10:53/udp 10.0.0.1 --dry-run")
    assert added.stdout == (
        "# 10.96.0.10:53/udp: would be created\n"
        "+ name: 10.96.0.10:53/udp\n"
        "+ address: 10.96.0.10\n"
        "+ ports: [53/udp]\n"
        "+ backends: [10.0.0.1]\n"
        "created 10.96.0.10:53/udp (1 backend); dry run: nothing was done\n"
    )
    assert added.stderr == "no check is set: dead backends get flows, too; hint: --check dns:NAME\n"
    assert await say("add 10.96.0.10:53/udp 10.0.0.1 --dry-run -q") == (0, "", "")
    document = json.loads((await say("add 10.96.0.10:53/udp --dry-run --json")).stdout)
    assert (document["changed"], document["applied"]) == (True, False)
    assert await exported(vipd) == []
    await say("add 10.96.0.10:53/udp 10.244.0.5 --name dns --affinity 10m")
    changed = await say("set dns --affinity none --check dns:example.com --dry-run")
    assert spec_lines(changed.stdout) == [
        "# dns: would be changed",
        "- affinity: {by: client-ip, timeout: 10m}",
        "+ check: {type: dns, query: example.com}",
        "changed dns (check dns:example.com, affinity none); dry run: nothing was done",
    ]
    assert "check" not in (await exported(vipd))[0]


@story_of(conversation)
async def test_every_verb_names_backends_alike(vipd: Vipd, say: Say) -> None:
    for backend, declared in {
        "10.244.0.11": "10.244.0.11:8080",
        "10.244.0.11:8080": "10.244.0.11:8080",
        "10.244.0.12:80": "10.244.0.12",
        "10.244.0.12": "10.244.0.12",
    }.items():
        await empty(vipd)
        await say("add 10.96.0.11:80/tcp 10.244.0.11:8080,10.244.0.12 --name web")
        assert f"draining web/{declared}" in (await say(f"drain web/{backend}")).stdout
        assert f"resumed web/{declared}" in (await say(f"resume web/{backend}")).stdout
        for option in ("--weight 3", "--backup true", "--max-connections 9"):
            assert "changed web" in (await say(f"set web/{backend} {option}")).stdout
        backends = (await exported(vipd))[0]["backends"]
        (spec,) = (each for each in backends if isinstance(each, dict) and "backup" in each)
        values = {"address": backend.partition(":")[0], "weight": 3, "backup": True, "max_connections": 9}
        assert {key: spec[key] for key in values} == values
        assert "changed web" in (await say(f"remove-backend web {backend}")).stdout
        assert len((await exported(vipd))[0]["backends"]) == 1
        for line in ("set web/{} --weight 3", "set web/{} --backup true", "drain web/{}"):
            assert f"web has no backend {backend}" in (await say(line.format(backend))).stderr


@story_of(conversation)
async def test_an_address_is_a_target_where_one_service_has_it(vipd: Vipd, say: Say) -> None:
    for line in (
        "10.96.0.10 -p 53/udp -p 53/tcp 10.244.0.5 --name dns",
        "fd00::20 -p 80/tcp fd00:1::5 --name six --external 2001:db8::9",
        "10.96.0.30:80/tcp 10.244.0.7 --name a",
        "10.96.0.30:81/tcp 10.244.0.7",
    ):
        assert (await say(f"add {line}")).code == 0
    for target in ("10.96.0.10", "fd00::20", "2001:db8::9", "fd00:0::20"):
        assert (await say(f"list -o name {target}")).stdout in ("dns\n", "six\n")
    assert "dns" in (await say("describe 10.96.0.10")).stdout
    assert "draining dns/10.244.0.5" in (await say("drain 10.96.0.10/10.244.0.5")).stdout
    assert "resumed dns/10.244.0.5" in (await say("resume 10.96.0.10/10.244.0.5")).stdout
    assert "six: ready" in (await say("ready fd00::20")).stdout.replace("not ready", "ready")
    both = await say("describe 10.96.0.30")
    assert both.stderr.endswith("is of several services; hint: name one: a, 10.96.0.30:81/tcp\n")
    for wrong in ("10.96.0.10:54/udp", "10.96.0.10:80"):
        assert (await say(f"describe {wrong}")).stderr.endswith(
            "hint: its address has 10.96.0.10:53/udp (dns), 10.96.0.10:53/tcp (dns)\n"
        )
    assert (
        "without brackets; write it like [fd00::20]:80/tcp" in (await say("describe fd00::20:80/tcp")).stderr
    )
    assert "removed six" in (await say("remove fd00::20")).stdout


@story_of(conversation)
async def test_several_services_are_removed_all_or_none(vipd: Vipd, say: Say) -> None:
    for number in (1, 2, 3):
        await say(f"add 10.96.0.{number}:80/tcp 10.244.0.7 --name web{number}")
    wrong = await say("remove web1 nope web2 neither")
    assert (wrong.code, wrong.stdout, wrong.stderr.count("vipctl: no service")) == (3, "", 2)
    assert wrong.stderr.endswith("vipctl: 2 of 4 cannot be changed, so none was\n")
    assert (await say("remove web1 web3 --dry-run")).stdout.count("removed") == 2
    assert len(await exported(vipd)) == 3
    # The same service twice, by its name and by its frontend.
    removed = await say("remove web1 10.96.0.1:80/tcp web2 -o json")
    document = json.loads(removed.stdout)
    assert (removed.code, document["changed"]) == (0, True)
    assert [(each["name"], each["action"]) for each in document["results"]] == [
        ("web1", "removed"),
        ("web2", "removed"),
    ]
    assert await say("remove web3 -q") == (0, "", "")
    assert await exported(vipd) == []


@story_of(conversation)
async def test_what_is_stored_but_not_in_the_kernel_fails(vipd: Vipd, say: Say) -> None:
    vipd.kernel.failures = [("iptables-restore", "exit code 4")] * 1000
    ended = await say("add 10.96.0.10:53/udp --name dns")
    assert (ended.code, ended.stdout) == (1, "")
    assert ended.stderr.startswith(
        f"vipctl: dns: stored in {vipd.state_dir}/state.db, but not in the kernel yet: "
    )
    assert ended.stderr.endswith("; hint: vipd goes on trying; vipctl status shows how it goes\n")
    assert "exit code 4" in ended.stderr
    as_json = await say("add 10.96.0.11:53/udp --json")
    assert (as_json.code, json.loads(as_json.stdout)["applied"]) == (1, False)
    assert (await say("reload")).stderr.count("not have their rules yet") == 1


@story_of(conversation)
async def test_the_only_problem_of_a_request_is_said_once(vipd: Vipd, say: Say) -> None:
    only = await say("add 10.10.0.1:80/tcp 10.0.0.1 --name own")
    assert (only.code, only.stderr.count("10.10.0.1 is an address of this host itself")) == (1, 1)
    several = await say("add 10.96.0.1:80/tcp 10.0.0.1 --name own --check http:x --slow-start 99d")
    assert (several.code, several.stdout) == (1, "")
    check, slow_start, summary = several.stderr.splitlines()
    assert (check[:12], slow_start[:12]) == ("check.path: ", "slow_start: ")
    assert summary.startswith("vipctl: ")
    assert await exported(vipd) == []


_, SLIPS, _, WRONG = (Path(__file__).parent / "slips.txt").read_text().split("\n\n")


@story_of(conversation)
async def test_a_slip_is_answered_with_the_line_that_was_meant(vipd: Vipd, say: Say) -> None:
    await say(WEB)
    before = await exported(vipd)
    differing = {}
    for slip in SLIPS.replace("\n    ", "\0").splitlines():
        line, hint = slip.split("\0")
        ended = await say(line)
        if ended.code == 0 or ended.stdout or f"; hint: {hint}" not in ended.stderr:
            differing[line] = ended
        if ended.stderr.count("\n") != 1 or not ended.stderr.startswith("vipctl: "):
            differing[line] = ended
    assert differing == {}
    assert await exported(vipd) == before
    others = await say("add-backend web 10.0.0.8:81 10.0.0.9:82") and await say("add-backend web 10.0.0.7")
    assert others.stderr.startswith(
        "vipctl: the backends of web have different ports: none of their own, 81, 82; hint: say which: "
    )


@story_of(conversation)
async def test_wrong_usage_asks_nobody(vipd: Vipd, say: Say) -> None:
    differing = {}
    for line in WRONG.splitlines():
        ended = await say(f"--socket /nowhere {line}")
        if (ended.code, ended.stdout) != (2, ""):
            differing[line] = ended
    assert differing == {}
    assert await exported(vipd) == []
