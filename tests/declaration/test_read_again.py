"""A text says the same whether read as text or bytes, and whatever its file said before."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.examples import examples
from tests.lab.inside import Declared, Vipd, declare, running, written
from tests.lab.stories import story_of
from tests.model.samples import HEAD, many_declared

WEB = """  - name: web/shop
    address: 10.96.0.1
    ports: [{name: http, port: 80, protocol: tcp, target: 8080}]
    backends: [10.128.0.1, 10.128.0.2:81, 10.128.0.3@5]
"""
LISTED = """  # a comment
  - ports: 53:5353/udp
    backends:
        - 10.128.0.1
        - 10.128.0.2:53@0
    address: 10.96.0.2
"""
WRAPPED = """  - address: 10.96.0.3
    ports: [53/udp, "54/tcp,udp"]
    backends: [10.128.0.1, 10.128.0.2,
      10.128.0.4]

"""
CHECKED = """  - name: checked
    address: [10.96.0.4, "fd00::4"]
    ports:
      - 80
    backends: [10.128.0.1, "fd00::5"]
    check: {type: tcp, interval: 5s}
"""
FLOW = "  - {name: flow, address: 10.96.0.5, ports: [53/udp], backends: [10.128.0.1]}\n"
MIXED = HEAD + WEB + LISTED + FLOW + WRAPPED + CHECKED + WEB.replace("shop", "2").replace("0.1\n", "0.6\n")
OUTDENTED = re.sub(r"^  ", "", f"# head\n\n{HEAD}{WEB}{CHECKED}{LISTED}", flags=re.MULTILINE)
ODD = [
    "",
    HEAD,
    f"{HEAD}{WEB}kind: x\n",
    f"{HEAD}{WEB}---\n{HEAD}{FLOW}",
    f"{HEAD}{WEB}{CHECKED}...\n{WEB}",
    f"defaults: {{check: {{type: tcp}}}}\n{HEAD}{WEB}",
    f"{HEAD}{WEB}{WEB}",
    *(HEAD + WEB.replace("10.96.0.1", address) for address in ("127.0.0.1", "10.96.0.256", "10.128.0.1")),
    *(
        HEAD + WEB.replace("10.128.0.1,", f"{other},")
        for other in ("10.128.0.2:81", "10.128.0.1:0", "224.0.0.1")
    ),
    HEAD + WEB.replace("port: 80,", "port: 80, port: 81,"),
    *(HEAD + WEB.replace("web/shop", name) for name in ("yes", "0x10", "web-")),
    *(
        HEAD + WEB + f"    {line}\n"
        for line in ("address: 10.96.0.9", "checks: {}", "check: {type: tcp, <<: {}}")
    ),
    HEAD + CHECKED.replace("[10.128", "&a [10.128") + WEB.replace("ports:", "fallback: *a\n    ports:"),
    *(HEAD + WEB.replace("    ports", f"{indent}ports") for indent in ("     ", "\t")),
    HEAD + WEB.replace("\n", "\r"),
    HEAD + CHECKED.replace("checked\n", "checked\u2028"),
    HEAD + WEB.rstrip("\n").removesuffix("]"),
    HEAD + WEB + "  - just text\n  - [a, list]\n",
]
PIECES = st.sampled_from(
    [
        *"ab01.:,-#[]{}&*!|>'\"%@?\t \n\r~=/\x85",
        *(": ", " #", "\n  ", "\n- ", "\n---\n", "\n...\n", "\n\n", "\N{LINE SEPARATOR}", "\ufeff"),
        *("\n    name: q\n", "null", "1e3", "x-a: 1\n", "services:\n", ":0", "80/tcp", "127.0.0.1"),
    ]
)
EDITS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 4), PIECES), min_size=1, max_size=3)


def contents(declared: Declared) -> object:
    """All of it, with the lines, which equal services do not compare."""
    return declared, [service.origin for service in declared.services]


def edited(text: str, edits: list[tuple[float, int, str]]) -> Iterator[str]:
    """The text after some edits: each replaces characters at a place by others, or moves a line there."""
    for place, length, piece in edits:
        at = int(place * len(text))
        text = text[:at] + piece + text[at + length :]
    yield text
    lines = text.splitlines(keepends=True)
    if lines:
        lines.insert(int(edits[-1][0] * len(lines)), lines.pop(edits[0][1] * len(lines) // 5))
        yield "".join(lines)


def test_bytes_say_what_their_text_says() -> None:
    for text in (MIXED, OUTDENTED, many_declared(30), *ODD):
        for accepted in (False, True):
            assert contents(declare(text.encode(), accepted=accepted)) == contents(
                declare(text, accepted=accepted)
            )
    assert all(declare(text.encode()).ok for text in (MIXED, OUTDENTED, many_declared(30)))


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from([MIXED, OUTDENTED]), EDITS, st.booleans())
def test_bytes_of_an_edited_file_say_what_their_text_says(
    text: str, edits: list[tuple[float, int, str]], accepted: bool
) -> None:
    for made in edited(text, edits):
        assert contents(declare(made.encode(), accepted=accepted)) == contents(
            declare(made, accepted=accepted)
        )


LISTS = "# All\napiVersion: vipd/v1\ndefaults: {affinity: client-ip}\nservices:\n"
SERVICE = """  - name: web-{0}
    address: 10.96.0.{0}
    ports:
      - {{name: http, port: 80}}
    backends: [10.244.0.{0}]  # the old one
