"""Runs the first minute with vipd: real programs in network namespaces, recorded as a terminal shows them.

Somebody types on three machines. The commands, what they print and how long that takes are real; the prompts,
the speed of typing and the pauses for reading are made here.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.docs.page_lab import PageLab
from tests.docs.pictures.cast import Output, Recording
from tests.docs.transcript import HOST, Step

WIDTH, HEIGHT = 106, 23
IDLE_LIMIT = 3.0
STEP_SECONDS = 90.0
KEY, BEFORE_ENTER, READING = 0.04, 0.4, 1.2
"""Seconds from key to key, before enter, and for reading what was printed."""
COUNTED = "for i in $(seq 90); do curl -s 10.96.0.10; done | sort | uniq -c"


@dataclass(frozen=True, slots=True)
class Typed:
    machine: str
    command: str
    root: bool = True
    until: str = ""
    """It goes on until it has printed this, and then gets ctrl-C."""

    @property
    def prompt(self) -> str:
        return f"{self.machine}{'#' if self.root else '$'} "


STEPS = (
    Typed(HOST, "vipd --set dataplane=nftables 2>vipd.log &"),
    Typed(
        HOST,
        "vipctl add 10.96.0.10:80/tcp 10.244.0.11:8080 10.244.0.12:8080 10.244.0.13:8080 \\\n"
        "    --name web --check http:/",
    ),
    Typed("client", "curl 10.96.0.10", root=False),
    Typed("client", COUNTED, root=False),
    Typed("b1", "kill $(cat b1.pid)    # the web server of b1 dies"),
    Typed(HOST, "vipctl events -f -n 0", until="unhealthy"),
    Typed("client", COUNTED, root=False),
    Typed(HOST, "vipctl describe web"),
)

VARIES = (r"\d+ b[123] answers", r"b[123] answers", r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d", r"\d+s")
"""What is different in each run, besides what differs in every transcript."""


def record() -> Recording:
    """The first minute, run now. Needs root."""
    with PageLab() as lab:
        code, said = lab.run(Step("session", HOST, True, "systemctl stop vipd", ()))
        assert code == 0, said
        recorder = _Recorder(lab)
        with recorder.terminal():
            for step in STEPS:
                recorder.perform(step)
            recorder.prompt(STEPS[-1])
    return Recording(WIDTH, HEIGHT, IDLE_LIMIT, tuple(recorder.outputs))


class _Recorder:
    """Types, and listens to the programs' terminal. All times are those of the run."""

    def __init__(self, lab: PageLab) -> None:
        self._lab = lab
        self._start = time.monotonic()
        self._listening, self._printing = -1, -1
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.outputs: list[Output] = []

    @contextmanager
    def terminal(self) -> Iterator[None]:
        """A terminal on which the programs of all steps print."""
        self._listening, self._printing = pty.openpty()
        fcntl.ioctl(self._printing, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
        try:
            yield
        finally:
            os.close(self._printing)
            os.close(self._listening)

    def show(self, text: str) -> None:
        self.outputs.append(Output(time.monotonic() - self._start, text))

    def prompt(self, step: Typed) -> None:
        self.show(f"\x1b[36m{step.prompt}\x1b[0m")

    def perform(self, step: Typed) -> None:
        self.prompt(step)
        time.sleep(BEFORE_ENTER)
        for number, line in enumerate(step.command.split("\n")):
            if number:
                self.show("\r\n> ")
            for character in line:
                time.sleep(KEY)
                self.show(character)
        time.sleep(BEFORE_ENTER)
        self.show("\r\n")
        self._run(step)
        time.sleep(READING)

    def _run(self, step: Typed) -> None:
        # Without a terminal to control it: what goes on in the background gets no SIGHUP when its shell ends.
        process = subprocess.Popen(
            self._lab.inside(step.machine, step.root, f"cd {self._lab.directory}; {step.command}"),
            stdin=subprocess.DEVNULL,
            stdout=self._printing,
            stderr=self._printing,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": str(WIDTH)},
            process_group=0,
        )
        try:
            self._listen(process, step)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _listen(self, process: subprocess.Popen[bytes], step: Typed) -> None:
        printed, end = "", time.monotonic() + STEP_SECONDS
        while True:
            ended = process.poll() is not None
            # What comes without a pause is one piece, so that no control sequence is cut in two.
            if text := "".join(iter(self._printed, "")):
                self.show(text)
                printed += text
            if ended:
                break
            assert time.monotonic() < end, f"{step.command}: does not end; it printed {printed!r}"
            if step.until and step.until in printed:
                time.sleep(READING)
                self.show("^C\r\n")
                os.killpg(process.pid, signal.SIGINT)
                process.wait(STEP_SECONDS)
        assert step.until in printed, f"{step.command}: ended, and printed {printed!r}"

    def _printed(self) -> str:
        """What programs have printed; empty when there was nothing for a moment."""
        ready, _, _ = select.select([self._listening], [], [], 0.02)
        return self._decoder.decode(os.read(self._listening, 65536)) if ready else ""
