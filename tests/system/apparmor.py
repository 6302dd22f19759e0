"""What an AppArmor profile lets through, and what a traced service opens and runs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

Access = tuple[str, str]
"""A path, and what is done: `r`, `w` or `x`."""

_RULE = re.compile(r"(?m)^\s*(?:owner\s+)?((?:/|@\{)\S*)\s+([a-zA-Z]+),")
_VARIABLE = re.compile(r"(?m)^@\{(\w+)\}\s*\+?=\s*(.*)$")
_OPENED = re.compile(r"(O_[A-Z_|]+).*\) += \d+<(/[^>]*)>")
_STARTED = re.compile(r"\) += (\d+)(?: /\* (\d+) in strace's PID NS \*/)?")
_EXECUTED = re.compile(r'"([^"]+)".*\) += 0$')
_CALL = re.compile(r"^(\d+) +(\w+)\((.*)$")
_REST = re.compile(r"^(\d+) +<\.\.\. (\w+) resumed>(.*)$")


def rules(profile: Path) -> Callable[[Access], bool]:
    """Whether a profile lets an access through. Asks apparmor_parser to read its includes."""
    argv = ["apparmor_parser", "--preprocess", "--skip-cache", str(profile)]
    text = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
    variables = {name: values.split() for name, values in _VARIABLE.findall(text)}
    granted = [(re.compile(_pattern(path, variables)), marks) for path, marks in _RULE.findall(text)]

    def allowed(access: Access) -> bool:
        path, mark = access
        return any(mark in marks and pattern.fullmatch(path) for pattern, marks in granted)

    return allowed


def _pattern(glob: str, variables: dict[str, list[str]]) -> str:
    while found := re.search(r"@\{(\w+)\}", glob):
        values = [value.strip('"').rstrip("/") for value in variables[found[1]]]
        glob = glob.replace(found[0], "{" + ",".join(values) + "}", 1)
    out, depth = "", 0
    for part in re.findall(r"\*\*|\*|\?|\{|\}|,|\[[^]]*\]|[^*?{},\[]+", glob):
        depth += (part == "{") - (part == "}")
        known = {"**": ".*", "*": "[^/]*", "?": "[^/]", "{": "(?:", "}": ")", ",": "|" if depth else ","}
        out += known.get(part) or (part if part.startswith("[") else re.escape(part))
    return out


def traced(lines: Iterable[str], program: str) -> set[Access]:
    """What a program did, and those that it started, in a trace of more than them (`strace -f -y
    --decode-pids=pidns`): files opened, programs run."""
    members: set[str] = set()
    done: set[Access] = set()
    for pid, call, text in _calls(lines):
        if call == "execve" and (found := _EXECUTED.search(text)):
            if found[1] == program:
                members.add(pid)
            elif pid in members:
                done.add((found[1], "x"))
        if pid not in members:
            continue
        if call.startswith("open") and (found := _OPENED.search(text)):
            done |= {(found[2], mark) for mark in _marks(found[1])}
        elif call in ("clone", "clone3", "fork", "vfork") and (found := _STARTED.search(text)):
            members.add(found[2] or found[1])
    return done


def _calls(lines: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Process, name, and arguments with the result of each call, however interrupted."""
    begun: dict[str, str] = {}
    for line in lines:
        if found := _CALL.match(line):
            pid, call, text = found.groups()
            if text.endswith("<unfinished ...>"):
                begun[pid] = text.removesuffix("<unfinished ...>")
            else:
                yield pid, call, text
        elif found := _REST.match(line):
            yield found[1], found[2], begun.pop(found[1], "") + found[3]


def _marks(flags: str) -> str:
    if "O_DIRECTORY" in flags or "O_PATH" in flags:
        return ""
    return "rw" if "O_RDWR" in flags else "w" if "O_WRONLY" in flags else "r"
