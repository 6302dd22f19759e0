"""What vipctl shows, line for line: each file of `screens/` is a conversation with a vipd.

`$ words` is a command line; what it prints follows, with `! ` before lines on stderr, and `exit N` unless it
is 0.
`> path` writes the lines behind it, up to an empty one, into a file below ROOT. `## text` is a remark, and
`* word ...` changes the world: see `_change`. What differs from run to run is masked: see `masked`. With
VIPD_WRITE_SCREENS in the environment the files are written anew; read what differs before you keep it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import yaml

from tests.lab.inside import Output, Vipd, running
from tests.lab.stories import story_of

SCREENS = sorted((Path(__file__).parent / "screens").glob("*.txt"))
MASKS = (
    (r"\w+ \(pid \d+\)", "USER (pid N)"),
    (r"pid \d+", "pid N"),
    (r"\d{4}-\d\d-\d\dT[\d:.]+(Z|\+00:00)", "TIME"),
    (r"[A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d", "TIME"),
    (r"\d+s ago", "now"),
    (r"took \d+ ms", "took N ms"),
    (r"^(Applies      )\d+, \d+ failed", r"\1N, N failed"),
    (r"in 59s|in 1m\b", "in 1m"),
    (r"^  \d+s  ", "  AGE  "),
    (r'"id": \d+|"first": \d+', '"id": N'),
    (r'"last_apply_seconds": [\d.]+', '"last_apply_seconds": N'),
)
WIDTH_VARIES = re.compile(r"ROOT|USER|\bTIME\b|\bnow\b|^(SOURCE|REVISION|BACKEND) ")


def masked(text: str, root: Path) -> str:
    lines = []
    for line in text.replace(str(root), "ROOT").splitlines():
        for pattern, mask in MASKS:
            line = re.sub(pattern, mask, line)
        lines.append(re.sub("(?<=[^ ])  +", "  ", line) if WIDTH_VARIES.search(line) else line)
    return "".join(f"{line}\n" for line in lines)


def _change(vipd: Vipd, words: list[str]) -> None:
    match words:
        case ["fail", program, why]:
            vipd.kernel.failures = [(program, why)] * 1000
        case ["fail"]:
            vipd.kernel.failures = []
        case ["warn", text]:
            vipd.kernel.warnings = (text,)
        case ["check", backend, found]:
            vipd.backends[backend] = True if found == "healthy" else found
        case ["name", name, *addresses]:
            vipd.names[name] = addresses
        case ["remove", path]:
            (vipd.root / path).unlink()
        case _:
            raise AssertionError(f"* {words}")


def _printed(ended: Output) -> Iterator[str]:
    yield from ended.stdout.splitlines(keepends=True)
    yield from (f"! {line}" for line in ended.stderr.splitlines(keepends=True))
    if ended.code:
        yield f"exit {ended.code}\n"


async def shown(vipd: Vipd) -> str:
    return json.dumps((await vipd.ask("GET", "/v1/services")).body)


def conversation(text: str) -> str:
    """The conversation as it goes now."""
    said: list[str] = []

    async def story(vipd: Vipd) -> None:
        steps = re.split(r"^(?=\$ |> |\* |## )", text, flags=re.MULTILINE)
        for step in filter(None, steps):
            first, _, rest = step.partition("\n")
            mark, _, words = first.partition(" ")
            said.append(first + "\n" if mark == "$" else step)
            if mark == "$":
                ended = await vipd.vipctl(*shlex.split(words.replace("ROOT", str(vipd.root))))
                printed = masked("".join(_printed(ended)), vipd.root)
                said.append(printed + "\n" * (len(rest) - len(rest.rstrip("\n")) - bool(rest.strip())))
            elif mark == ">":
                (vipd.root / words).parent.mkdir(exist_ok=True)
                (vipd.root / words).write_text(rest.rstrip("\n") + "\n")
            elif words.startswith("until "):
                wanted = words.removeprefix("until ")
                async with asyncio.timeout(60):
                    while wanted not in await shown(vipd) or '"health": "unknown"' in await shown(vipd):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            elif mark == "*":
                _change(vipd, shlex.split(words))

    running(story, lambda vipd: vipd.state_dir.mkdir(exist_ok=True))
    return "".join(said)


@pytest.mark.parametrize("path", SCREENS, ids=lambda path: path.stem)
def test_the_conversation_is_as_written(path: Path) -> None:
    written = path.read_text()
    goes = conversation(written)
    if "VIPD_WRITE_SCREENS" in os.environ:
        path.write_text(goes)
    assert goes.splitlines() == written.splitlines()


@story_of(running, lambda vipd: vipd.state_dir.mkdir(exist_ok=True))
async def test_documents_say_what_the_api_says(vipd: Vipd) -> None:
    await vipd.vipctl("add", "10.96.0.10:53/udp", "10.244.0.5", "--name", "dns")
    await vipd.vipctl("drain", "dns/10.244.0.5")
    for words, path in {
        "list": "services",
        "describe dns": "services/dns",
        "status": "status",
        "overrides": "overrides",
        "history": "history",
        "diff": "diff",
        "export": "export",
    }.items():
        for form in ("-o json", "--json", "-o yaml"):
            for last in (False,) * 20 + (True,):
                # Something may have happened in between: then once more.
                said = (await vipd.ask("GET", f"/v1/{path}")).body
                said.pop("version") if path.startswith("services/") else None
                ended = await vipd.vipctl(*words.split(), *form.split())
                if yaml.safe_load(ended.stdout) == said or last:
                    break
            assert yaml.safe_load(ended.stdout) == said, words
            assert next(iter(yaml.safe_load(ended.stdout))) == "apiVersion"
            assert form == "-o yaml" or json.loads(ended.stdout) == said
        assert (await vipd.vipctl(*words.split(), "-o", "xml")).code == 2


def test_every_screen_is_there() -> None:
    assert len(SCREENS) >= 5
    empty = [p.stem for p in SCREENS if len([k for k, _ in groupby(p.read_text().splitlines())]) < 20]
    assert empty == []
