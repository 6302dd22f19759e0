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

from tests.cli.conftest import ROOT, Spawn, Vipctl
from tests.cli.documents import DNS, RELOADED, STATUS, WEB, changed, one
from tests.cli.fake_daemon import FakeDaemon
from tests.cli.test_overrides import given
from vipd import __version__
from vipd.cli.main import VERB_GROUPS, VERBS

HEAVY = (
    "yaml",
    "pydantic",
    "aiohttp",
    "asyncio",
    "pyroute2",
    "http.client",
    "email",
    "vipd.host.settings.settings",
)

NOBODY = 65534
PATIENCE_SECONDS = 60.0


def test_help_shows_every_verb_in_its_family(vipctl: Vipctl) -> None:
    ended = vipctl()
    assert ended.code == 0
    assert ended.out == vipctl("-h").out == vipctl("--help").out
    assert max(map(len, ended.out.splitlines())) <= 80
    sections = ended.out.partition("Services:")[2]
    for family, verbs in VERB_GROUPS.items():
        section = sections if family == "Services" else sections.partition(f"\n{family}:")[2]
        listed = [line.split()[0] for line in section.partition("\n\n")[0].strip().splitlines()]
        assert listed == list(verbs)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(vipctl: Vipctl, verb: str) -> None:
    ended = vipctl(verb, "-h")
    assert ended.code == 0
    assert f"vipctl {verb}" in ended.out
    assert max(map(len, ended.out.splitlines())) <= 80
    assert ended.out == vipctl(verb, "--help").out


def test_tests_call_verbs_through_vipctl() -> None:
    """A command of click keeps the help option of its first call: `-h` is vipctl's, not its own."""
    called = re.compile(r"CliRunner\(\)\.invoke\((?!cli\b)\w+")
    files = (ROOT / "tests").rglob("*.py")
    assert [f"{file}: {found}" for file in files for found in called.findall(file.read_text())] == []


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["lits"], "did you mean list"),
        (["delete", "dns"], "did you mean remove?"),
        (["import", "x.yaml"], "did you mean apply or convert?"),
        (["config"], "did you mean edit or export?"),
        (["stop", "web"], "did you mean disable or drain?"),
        (["flush"], "did you mean cleanup?"),
        (["show", "web"], "did you mean describe?"),
        (["Lsit"], "did you mean list?"),
        (["port"], "vipctl -h lists the verbs"),
        (["help", "drian"], "did you mean drain?"),
        (["add", "--internal", "x"], "vipctl add -h"),
        (["zzz"], "vipctl -h lists the verbs"),
        (["list", "--no-header"], "did you mean --no-headers?"),
        (["list", "-o", "xml"], "vipctl list -h"),
        (["add"], "vipctl add VIP:80/tcp ADDR"),
        (["remove"], "vipctl remove -h"),
    ],
)
def test_wrong_usage_exits_2_with_a_way_out(vipctl: Vipctl, words: list[str], hint: str) -> None:
    ended = vipctl(*words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("vipctl: ")
    assert f"; hint: {hint}" in ended.err
    assert ended.err.count("\n") == 1


def test_help_is_a_verb_too(vipctl: Vipctl) -> None:
    assert vipctl("help") == vipctl("-h")
    for verb in ("drain", "add", "status"):
        assert vipctl("help", verb) == vipctl(verb, "-h")
    assert vipctl("help", verb).code == 0


def test_the_version_needs_no_daemon(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    assert vipctl("--version") == (0, f"vipctl {__version__}\n", "")
    assert daemon.requests == []


@pytest.mark.parametrize("changed", [True, False])
def test_set_dataplane_may_be_quiet(vipctl: Vipctl, daemon: FakeDaemon, changed: bool) -> None:
    daemon.answer("POST /v1/dataplane", {"changed": changed, "before": "iptables", "dataplane": "nftables"})
    assert vipctl("set-dataplane", "nftables", "-q") == (0, "", "")
    assert vipctl("set-dataplane", "nftables").out != ""


def test_a_line_is_in_the_pipe_as_soon_as_it_is_printed(spawn: Spawn, daemon: FakeDaemon) -> None:
    daemon.answer("POST /v1/overrides", given())
    daemon.answer("GET /v1/flows", {"flows": 3})
    process = spawn("drain", "web/10.0.0.1", "--wait")
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"draining web/10.0.0.1")
    assert process.poll() is None, "it still waits"


def test_no_daemon(vipctl: Vipctl, tmp_path: Path) -> None:
    ended = vipctl("list")
    assert (ended.code, ended.out) == (4, "")
    assert ended.err == (
        f"vipctl: cannot reach vipd at {tmp_path}/vipd.sock: No such file or directory; "
        "hint: systemctl status vipd, or give another socket with --socket\n"
    )


def test_a_socket_that_nobody_serves_any_more(vipctl: Vipctl, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "vipd.sock"))
    ended = vipctl("status")
    assert ended.code == 4
    assert "Connection refused; hint: systemctl status vipd" in ended.err