"""
EIGHT = LISTS + "".join(SERVICE.format(number) for number in range(1, 9))
REPLACED = [
    ("10.244.0.5]", "10.244.0.5, 10.244.9.9]"),
    ("web-2\n", "web-2\n    on_remove: reset\n"),
    ("web-6\n", "web-6\n    afinity: none\n"),
    ("    afinity: none\n", ""),
    ("10.96.0.5\n", "10.96.0.1\n"),
    (
        "10.96.0.1\n    ports:\n      - {name: http, port: 80}\n    backends: [10.244.0.5, ",
        "10.96.0.5\n    ports: 80\n    backends: [",
    ),
    ("10.244.0.3]", "10.96.0.7]"),
    ("10.96.0.7]", "10.244.0.3]"),
    ("address: 10.96.0.3", "address: 10.244.0.7"),
    ("address: 10.244.0.7", "address: 10.96.0.3"),
    ("  - name: web-4", '  - name: "web-40\n  - name: web-4'),
    ('  - name: "web-40\n', ""),
    ("  - name: web-4", SERVICE.format(40).replace("\n", "\n  ").rstrip(" ") + "  - name: web-4"),
    ("services:\n", "services:\n" + SERVICE.format(41)),
    ("  - name: web-7", "defaults: {affinity: none}\n  - name: web-7"),
    ("defaults: {affinity: client-ip}\n", ""),
    ("defaults: {affinity: none}\n", ""),
    ("  - name: web-8", "---\napiVersion: vipd/v1\nservices:\n  - name: web-8"),
    ("# the old one\n---\n", "# the old one\n...\n---\n"),
    ("  - name: web-1\n", "  - name: &a web-1\n"),
    ("# All", "\t# All"),
    ("\t# All", "# All\n\n"),
    (EIGHT[-40:], ""),
]


def specs(declared: Declared) -> Any:
    return yaml.safe_load(written(declared.services))["services"]


@story_of(running)
async def test_an_edited_file_says_what_it_says_to_who_never_saw_it_before(vipd: Vipd) -> None:
    """What vipd has of a file after each of many edits, against the text alone."""
    text, file = EIGHT, vipd.services_dir / "many.yaml"
    for old, new in (("", ""), *REPLACED):
        assert old in text, old
        text = text.replace(old, new, 1)
        file.write_text(text)
        answer = await vipd.reload()
        alone = declare(text, str(file))
        problems = answer.body["error"]["problems"] if answer.status == 422 else []
        assert problems == [str(problem) for problem in alone.problems], (old, new)
        views = (await vipd.ask("GET", "/v1/services")).body["services"]
        if alone.ok:
            served = {view["name"]: (view["origin"]["line"], view["spec"]) for view in views}
            assert served == {
                service.name: (service.origin.line, spec)
                for service, spec in zip(alone.services, specs(alone), strict=True)
            }, (old, new)
