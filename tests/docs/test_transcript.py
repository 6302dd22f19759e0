"""The reading of pages as scripts, and the comparison of what they show, can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, Block
from tests.docs.script import Commands, File, NotRun, script_of, stray_commands
from tests.docs.transcript import Step, mismatch, steps_of


def steps(text: str) -> list[Step]:
    return list(steps_of(Block(ROOT / "README.md", 7, "console", text)))


def test_a_prompt_tells_the_machine_and_the_user() -> None:
    read = steps("# one\n$ two\nclient$ three\nb1# four\n")
    assert [(step.machine, step.root, step.command) for step in read] == [
        ("host", True, "one"),
        ("host", False, "two"),
        ("client", False, "three"),
        ("b1", True, "four"),
    ]


def test_output_belongs_to_the_command_above_and_a_command_goes_on_after_a_backslash() -> None:
    first, second = steps("# a \\\n  b\nprinted\n\n# c\n")
    assert (first.command, first.expected, first.place) == ("a \\\n  b", ("printed", ""), "README.md:7")
    assert (second.command, second.expected, second.place) == ("c", (), "README.md:11")


def test_a_block_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match=r"README.md:7.*begins with a prompt"):
        steps("vipctl list\n")


AGREE = [
    ("one\ntwo", "one\ntwo\n"),
    ("one\n...", "one\ntwo\nthree\n"),
    ("...\nthree\n...", "one\ntwo\nthree\n"),
    ("a ... c", "a b c\n"),
    ("vipd  pid 12, 2026-01-01T00:00:00Z (5s ago)", "vipd    pid 4711, 2027-02-03T04:05:06Z (1m10s ago)\n"),
    ("b1 answers", "b2 answers\n"),
    ("", "\n"),
]
DISAGREE = [
    ("one", "two\n"),
    ("one", "one\ntwo\n"),
    ("one\ntwo", "one\n"),
    ("one\n...\nfour", "one\ntwo\nthree\n"),
    ("a ... c", "a b d\n"),
    ("a.c", "abc\n"),
    ("pid 12", "pid\n"),
    ("c1 answers", "c2 answers\n"),
    ("a b", "ab\n"),
]


def test_what_is_shown_agrees_with_what_is_printed_or_not() -> None:
    for pairs, agree in ((AGREE, True), (DISAGREE, False)):
        for shown, printed in pairs:
            assert (mismatch(shown.split("\n"), printed, [r"b\d"]) == "") is agree, shown
    assert mismatch((), "") == ""
    assert mismatch((), "surprise\n") == "+ surprise"


PAGE = """
<!-- not run here: needs
systemd -->
```console
# reboot
```
<!-- not run here: is forgotten when prose follows -->
Prose.
<!-- varies: b[12] -->
```console
$ vipctl list
b1
```
<!-- lab
b2# ip link set eth0 down
-->
```yaml
# /etc/vipd/services.d/a.yaml
apiVersion: vipd/v1
```
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Blocks are named by their place in the project.
    monkeypatch.setattr("tests.docs.markdown.ROOT", tmp_path)
    return tmp_path / "page.md"


def test_notes_say_how_a_block_is_run(page: Path) -> None:
    page.write_text(PAGE)
    left_out, listed, hidden, file = script_of(page)
    assert isinstance(left_out, NotRun)
    assert left_out.reason == "needs systemd"
    assert isinstance(listed, Commands)
    assert (listed.shown, listed.varies, listed.steps[0].expected) == (True, ("b[12]",), ("b1",))
    assert isinstance(hidden, Commands)
    assert (hidden.shown, hidden.steps[0].machine) == (False, "b2")
    assert isinstance(file, File)
    assert file.path == Path("/etc/vipd/services.d/a.yaml")
    page.write_text("<!-- lab\n# ip link\n")
    with pytest.raises(ValueError, match="does not end"):
        list(script_of(page))
    for block in ("```sh\nls\n```", "```\nvipctl list\n```", "```bash\n$ ls\n```"):
        page.write_text(f"{block}\n")
        assert len(stray_commands(page)) == 1, block