def test_somebody_else_listens(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answers["GET /v1/status"] = (200, None)
    ended = vipctl("status")
    assert ended.code == 4
    assert "no answer of vipd" in ended.err


def test_permission_denied_names_the_group() -> None:
    """Root is let in by every mode: there the program goes on as another user, once all is imported."""
    program = (
        "import grp, os, sys; from vipd.cli.main import run\n"
        "run(['--socket', '/nowhere', 'list'])\n"
        f"if os.geteuid() == 0: os.setgroups([]); os.setuid({NOBODY})\n"
        "sys.exit(run(sys.argv[1:]))"
    )
    with tempfile.TemporaryDirectory(prefix="vipd-test-") as place, socket.socket(socket.AF_UNIX) as server:
        path = Path(place, "s")
        server.bind(str(path))
        server.listen()
        path.chmod(0)
        Path(place).chmod(stat.S_IRWXU | stat.S_IXGRP | stat.S_IXOTH)
        ended = subprocess.run(
            [sys.executable, "-c", program, "--socket", str(path), "list"],
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        group = path.group()
    assert ended.returncode == 4, ended.stderr
    assert f"Permission denied; hint: run it as root, or as a member of the group {group}" in ended.stderr


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, "malformed", 1),
        (403, "forbidden", 4),
        (404, "not-found", 3),
        (409, "owned", 1),
        (500, "internal", 1),
        (503, "unavailable", 1),
    ],
)
def test_refusals_have_the_daemons_words_and_a_code(
    vipctl: Vipctl, daemon: FakeDaemon, status: int, kind: str, code: int
) -> None:
    daemon.refuse("DELETE /v1/services/dns", status, kind, "no", why="because", hint="do that")
    ended = vipctl("remove", "dns")
    assert ended.code == code
    assert ended.err == "vipctl: no: because; hint: do that\n"


