"""`vipctl` as a process: its help, the socket, what it loads, pipes, signals and terminals."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

import pytest

import vipd
from tests.cli.conftest import ROOT, Spawn, Vipctl
from tests.cli.documents import DNS, STATUS, WEB, changed, one
from tests.cli.fake_daemon import FakeDaemon
from tests.cli.test_answers import LONG as LONG_EVENT
from tests.cli.test_answers import event, order
from tests.lab.fork_server import fork_server
from tests.lab.unprivileged import command

HEAVY = ("yaml", "pydantic", "aiohttp", "asyncio", "pyroute2", "http.client", "email")
PATIENCE_SECONDS = 60.0


def test_help_shows_the_verbs_and_each_has_its_own(vipctl: Vipctl) -> None:
    ended = vipctl()
    assert ended == vipctl("-h") == vipctl("--help") == vipctl("help")
    assert (ended.code, ended.err) == (0, "")
    listed = re.findall(r"^  ([a-z][a-z-]+)  ", ended.out, re.MULTILINE)
    assert {"add", "list", "drain", "apply", "explain", "doctor"} <= set(listed)
    assert len(listed) == len(set(listed)) > 30
    for verb in listed:
        own = vipctl(verb, "-h")
        assert (own.code, f"vipctl {verb}" in own.out) == (0, True), verb
        assert own == vipctl(verb, "--help") == vipctl("help", verb)
        assert max(map(len, own.out.splitlines())) <= 80
    assert max(map(len, ended.out.splitlines())) <= 80


def test_the_version_needs_no_daemon(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    assert vipctl("--version") == (0, f"vipctl {vipd.__version__}\n", "")
    assert daemon.requests == []


def test_without_a_daemon(vipctl: Vipctl, tmp_path: Path) -> None:
    no_file = f"cannot reach vipd at {tmp_path}/vipd.sock: No such file or directory"
    hint = "hint: systemctl status vipd, or give another socket with --socket"
    assert vipctl("list") == (4, "", f"vipctl: {no_file}; {hint}\n")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "vipd.sock"))
    ended = vipctl("status")
    assert ended.code == 4
    assert "Connection refused; hint: systemctl status vipd" in ended.err


def test_permission_denied_names_the_group() -> None:
    with tempfile.TemporaryDirectory(prefix="vipd-test-") as place, socket.socket(socket.AF_UNIX) as server:
        path = Path(place, "s")
        server.bind(str(path))
        server.listen()
        path.chmod(0)
        Path(place).chmod(stat.S_IRWXU | stat.S_IXGRP | stat.S_IXOTH)
        words = ("--socket", str(path), "list")
        if os.geteuid() == 0:
            argv = command("vipd.cli.main", *words)
            ended = fork_server("vipd").run("", argv, None, PATIENCE_SECONDS, {})
        else:
            plain = [sys.executable, "-m", "vipd.cli.main", *words]
            ended = subprocess.run(plain, capture_output=True, text=True, check=False)
        group = path.group()
    assert ended.returncode == 4, ended.stderr
    assert f"Permission denied; hint: run it as root, or as a member of the group {group}" in ended.stderr


def test_the_environment_names_the_socket(daemon: FakeDaemon, spawn: Spawn) -> None:
    daemon.answer("GET /v1/version", {"version": "9.9"})
    out, err = spawn("version").communicate(timeout=PATIENCE_SECONDS)
    assert b"vipd 9.9" in out, err


ASKING = ("list", "list -o json", "describe dns", "status", "version", "reload", "add-backend dns 10.244.0.5")


@pytest.mark.parametrize("line", [*ASKING, "add 10.96.0.10:53/udp 10.244.0.5"])
def test_verbs_that_ask_the_daemon_load_nothing_of_it(daemon: FakeDaemon, line: str) -> None:
    daemon.answer("GET /v1/services", {"services": [DNS, WEB]})
    daemon.answer("GET /v1/services/dns", one(DNS))
    daemon.answer("GET /v1/status", STATUS)
    daemon.answer("GET /v1/version", {"version": "9.9"})
    for request in ("services", "services/dns/backends"):
        daemon.answer(f"POST /v1/{request}", changed(("created", "dns")))
    daemon.answer("POST /v1/reload", changed() | {"services": 2})
    words = ("--socket", str(daemon.socket), *line.split())
    argv = [sys.executable, "-X", "importtime", "-m", "vipd.cli.main", *words]
    ended = subprocess.run(argv, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    loaded = set(re.findall(r"\|\s+([\w.]+)$", ended.stderr, re.MULTILINE))
    assert (ended.returncode, loaded & set(HEAVY)) == (0, set())
    assert "vipd.cli" in loaded


def test_a_line_is_in_the_pipe_as_soon_as_it_is_printed(spawn: Spawn, daemon: FakeDaemon) -> None:
    daemon.answer("POST /v1/overrides", order())
    daemon.answer("GET /v1/flows", {"flows": 3})
    process = spawn("drain", "web/10.0.0.1", "--wait")
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"draining web/10.0.0.1")
    assert process.poll() is None, "it still waits"


def test_a_reader_that_goes_away_ends_it_in_silence(daemon: FakeDaemon, spawn: Spawn) -> None:
    daemon.answer("GET /v1/services", {"services": [DNS] * 300})
    process = spawn("list", "-o", "json")
    assert process.stdout is not None
    assert process.stdout.read(1) == b"{"
    process.stdout.close()
    assert process.wait(PATIENCE_SECONDS) == -signal.SIGPIPE
    assert process.stderr is not None
    assert process.stderr.read() == b""


def test_output_that_cannot_be_written_is_an_error(daemon: FakeDaemon, spawn: Spawn) -> None:
    daemon.answer("GET /v1/services", {"services": [DNS]})
    with Path("/dev/full").open("wb") as full:
        process = spawn("list", stdout=full.fileno())
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert err == b"vipctl: cannot write the output: No space left on device\n"


def test_interrupt_has_no_traceback(tmp_path: Path, spawn: Spawn) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "vipd.sock"))
        mute.listen()
        # A run that was started in the background ignores ctrl-C, and would hand that down to vipctl.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        process = spawn("list")
        signal.signal(signal.SIGINT, before)
        connection, _ = mute.accept()
        with connection:
            connection.recv(1000)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, out) == (130, b"")
    assert err.strip() == b"vipctl: interrupted"


def on_terminal(spawn: Spawn, *words: str, errors: bool = False, **environment: str) -> str:
    """What a command line prints on a terminal of 80 columns; `errors`: on stderr."""
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = spawn(*words, **{"stderr" if errors else "stdout": terminal}, **environment)
    os.close(terminal)
    printed = b""
    try:
        while part := os.read(master, 65536):
            printed += part
    except OSError:
        pass  # EIO: the last writer has closed the terminal
    finally:
        os.close(master)
    process.wait(PATIENCE_SECONDS)
    return printed.decode().replace("\r\n", "\n")


def test_a_terminal_of_80_columns_holds_long_names_addresses_and_states(
    daemon: FakeDaemon, spawn: Spawn
) -> None:
    status = DNS["status"] | {"message": "1 draining, 1 disabled, 10 unhealthy"}
    ipv6 = [f | {"frontends": ["[fd00:96:aaaa:bbbb::52]:8443/tcp"]} for f in DNS["forwardings"][:1]]
    view = DNS | {"status": status, "forwardings": ipv6, "owner": "etcd:services/kube-system"}
    daemon.answer("GET /v1/services", {"services": [WEB, DNS]})
    header, web, dns = on_terminal(spawn, "list", NO_COLOR="").splitlines()
    assert max(map(len, (header, web, dns))) <= 80
    assert re.fullmatch("a-team.*….*frontend", web.split()[0]), "both ends of a name are kept"
    assert len(web.split()[0]) >= 16
    assert "10.96.0.10:53/udp +1" in dns
    daemon.answer("GET /v1/services", {"services": [view]})
    header, six = on_terminal(spawn, "list", NO_COLOR="").splitlines()
    assert max(map(len, (header, six))) <= 80
    assert "8443/tcp" in six


def test_a_terminal_of_80_columns_holds_events_with_their_cause(daemon: FakeDaemon, spawn: Spawn) -> None:
    causes = ("kernel", "process iptables (pid 812) of some-configurator (pid 800)", "")
    events = [event("override-taken-back", reason=LONG_EVENT, cause=cause, count=117) for cause in causes]
    daemon.answer("GET /v1/events", {"events": [*events, event()]})
    lines = on_terminal(spawn, "events", NO_COLOR="").splitlines()
    assert max(map(len, lines)) <= 80
    assert all("(x117)" in line and "…" in line for line in lines[:3])
    assert lines[0].endswith("; by kernel")
    assert lines[3].endswith("dns: affinity; by file dns.yaml:3")


LONG = "affinity of web, shop and mail: each backend's list remembers 100 clients, then forgets; hint: " * 2


def test_prose_is_wrapped_on_a_terminal_and_nowhere_else(
    daemon: FakeDaemon, spawn: Spawn, vipctl: Vipctl
) -> None:
    problem = f"/etc/vipd/services.d/{'x' * 80}.yaml:3: {LONG.strip()}"
    source = STATUS["sources"][0] | {"problems": [problem], "refused": []}
    daemon.answer("GET /v1/status", STATUS | {"warnings": [LONG.strip()], "sources": [source]})
    lines = on_terminal(spawn, "status", NO_COLOR="").splitlines()
    assert [len(line) > 80 for line in lines].count(True) == 1, "a path is never broken"
    assert "".join("".join(lines).split()).count("".join(LONG.split())) == 2
    assert any(line.startswith("    ") for line in lines), "further lines are indented"
    assert f"  {LONG.strip()}\n" in vipctl("status").out
    daemon.refuse("GET /v1/services/web", 404, "not-found", "no service web", hint=LONG.strip())
    lines = on_terminal(spawn, "describe", "web", errors=True).splitlines()
    assert lines[0].startswith("vipctl: no service web; hint: affinity of web")
    assert (len(lines) > 2, max(map(len, lines)) <= 80) == (True, True)


def test_a_reason_that_does_not_fit_stands_below_its_row(daemon: FakeDaemon, spawn: Spawn) -> None:
    first, *others = DNS["forwardings"]
    endpoints = [first["endpoints"][0] | {"reason": "a reason of several words that is too long " * 2}]
    daemon.answer(
        "GET /v1/services/dns", one(DNS | {"forwardings": [first | {"endpoints": endpoints}, *others]})
    )
    lines = on_terminal(spawn, "describe", "dns", NO_COLOR="").splitlines()
    (row,) = (number for number, line in enumerate(lines) if line.startswith("  10.244.0.5:53"))
    assert lines[row + 1].startswith("      a reason of several words")
    assert max(map(len, lines)) <= 80


def test_colour_is_for_terminals_without_no_color(daemon: FakeDaemon, spawn: Spawn) -> None:
    checked = DNS["status"] | {"state": "ok", "message": "", "unchecked": 0}
    daemon.answer("GET /v1/services", {"services": [DNS | {"status": checked}]})
    assert "\033[32mok\033[0m" in on_terminal(spawn, "list")
    assert "\033" not in on_terminal(spawn, "list", NO_COLOR="")
    assert "\033" not in on_terminal(spawn, "list", TERM="dumb")
    assert b"\033" not in spawn("list").communicate(timeout=PATIENCE_SECONDS)[0]
    poor = on_terminal(spawn, "list", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert len(poor.splitlines()) == 2, "a poor locale ends no table"
