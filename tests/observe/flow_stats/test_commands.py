"""`vipctl stats`, `flows` and `top`, and their requests, of a daemon with real flows."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.observe.flow_stats.counted import PATIENCE_SECONDS, backends, service, vipctl_json, wait_for

pytestmark = pytest.mark.root

DECLARED = """\
- name: web
  address: [10.96.0.10, "fd00:96::10"]
  ports: [80/tcp, 80/udp]
  backends: [10.244.0.11, 10.244.0.12, "fd00:244::11"]
- {name: plain, address: 10.96.0.20, ports: [80/tcp], masquerade: hairpin, backends: [10.244.0.11]}
- {name: empty, address: 10.96.0.30, ports: [80/tcp]}
"""
PLAIN_TERMINAL = {"PATH": os.environ["PATH"], "TERM": "xterm", "LANG": "C.UTF-8"}


@pytest.fixture(scope="module")
def daemon(lab: Lab) -> Iterator[Daemon]:
    lab.host.sysctl("net.netfilter.nf_conntrack_acct", 1)
    with Daemon(lab.host, DECLARED) as made:
        yield made


def test_flows_are_those_that_the_client_has_open(lab: Lab, daemon: Daemon) -> None:
    with (
        lab.client.open("10.96.0.10", 80) as tcp,
        lab.client.open("10.96.0.10", 80, "udp") as udp,
        lab.client.open("fd00:96::10", 80) as six,
        lab.client.open("10.96.0.20", 80) as plain,
    ):
        answers = {"tcp": tcp.ask(), "udp": udp.ask(), "six": six.ask()}
        seen = plain.ask()
        listed = vipctl_json(daemon, "flows", "web")
        (direct,) = vipctl_json(daemon, "flows", "plain")["flows"]
    flows = {(flow["protocol"], flow["family"]): flow for flow in listed["flows"]}
    assert listed["total"] == len(listed["flows"]) == len(flows) == 3
    four, datagrams, six_told = (flows[key] for key in (("tcp", "ipv4"), ("udp", "ipv4"), ("tcp", "ipv6")))
    assert four["frontend"] == "10.96.0.10:80/tcp"
    assert four["backend"] == f"10.244.0.1{answers['tcp'].backend[1]}:80"
    assert (four["state"], datagrams["state"]) == ("ESTABLISHED", "REPLIED")
    assert datagrams["backend"] == f"10.244.0.1{answers['udp'].backend[1]}:80"
    assert (six_told["frontend"], six_told["backend"]) == ("[fd00:96::10]:80/tcp", "[fd00:244::11]:80")
    assert six_told["client"].startswith("[fd00:10::2]:")
    assert (four["masqueraded"], direct["masqueraded"]) == (True, False)
    assert direct["client"] == f"10.10.0.2:{seen.source_port}"
    assert four["packets_in"] >= 3
    assert four["bytes_out"] > 0
    assert 0 < four["timeout"] <= 5 * 86400
    assert four["age"] is None


def test_flows_are_filtered_and_cut(lab: Lab, daemon: Daemon) -> None:
    lab.client.send("10.96.0.10", 80, count=8, source="10.10.0.3").all_answered()
    with lab.client.open("10.96.0.10", 80) as flow:
        kept = flow.ask()

        def total(*options: str) -> int:
            return int(vipctl_json(daemon, "flows", *options)["total"])

        # Those that have just been closed may have to take their leave.
        established = ("10.96.0.10:80/tcp", "--state", "established")
        daemon.wait_until(lambda: total(*established), 1, PATIENCE_SECONDS)
        of_third = total("web", "--client", "10.10.0.3")
        assert of_third == 8
        assert total("web", "--client", "10.10.0.0/24") == total("web", "--client", "0.0.0.0/0") >= 9
        assert total("10.96.0.10:80/udp", "--state", "time-wait") == 0
        assert total(*established) == 1
        assert total("web", "--state", "ESTABLISHED", "--backend", f"10.244.0.1{kept.backend[1]}:80") == 1
        assert total("web", "--backend", "10.244.0.99") == 0
    cut = daemon.vipctl("flows", "web", "-n", "2")
    assert len(cut.stdout.splitlines()) == 3
    assert cut.stderr.startswith("2 of ")
    assert all(len(line) <= 80 for line in cut.stdout.splitlines())
    nothing = daemon.vipctl("flows", "empty")
    assert (nothing.stdout, nothing.stderr) == ("", "no flows\n")
    for options, code in ((("nowhere",), 3), (("web", "--client", "x"), 1), (("web", "--backend", "x"), 1)):
        assert daemon.vipctl("flows", *options, check=False).returncode == code
    assert daemon.get("conntrack")["error"]["kind"] == "malformed"
    assert daemon.get("conntrack?target=web&limit=0")["error"]["kind"] == "malformed"
    assert daemon.get("stats?services=web")["error"]["kind"] == "malformed"


def test_stats_are_of_all_services_or_one(lab: Lab, daemon: Daemon) -> None:
    before = service(daemon)
    # From an address of its own: a port that another test had would be that test's flow.
    lab.client.send("10.96.0.10", 80, "udp", count=6, source="10.10.0.4").all_answered()
    with lab.client.open("10.96.0.10", 80) as flow:
        flow.ask()
        # What connection tracking says is kept for some seconds.
        daemon.wait_until(lambda: service(daemon)["flows"] >= 7, True, PATIENCE_SECONDS)
        wait_for(daemon, before["new_flows"] + 7)
        after = vipctl_json(daemon, "stats")
        with_rate = vipctl_json(daemon, "stats", "web", "--rate", "1s")
    assert after["apiVersion"] == "vipd/v1"
    web = next(row for row in after["services"] if row["name"] == "web")
    assert [row["name"] for row in after["services"]] == ["empty", "plain", "web"]
    assert web["new_flows"] - before["new_flows"] == 7
    assert sum(backend["new_flows"] for backend in web["backends"]) == web["new_flows"]
    assert sum(backend["flows"] for backend in web["backends"]) == web["flows"] >= 7
    assert web["bytes_in"] > 0
    assert after["conntrack"]["accounting"] is True
    assert after["conntrack"]["entries"] >= 7
    (row,) = with_rate["services"]
    assert row["per_second"]["new_flows"] == 0
    assert row["backends"][0]["per_second"].keys() == {"new_flows", *row["per_second"]}
    table = daemon.vipctl("stats", "web", "-o", "wide").stdout.splitlines()
    assert table[0].split() == ["NAME", "NEW", "FLOWS", "PKTS", "IN", "IN", "PKTS", "OUT", "OUT"]
    assert table[1].split()[:2] == ["web", str(web["new_flows"])]
    assert {line.split()[0] for line in table[2:]} >= set(backends(daemon))
    assert len(daemon.vipctl("stats", "--no-headers").stdout.splitlines()) == 3
    assert daemon.vipctl("stats", "nowhere", check=False).returncode == 3
    lab.host.sysctl("net.netfilter.nf_conntrack_acct", 0)
    uncounted = daemon.vipctl("stats")
    assert uncounted.stdout.splitlines()[0].split() == ["NAME", "NEW", "FLOWS"]
    assert "nf_conntrack_acct=1" in uncounted.stderr
    assert service(daemon)["bytes_in"] is None


class Terminal:
    """A real terminal of 80x24 without colours, in which a shell runs; by tmux, on a server of its own."""

    def __init__(self, directory: Path) -> None:
        self._socket = str(directory / "tmux")
        self._tmux("-f", os.devnull, "new-session", "-d", "-x", "80", "-y", "24", "env", "-i", *self._shell())
        self.wait_for(lambda text: "here$" in text)

    def _shell(self) -> list[str]:
        return [*(f"{k}={v}" for k, v in PLAIN_TERMINAL.items()), "PS1=here$ ", "bash", "--norc"]

    def _tmux(self, *argv: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, *argv],
            capture_output=True,
            text=True,
            env=PLAIN_TERMINAL,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def text(self) -> str:
        return self._tmux("capture-pane", "-p")

    def wait_for(self, wanted: Callable[[str], object]) -> str:
        """Until the screen is as wanted; the screen."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not wanted(text := self.text()):
            assert time.monotonic() < end, f"the screen is not as wanted:\n{text}"
            time.sleep(0.1)
        return text

    def end(self) -> None:
        self._tmux("kill-server")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        for argv in (["apt-get", "update", "-qq"], ["apt-get", "install", "-qq", "-y", "tmux"]):
            subprocess.run(argv, capture_output=True, timeout=200, check=False)
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed and cannot be: apt install tmux")
    made = Terminal(tmp_path)
    try:
        yield made
    finally:
        made.end()


