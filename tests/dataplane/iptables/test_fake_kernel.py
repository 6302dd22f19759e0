"""One script of restores through the fake and through the real programs: same rules, same return codes."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.dataplane.declared import kube_like_services
from tests.dataplane.iptables.fake_kernel import FakeKernel
from tests.dataplane.namespace import Namespace
from tests.lab.inside import Runner, compiled
from vipd.model.service import Family

LONGEST = "ABCDEFGHIJKLMNOPQRSTUVWXYZ01"


def block(table: str, *lines: str) -> str:
    return "\n".join([f"*{table}", *lines, "COMMIT", ""])


def rendered(family: Family) -> str:
    return compiled(kube_like_services(), family=family)


SCRIPT = {
    "a new chain, named in a comment": block(
        "filter", ":A - [0:0]", '-A A -m comment --comment "to -j B or not" -j DROP', "-A A -j ACCEPT"
    ),
    "a jump to a chain that does not exist": block("nat", ":B - [0:0]", "-A B -j MISSING"),
    "a jump to a chain declared later": block("nat", ":B - [0:0]", "-A B -j C", ":C - [0:0]"),
    "first block good, second bad": block("filter", ":B - [0:0]", "-A B -j A")
    + block("nat", ":B - [0:0]", "-A C -j RETURN"),
    "append to an undeclared chain": block("filter", "-A NONE -j ACCEPT"),
    "insert into an undeclared chain": block("filter", "-I NONE 1 -j ACCEPT"),
    "flush of an undeclared chain": block("filter", "-F NONE"),
    "remove a chain with rules": block("filter", "-X A"),
    "remove a referenced chain": block("filter", ":A - [0:0]", "-X A"),
    "all of that undid nothing": block("filter", "-A B -j RETURN"),
    "remove a chain that is not there": block("filter", "-X NONE"),
    "remove a built-in chain": block("filter", "-X OUTPUT"),
    "delete a rule that is not there": block("filter", "-D A -j REJECT --reject-with icmp-port-unreachable"),
    "insert at the head, twice": block("filter", "-I INPUT 1 -j A", "-I INPUT 2 -j B", "-I INPUT 1 -j B"),
    "insert too far": block("filter", "-I INPUT 5 -j ACCEPT"),
    "delete the first of two": block("filter", "-D INPUT -j B"),
    "delete what stands behind a comment": block(
        "filter", '-D A -m comment --comment "to -j B or not" -j DROP'
    ),
    "a name of 28 characters": block("filter", f":{LONGEST} - [0:0]"),
    "a name of 29 characters": block("filter", f":{LONGEST}2 - [0:0]"),
    "probabilities": block(
        "nat",
        ":P - [0:0]",
        *(
            f"-A P -m statistic --mode random --probability {p} -j RETURN"
            for p in ("0.3333333333", "0.0000000001", "0.1000000000", "0.9999999999", "0.0000152588")
        ),
    ),
    "declared again means emptied": block("filter", ":A - [0:0]"),
    "declared and removed at once": block("filter", ":D - [0:0]", "-X D"),
    "two chains that refer to each other, removed": block(
        "filter", ":E - [0:0]", ":F - [0:0]", "-A E -j F", "-A F -j E"
    )
    + block("filter", ":E - [0:0]", ":F - [0:0]", "-X E", "-X F"),
    "a policy": block("filter", ":FORWARD DROP [0:0]"),
    "no COMMIT": "*filter\n-A INPUT -j ACCEPT\n",
    "no such table": block("nope", "-A INPUT -j ACCEPT"),
    "nothing": "",
    "a table without lines": block("mangle"),
    "vipd's rules": rendered(Family.IPV4),
}


async def play(run: Runner, variant: str) -> list[tuple[str, int, dict[str, str]]]:
    """Each step's return code, and the tables as saved after it."""
    played = []
    for step, text in SCRIPT.items():
        finished = await run([f"iptables-{variant}-restore", "--noflush", "-w", "5"], text)
        played.append((step, finished.exit_code, tables(await saved(run, f"iptables-{variant}-save"))))
    finished = await run([f"ip6tables-{variant}-restore", "--noflush", "-w", "5"], rendered(Family.IPV6))
    played.append(("IPv6", finished.exit_code, tables(await saved(run, f"ip6tables-{variant}-save"))))
    return played


async def saved(run: Runner, program: str) -> str:
    finished = await run([program], "")
    assert finished.exit_code == 0, finished.stderr
    return finished.stdout


def tables(text: str) -> dict[str, str]:
    """Table to its lines, counters zeroed: the order of tables is not part of the comparison."""
    text = re.sub(r"\[\d+:\d+\]", "[0:0]", re.sub(r"(?m)^#.*\n", "", text))
    return {part.partition("\n")[0]: part for part in re.findall(r"(?ms)^\*.*?^COMMIT\n", text)}


@pytest.mark.root
@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_fake_does_as_the_real_programs(variant: str) -> None:
    faked = asyncio.run(play(FakeKernel().run, variant))
    with Namespace() as namespace:
        real = asyncio.run(play(namespace.run, variant))
        for stem in ("iptables", "ip6tables"):
            said = namespace.do(f"{stem}-{variant}", "--version")
            fake = FakeKernel(version=re.findall(r"\d+(?:\.\d+)+", said)[0])
            assert asyncio.run(fake.run([f"{stem}-{variant}", "--version"], "")).stdout == said
    for fake_step, real_step in zip(faked, real, strict=True):
        assert fake_step == real_step
    assert {code for _, code, _ in real} == {0, 1, 2} | ({4} if variant == "nft" else set())
