"""The shells themselves complete command lines of `vipctl`, by the scripts that are installed for them."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from tests.cli.manual.conftest import InstalledManual
from tests.cli.manual.terminal import Terminal, terminal
from tests.docs.programs import said

VERBS = ["the verbs"]
"""Stands for all verbs of `vipctl -h`."""
SHELLS = ("bash", "zsh", "fish")
TYPED = r"TYPED(<.*>)END"


def needs(shell: str) -> pytest.MarkDecorator:
    reason = f"{shell} is not installed: apt-get install {shell}"
    return pytest.mark.skipif(shutil.which(shell) is None, reason=reason)


@cache
def verbs() -> dict[str, str]:
    """Each with its summary."""
    return dict(re.findall(r"^  ([a-z][a-z-]+)  +(.*)$", said("-h").stdout, re.MULTILINE))


EACH = [pytest.param(shell, marks=needs(shell)) for shell in SHELLS]

Offered = Callable[[str, str], list[str]]


def bash_offers(installed: InstalledManual, line: str) -> list[str]:
    script = installed.made / "completions/bash/vipctl"
    code = 'source "$1"; COMP_LINE=$2 COMP_POINT=${#2}; _vipctl; printf "%s\\n" "${COMPREPLY[@]}"'
    breaks = "COMP_WORDBREAKS=$' \\t\\n\"\\'@><=;|&(:'"
    return output_lines(installed, "bash", "--norc", "-c", f"{breaks}; {code}", "bash", script, line)


def fish_offers(installed: InstalledManual, line: str) -> list[str]:
    script = installed.made / "completions/fish/vipctl.fish"
    lines = output_lines(
        installed, "fish", "--no-config", "-c", 'source $argv[1]; complete -C "$argv[2]"', script, line
    )
    return [offered.partition("\t")[0] for offered in lines]


def output_lines(installed: InstalledManual, *command: str | Path) -> list[str]:
    ended = subprocess.run(
        command,
        env=installed.environment,
        cwd=installed.path / "home",
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.stderr == ""
    return [line for line in ended.stdout.splitlines() if line]


@contextmanager
def interactive(name: str, installed: InstalledManual) -> Iterator[Terminal]:
    """An interactive shell as a user has it, the script in place."""
    made = installed.made / "completions"
    command, setup = {
        "bash": ("bash --norc -i", f"source {made}/bash/vipctl"),
        "zsh": ("zsh -f -i", f"fpath=({made}/zsh $fpath); autoload -Uz compinit; compinit -D -u"),
        "fish": ("fish --no-config -i", f"source {made}/fish/vipctl.fish"),
    }[name]
    with terminal(command.split(), installed.environment) as shown:
        # The quotes keep what is typed, and echoed, from being taken for the answer.
        shown.type(f"cd {installed.path / 'home'}; {setup}; echo rea''dy\r")
        shown.expect("ready")
        yield shown


@pytest.fixture(scope="module", params=EACH)
def shell(request: pytest.FixtureRequest, installed: InstalledManual) -> Iterator[Terminal]:
    with interactive(request.param, installed) as shown:
        yield shown


TYPED_KEYS = {
    "desc\t dn\t": "<describe><dns>",
    "describe 'shop'/\t": "<describe><shop/web>",
    "describe 10.96'.0.2\t": "<describe><10.96.0.20:443/tcp>",
    "describe shop/w\t": "<describe><shop/web>",
    "describe 10.96.0.2\t": "<describe><10.96.0.20:443/tcp>",
    "describe 10.96.0.10:\t": "<describe><10.96.0.10:53/udp>",
    "remove-backend dns 10.244.2\t": "<remove-backend><dns><10.244.2.21:5353>",
    "remove-backend dns fd00:2\t": "<remove-backend><dns><fd00:244::5>",
    "set dns/10.244.0\t --weight 2": "<set><dns/10.244.0.5><--weight><2>",
    "set 10.96.0.10:53/udp/10.244.0\t": "<set><10.96.0.10:53/udp/10.244.0.5>",
    "add 10.96.0.9:53/udp --masq\t for\t": "<add><10.96.0.9:53/udp><--masquerade><forwarded>",
    "list --output=na\t": "<list><--output=name>",
    "check we\t": "<check><web.yaml>",
    "check --services-dir de\t": "<check><--services-dir><declared>",
    "check --set mark_\tx": "<check><--set><mark_bit=x>",
    # Typed as each shell lets one type a bracket; zsh takes a bare one for a pattern.
    "describe \\[fd00:96\t": "<describe><[fd00:96::10]:53/udp>",
    "describe '10.96.0.10:5\t": "<describe><10.96.0.10:53/udp>",
}
"""Keys, and the words that they come to."""


def test_a_tab_completes_a_word(shell: Terminal) -> None:
    for keys, words in TYPED_KEYS.items():
        shell.type(f"vipctl {keys}\r")
        # zsh takes the slash behind a directory back when nothing follows it.
        assert shell.expect(TYPED)[1].replace("/>", ">") == words, keys


def test_the_daemon_that_the_line_names_is_asked(shell: Terminal, installed: InstalledManual) -> None:
    shell.type("export VIPD_SOCKET=/nowhere\r")
    path = installed.daemon.socket
    for option in (f"--socket={path}", f"--socket {path}"):
        for words in (f"{option} describe", f"describe {option}"):
            shell.type(f"vipctl {words} dn\t\r")
            assert shell.expect(TYPED)[1].endswith("<dns>"), words
    shell.type("vipctl describe dn\t\r")
    assert shell.expect(TYPED)[1] == "<describe><dn>"
    shell.type(f"export VIPD_SOCKET={path}\r")


BASH: dict[str, list[str]] = {
    "vipctl ": VERBS,
    "vipctl --": ["--socket", "--store", "--version", "--help"],
    "vipctl describe ": ["dns", "shop/web", "10.96.0.30:80/tcp"],
    "vipctl describe 10.96.0.3": ["10.96.0.30:80/tcp"],
    "vipctl remove ": ["dns", "10.96.0.30:80/tcp"],
    "vipctl remove-backend dns ": ["10.244.0.5", "10.244.2.21:5353", "fd00:244::5"],
    "vipctl remove-backend -q --socket=/nowhere dns ": [],
    "vipctl --socket /nowhere describe ": [],
    "vipctl describe -o json -- d": ["dns"],
    "vipctl add 10.96.0.1:53/udp ": [],
    "vipctl explain --from ": ["local"],
    "vipctl no-such-verb ": [],
    "vipctl completion ": ["bash", "zsh", "fish"],
}
FISH: dict[str, list[str]] = {
    "vipctl ": VERBS,
    "vipctl describe ": ["dns", "shop/web", "10.96.0.30:80/tcp"],
    "vipctl remove ": ["dns", "10.96.0.30:80/tcp"],
    "vipctl remove-backend --socket /nowhere dns ": [],
    "vipctl add 10.96.0.1:53/udp ": [],
    "vipctl list -o ": ["table", "wide", "json", "yaml", "name"],
    "vipctl completion ": ["bash", "zsh", "fish"],
}


@needs("bash")
def test_what_bash_offers(installed: InstalledManual) -> None:
    offered = {line: bash_offers(installed, line) for line in BASH}
    assert offered == {line: list(verbs()) if words == VERBS else words for line, words in BASH.items()}


@needs("fish")
def test_what_fish_offers(installed: InstalledManual) -> None:
    for line, words in FISH.items():
        assert set(fish_offers(installed, line)) == set(verbs() if words == VERBS else words), line


@needs("zsh")
def test_zsh_lists_words_with_what_they_are(installed: InstalledManual) -> None:
    with interactive("zsh", installed) as shown:
        shown.type("vipctl \t")
        for verb, summary in sorted(verbs().items()):
            shown.expect(rf"\b{verb} +-- {re.escape(summary)}")
        shown.type("\x15vipctl describe \t")
        shown.expect(r"10\.96\.0\.30:80/tcp")
        shown.expect(r"dns  10\.96\.0\.10:53/udp \[fd00:96::10\]:53/udp")
        shown.expect(r"shop/web  10\.96\.0\.20:443/tcp")


@pytest.mark.parametrize(
    "offers", [pytest.param(bash_offers, marks=needs("bash")), pytest.param(fish_offers, marks=needs("fish"))]
)
def test_words_of_the_program_need_no_program(
    installed: InstalledManual, offers: Callable[[InstalledManual, str], list[str]]
) -> None:
    before = installed.calls()
    assert "describe" in offers(installed, "vipctl de")
    assert "--affinity" in offers(installed, "vipctl add --a")
    assert installed.calls() == before
    assert offers(installed, "vipctl describe d") == ["dns"]
    assert installed.calls() == before + 1


def test_vipctl_prints_the_scripts_that_are_installed(made: Path) -> None:
    for shell, path in {"bash": "bash/vipctl", "zsh": "zsh/_vipctl", "fish": "fish/vipctl.fish"}.items():
        assert said("completion", shell) == (0, (made / "completions" / path).read_text(), "")


def test_a_daemon_that_is_not_there_or_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    words = ("complete", "targets", "--", "d")
    assert said("--socket", str(tmp_path / "none"), *words) == (0, "", "")
    path = str(tmp_path / "silent.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        start = time.monotonic()
        assert said("--socket", path, *words) == (0, "", "")
        assert time.monotonic() - start < 30  # a verb waits for ninety seconds