def row_of(text: str, name: str) -> list[str]:
    """A row of the table on a screen; empty while there is none."""
    return next((line.split() for line in text.splitlines() if line.startswith(f"{name} ")), [])


def test_top_in_a_plain_terminal(lab: Lab, daemon: Daemon, terminal: Terminal, tmp_path: Path) -> None:
    script = tmp_path / "top"
    command = lab.host.inside([sys.executable, "-m", "vipd.cli.main", "--socket", str(daemon.socket), "top"])
    script.write_text(f"stty -g\nexec {' '.join(command)}\n")

    def start() -> None:
        terminal.press(f"clear; bash {script}; echo ended=$?; stty -g", "Enter")

    start()
    text = terminal.wait_for(lambda text: row_of(text, "web") and "q quit" in text)
    lines = text.rstrip("\n").splitlines()
    assert len(lines) == 24
    assert lines[0].startswith("vipctl top: 3 services, ")
    assert lines[2].split()[:5] == ["SERVICE", "READY", "NEW/S", "NEW", "FLOWS"]
    assert lines[-1].startswith("q quit")
    before = service(daemon)["new_flows"]
    lab.client.send("10.96.0.10", 80, count=10).all_answered()
    terminal.wait_for(lambda text: row_of(text, "web")[3:4] == [str(before + 10)])
    terminal.press("N")
    by_name = re.compile("sorted by NAME.*^empty .*^web ", re.DOTALL | re.MULTILINE)
    terminal.wait_for(by_name.search)
    terminal.press("Down", "Down", "Enter")
    terminal.wait_for(lambda text: row_of(text, "10.244.0.11:80/udp"))
    terminal.press("Escape")
    terminal.wait_for(lambda text: row_of(text, "plain"))
    terminal.press("/", "p", "l", "Enter")
    terminal.wait_for(lambda text: row_of(text, "plain") and not row_of(text, "web"))
    terminal.resize(60, 12)
    terminal.wait_for(lambda text: "q quit" in "".join(text.splitlines()[11:12]) and row_of(text, "plain"))
    terminal.resize(80, 24)
    for key, code in (("q", 0), ("C-c", 130), ("", 128 + signal.SIGTERM)):
        ended_by(terminal, daemon, key, code)
        if key:
            start()


