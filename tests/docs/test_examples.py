"""What the documentation shows works: declarations, settings and command lines."""

from __future__ import annotations

import json
import re
import textwrap

import pytest

from tests.docs.commands import PROGRAMS, calls_of_ours, fault_of
from tests.docs.markdown import Block, blocks, pages, prose
from tests.docs.programs import settings_problems
from tests.lab.inside import declare

WRONG = "# wrong"
"""Marks each line of an example that must have a problem."""

YAML = [block for page in pages() for block in blocks(page, "yaml")]
SHELL = [block for page in pages() for block in blocks(page, "console", "sh")]
JSON = [block for page in pages() for block in blocks(page, "json")]

_HEAD = "apiVersion: vipd/v1\nservices:\n"
_SETTINGS = "# /etc/vipd/vipd.yaml"


def lines_of(text: str, mark: str) -> set[int]:
    return {number for number, line in enumerate(text.splitlines(), 1) if mark in line}


def is_settings(block: Block) -> bool:
    return block.text.startswith(_SETTINGS)


def declaration_text(block: Block) -> str:
    """The block's text as a whole declaration. A list of services may stand alone."""
    text = block.text
    if re.match(r"(?:#.*\n)*- ", text):
        return _HEAD + textwrap.indent(text, "  ")
    if not re.search(r"^apiVersion:", text, re.MULTILINE):
        pytest.fail(f"{block}: neither a declaration, nor services, nor headed {_SETTINGS}")
    return text


def faults_in(block: Block) -> list[str]:
    """What the block gets wrong against its marks."""
    if is_settings(block):
        return settings_faults(block.text)
    text = declaration_text(block)
    declared = declare(text, "example.yaml")
    marked = lines_of(text, WRONG)
    found = {problem.line for problem in declared.problems}
    unwanted = [str(problem) for problem in declared.problems if problem.line not in marked]
    nothing = [] if declared.services or marked else ["it declares nothing"]
    return [*unwanted, *nothing, *(f"line {line} should be wrong" for line in sorted(marked - found))]


def settings_faults(text: str) -> list[str]:
    """The same of settings, where a problem names the setting and no line."""
    wrong = [line.partition(":")[0] for line in text.splitlines() if WRONG in line]
    found = settings_problems(text)
    unwanted = [problem for problem in found if not any(name in problem for name in wrong)]
    return [*unwanted, *(f"{name} should be wrong" for name in wrong if name not in " ".join(found))]


def test_a_declaration_is_as_right_or_wrong_as_it_says() -> None:
    assert len(YAML) >= 10
    assert any(WRONG in block.text for block in YAML)
    assert {str(block): faults for block in YAML if (faults := faults_in(block))} == {}


def test_command_lines_use_verbs_and_options_that_exist() -> None:
    calls = [(str(block), call) for block in SHELL for call in calls_of_ours(block)]
    assert len(calls) >= 10
    assert [(place, *call, fault) for place, call in calls if (fault := fault_of(call))] == []


def test_command_lines_in_prose_use_verbs_and_options_that_exist() -> None:
    calls = {
        (str(line), tuple(code.replace("|", " ").split()))
        for page in pages()
        for line in prose(page)
        for code in line.code()
        if code.split()[0] in PROGRAMS and re.fullmatch(r"[a-z]+ [a-z-].*", code)
    }
    assert len(calls) >= 10
    assert [f"{place}: {fault}" for place, call in calls if (fault := fault_of(call, fragment=True))] == []


def test_json_is_json() -> None:
    for block in JSON:
        json.loads(block.text)


def shown(language: str, text: str) -> Block:
    return Block(pages()[0], 1, language, text)


WRONG_EXAMPLES = {
    "- address: 10.96.0.10\n  ports: [53/udpp]\n": "udpp",
    "- address: 10.96.0.10  # wrong\n  ports: [53/udp]\n": "line 3 should be wrong",
    "apiVersion: vipd/v1\n": "declares nothing",
    "# /etc/vipd/vipd.yaml\nmark_bits: 3\n": "unknown setting",
}
WRONG_LINES = (
    "# vipctl ad 10.96.0.10:53/udp",
    "# vipctl list --outptu wide",
    "# vipctl remove",
    "# vipctl add 10.96.0.10:53/udp --masquerade never",
    "$ sudo vipctl reload && vipctl describe",
    "$ ip netns exec red vipd --sets a=b",
    "$ VIPD_SOCKET=/x vipctl --sock /y list",
    "$ cat web.json | vipctl convert --kind Service -",
)


def test_a_wrong_example_or_command_line_is_noticed() -> None:
    for text, fault in WRONG_EXAMPLES.items():
        assert fault in "; ".join(faults_in(shown("yaml", text))), text
    for line in WRONG_LINES:
        assert any(fault_of(call) for call in calls_of_ours(shown("console", line + "\n"))), line
