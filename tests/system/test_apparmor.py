"""The AppArmor profile is read by its parser, and lets through what the service does on a machine.

This kernel need not have AppArmor: the rules are compared with what strace sees the daemon and its tools do.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.system.conftest import SERVED_PORT, Prepared, install_vipd
from tests.system.machine import Machine

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1800)]

PROFILE = Path(__file__).parents[2] / "debian/usr.sbin.vipd"
VIP = "10.96.43.1"

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


def test_the_parser_takes_the_profile(prepared: Prepared) -> None:
    argv = ["apparmor_parser", "--skip-kernel-load", "--skip-cache", str(PROFILE)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    argv = ["apparmor_parser", "--names", "--skip-cache", str(PROFILE)]
    assert subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout == "vipd\n"


def test_the_rules_are_read_as_the_kernel_would(prepared: Prepared) -> None:
    allowed = rules(PROFILE)
    for access in (
        ("/var/lib/vipd/state.db", "w"),
        ("/proc/sys/net/ipv4/ip_forward", "w"),
        ("/etc/vipd/x", "r"),
    ):
        assert allowed(access), access
    for access in (
        ("/etc/vipd/x", "w"),
        ("/etc/shadow", "r"),
        ("/usr/bin/sh", "w"),
        ("/usr/lib/vipd/x.py", "w"),
        ("/root/x", "r"),
    ):
        assert not allowed(access), access


def test_no_program_needs_a_change_of_profile(prepared: Prepared) -> None:
    """Which the unit's NoNewPrivileges= would forbid, in complain mode too: exec checks would end."""
    text = PROFILE.read_text()
    assert "\n  /** ix,\n" in text
    modes = re.findall(r"(?m)^\s*[/@]\S+\s+([a-zA-Z]+),", text)
    assert {mode for mode in modes if "x" in mode} == {"ix", "mrix"}


@pytest.mark.nightly
def test_what_the_service_opens_is_in_the_profile(
    machine: Machine, prepared: Prepared, tmp_path: Path
) -> None:
    install_vipd(machine, prepared.package)
    assert "complain" in machine.said("grep", "^profile", "/etc/apparmor.d/usr.sbin.vipd")
    trace = tmp_path / "trace"
    what = "trace=open,openat,openat2,execve,clone,clone3,fork,vfork"
    argv = [
        "strace",
        "-f",
        "-y",
        "--decode-pids=pidns",
        "-o",
        str(trace),
        "-e",
        what,
        "-p",
        str(machine.leader()),
    ]
    tracer = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    try:
        time.sleep(1)
        _use(machine)
    finally:
        tracer.terminate()
        tracer.wait(60)
    with trace.open(errors="replace") as lines:
        seen = traced(lines, "/usr/sbin/vipd")
    assert len(seen) > 300, f"the trace holds no daemon: {sorted(seen)[:20]}"
    assert any(path.endswith("/state.db") for path, _ in seen)
    assert any(mark == "x" and "iptables" in path for path, mark in seen)
    allowed = rules(PROFILE)
    missing = sorted(access for access in seen if not allowed(access))
    assert missing == []


def _use(machine: Machine) -> None:
    backends = [f"{backend.ipv4}:{SERVED_PORT}" for backend in machine.lab.backends]
    machine.run("systemctl", "restart", "vipd")
    machine.run("vipctl", "add", f"{VIP}:80/tcp", *backends, "--name", "web")
    assert not machine.lab.client.send(VIP, 80, count=5).failures
    machine.run("vipctl", "set-dataplane", "nftables")
    machine.run("vipctl", "set-dataplane", "iptables")
    machine.run("systemctl", "reload", "vipd")
    machine.run("nft", "flush", "ruleset")
    machine.wait_until(lambda: not machine.lab.client.send(VIP, 80, timeout=3.0).failures, "rules are mended")
    machine.run("vipctl", "status")