def test_top_in_a_batch(lab: Lab, daemon: Daemon) -> None:
    said = daemon.vipctl("top", "--batch", "-n", "2", "-d", "0.5").stdout
    first, second = said.split("\n\n")
    for text in (first, second):
        lines = text.splitlines()
        assert lines[0].startswith("vipctl top: 3 services, ")
        assert lines[2].split()[:3] == ["SERVICE", "READY", "NEW/S"]
        assert row_of(text, "web")[1].split("/")[0] == row_of(text, "web")[1].split("/")[1] != "0"
        assert row_of(text, "web")[2] != "-", "a rate, also the first time"
    assert first.splitlines()[0] != second.splitlines()[0], "the time differs"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch", "-d", "0"], "0 is no time to look again after"),
        (["--batch", "-d", "nan"], "nan is no time to look again after"),
        (["--batch", "-d", "100ms"], "0.2s to 3600s"),
        ([], "vipctl stats --rate"),
        (["-n", "3"], "-n needs --batch; hint: vipctl top --batch -n 3"),
    ],
)
def test_top_refuses_what_it_cannot_do(daemon: Daemon, words: list[str], said: str) -> None:
    refused = daemon.vipctl("top", *words, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert said in refused.stderr


def ended_by(terminal: Terminal, daemon: Daemon, key: str, code: int) -> None:
    """End top by a key, or by a signal if that is empty: the terminal must be as it was."""
    terminal.wait_for(lambda text: row_of(text, "plain"))
    if key:
        terminal.press(key)
    else:
        os.kill(pid_of(daemon), signal.SIGTERM)
    text = terminal.wait_for(lambda text: "ended=" in text and text.rstrip().endswith("here$"))
    lines = text.split()
    assert f"ended={code}" in lines
    settings = [word for word in lines if word.count(":") > 20]
    assert len(settings) == 2, text
    assert settings[0] == settings[1]
    terminal.press("tput cnorm; echo vis''ible", "Enter")
    terminal.wait_for(lambda text: "visible" in text)


def pid_of(daemon: Daemon) -> int:
    """The `vipctl top` of this daemon."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[-2:-1] == [b"top"] and str(daemon.socket).encode() in words and b"netns" not in words:
            return int(path.parent.name)
    raise AssertionError("no vipctl top runs")