def test_problems_come_as_lines_before_the_message(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.refuse("POST /v1/reload", 422, "invalid", "2 problems", problems=["a.yaml:1: x", "b.yaml:2: y"])
    ended = vipctl("reload")
    assert ended.code == 1
    assert ended.err == "a.yaml:1: x\nb.yaml:2: y\nvipctl: 2 problems\n"


def test_the_socket_may_be_named_before_or_after_the_verb(daemon: FakeDaemon, vipctl: Vipctl) -> None:
    daemon.answer("GET /v1/version", {"version": "9.9"})
    assert "vipd 9.9" in vipctl("version").out
    assert "vipd ?" in vipctl("version", "--socket", "/nowhere").out
    assert "vipd 9.9" in vipctl("--socket", "/nowhere", "version", "--socket", str(daemon.socket)).out


def test_the_environment_names_the_socket(daemon: FakeDaemon, spawn: Spawn) -> None:
    daemon.answer("GET /v1/version", {"version": "9.9"})
    out, err = spawn("version").communicate(timeout=PATIENCE_SECONDS)
    assert b"vipd 9.9" in out, err


@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["list", "-o", "json"],
        ["describe", "dns"],
        ["status"],
        ["version"],
        ["add", "10.96.0.10:53/udp", "10.244.0.5"],
        ["add-backend", "dns", "10.244.0.5"],
        ["reload"],
    ],
)
def test_verbs_that_ask_the_daemon_import_nothing_of_it(daemon: FakeDaemon, words: list[str]) -> None:
    daemon.answer("GET /v1/services", {"services": [DNS, WEB]})
    daemon.answer("GET /v1/services/dns", one(DNS))
    daemon.answer("GET /v1/status", STATUS)
    daemon.answer("GET /v1/version", {"version": "9.9"})
    for request in ("services", "services/dns/backends"):
        daemon.answer(f"POST /v1/{request}", changed(("created", "dns")))
    daemon.answer("POST /v1/reload", RELOADED)
    program = (
        "import sys; from vipd.cli.main import run; code = run(sys.argv[1:]); "
        f"print('loaded:', [name for name in {HEAVY!r} if name in sys.modules], code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, "--socket", str(daemon.socket), *words],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.stdout.splitlines()[-1:] == ["loaded: [] 0"], ended.stderr


def test_a_reader_that_goes_away_ends_it_in_silence(daemon: FakeDaemon, spawn: Spawn) -> None:
    daemon.answer("GET /v1/services", {"services": [DNS] * 3000})
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


def test_a_terminal_of_80_columns_holds_the_list(daemon: FakeDaemon, spawn: Spawn) -> None:
    daemon.answer("GET /v1/services", {"services": [WEB, DNS]})
    lines = on_terminal(spawn, "list", NO_COLOR="").splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= 80
    assert "10.96.0.10:53/udp +1" in lines[2]
    assert len(lines[2].split()[0]) >= 16


def test_a_terminal_of_80_columns_holds_long_names_and_a_long_status(
    daemon: FakeDaemon, spawn: Spawn
) -> None:
    status = DNS["status"] | {"message": "1 draining, 1 disabled, 10 unhealthy"}
    ipv6 = [f | {"frontends": ["[fd00:96:aaaa:bbbb::52]:8443/tcp"]} for f in DNS["forwardings"][:1]]
    view = DNS | {"status": status, "forwardings": ipv6, "owner": "etcd:services/kube-system"}
    daemon.answer("GET /v1/services", {"services": [view]})
    lines = on_terminal(spawn, "list", NO_COLOR="").splitlines()
    assert max(map(len, lines)) <= 80
    assert "8443/tcp" in lines[1]


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


def test_errors_are_wrapped_on_a_terminal(daemon: FakeDaemon, spawn: Spawn) -> None:
    daemon.refuse("GET /v1/services/web", 404, "not-found", "no service web", hint=LONG.strip())
    lines = on_terminal(spawn, "describe", "web", errors=True).splitlines()
    assert lines[0].startswith("vipctl: no service web; hint: affinity of web")
    assert len(lines) > 2
    assert max(map(len, lines)) <= 80


def test_a_poor_locale_ends_no_table(daemon: FakeDaemon, spawn: Spawn) -> None:
    daemon.answer("GET /v1/services", {"services": [WEB, DNS]})
    printed = on_terminal(spawn, "list", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert len(printed.splitlines()) == 3
    assert "?" in printed


def test_colour_is_for_terminals_without_no_color(daemon: FakeDaemon, spawn: Spawn) -> None:
    checked = DNS["status"] | {"state": "ok", "message": "", "unchecked": 0}
    daemon.answer("GET /v1/services", {"services": [DNS | {"status": checked}]})
    assert "\033[32mok\033[0m" in on_terminal(spawn, "list")
    assert "\033" not in on_terminal(spawn, "list", NO_COLOR="")
    assert "\033" not in on_terminal(spawn, "list", TERM="dumb")
    assert b"\033" not in spawn("list").communicate(timeout=PATIENCE_SECONDS)[0]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("host drian", "did you mean drain?"),
        ("list -o jsno", "did you mean json?"),
        ("host nonsense", "vipctl host -h"),
    ],
)
def test_a_word_that_is_almost_a_choice_is_hinted(vipctl: Vipctl, line: str, hint: str) -> None:
    done = vipctl(*line.split())
    assert done.code == 2
    assert done.err.endswith(f"; hint: {hint}\n")
