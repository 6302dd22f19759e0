"""Log records as entries of the journal, sent to a real datagram socket."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.host.systemd.manager import Journal, read_entry, unit
from tests.lab.waiting import wait_until
from tests.model.samples import block
from vipd.host.systemd import journal as journal_module
from vipd.host.systemd.fields import Event, fields
from vipd.host.systemd.journal import (
    JournalHandler,
    StreamFormatter,
    priority,
    stderr_handler,
    stream_is_journal,
)

log = logging.getLogger("vipd.test_journal")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path / "socket")
    yield made
    made.close()


@pytest.fixture
def handler(journal: Journal, tmp_path: Path) -> Iterator[JournalHandler]:
    """What `log` is told goes to the journal."""
    made = JournalHandler("vipd", tmp_path / "socket")
    log.addHandler(made)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    yield made
    log.removeHandler(made)
    log.propagate = True
    made.close()


@pytest.mark.usefixtures("handler")
def test_a_record_is_an_entry_with_its_fields(journal: Journal) -> None:
    extra = fields(
        Event.SERVICE_CHANGED, service="dns", backend=["10.0.0.1", "10.0.0.2"], unit="file:/x.yaml"
    )
    log.warning("service %s changed", "dns", extra=extra)
    wait_until(lambda: journal.entries, "an entry")
    assert journal.entries == [
        {
            "MESSAGE": ["service dns changed"],
            "PRIORITY": ["4"],
            "SYSLOG_IDENTIFIER": ["vipd"],
            "VIPD_EVENT": ["service-changed"],
            "VIPD_SERVICE": ["dns"],
            "VIPD_BACKEND": ["10.0.0.1", "10.0.0.2"],
            "VIPD_UNIT": ["file:/x.yaml"],
        }
    ]


@pytest.mark.usefixtures("handler")
def test_of_one_authors_flood_a_share_is_logged_and_all_of_others(journal: Journal) -> None:
    for number in range(journal_module.AUTHOR_RECORDS + 500):
        unit = f"etcd:/vipd/v1/services/loud/s{number}"
        log.info("loud", extra=fields(Event.SERVICE_CHANGED, service=f"s{number}", unit=unit))
    log.info("quiet", extra=fields(Event.SERVICE_ADDED, unit="etcd:/vipd/v1/services/quiet/s"))
    log.info("nobody's", extra=fields(Event.RULES_APPLIED))
    wait_until(lambda: journal.entries and journal.entries[-1]["MESSAGE"] == ["nobody's"], "the last entry")
    messages = Counter(entry["MESSAGE"][0] for entry in journal.entries)
    assert messages.pop("loud") == journal_module.AUTHOR_RECORDS
    left_out = (
        "etcd:/vipd/v1/services/loud/: 2000 log records within 30 s: further ones are left out until then"
    )
    assert messages == {left_out: 1, "quiet": 1, "nobody's": 1}


@pytest.mark.usefixtures("handler")
def test_no_value_forges_a_field_and_all_can_be_printed(journal: Journal) -> None:
    evil = "a\nPRIORITY=0\nVIPD_SERVICE=other\n"
    odd = os.fsdecode(b"/etc/\xff.yaml")
    log.error("%s", evil, extra=fields(Event.DECLARATION_REFUSED, unit=f"file:{odd}{evil}", service="\n"))
    try:
        raise ValueError("it is wrong")
    except ValueError:
        log.exception("reconciling failed")
    wait_until(lambda: len(journal.entries) == 2, "both entries")
    forged, traced = journal.entries
    shown = evil.replace("\n", "\\n")
    assert forged["MESSAGE"] == [shown]
    assert forged["PRIORITY"] == ["3"]
    assert forged["VIPD_UNIT"] == [rf"file:/etc/\udcff.yaml{shown}"]
    assert forged["VIPD_SERVICE"] == ["\\n"]
    (text,) = traced["MESSAGE"]
    assert text.startswith(r"reconciling failed\nTraceback")
    assert text.endswith("ValueError: it is wrong")


@pytest.mark.usefixtures("handler")
def test_what_no_datagram_holds_goes_as_a_sealed_file(journal: Journal) -> None:
    large = "words " * 400_000
    log.info("%s", large, extra=fields(Event.RELOADED, service="dns"))
    log.info("small")
    wait_until(lambda: len(journal.entries) == 2, "both entries")
    assert journal.entries[0]["MESSAGE"] == [large]
    assert journal.entries[0]["VIPD_SERVICE"] == ["dns"]
    assert journal.entries[1]["MESSAGE"] == ["small"]


@pytest.mark.usefixtures("handler")
def test_without_the_journal_it_goes_to_stderr(
    journal: Journal, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "socket").rename(tmp_path / "away")
    log.error("two\nlines", extra=fields(Event.APPLY_FAILED))
    assert capfd.readouterr().err == "<3>two\\nlines\n"
    (tmp_path / "away").rename(tmp_path / "socket")
    log.error("back")
    wait_until(lambda: journal.entries, "an entry after the journal came back")


def test_a_journal_that_does_not_read_delays_nobody_and_gets_all_later(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vipd.host.systemd.journal.BACKLOG_RECORDS", 500)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unread:
        unread.bind(str(tmp_path / "socket"))
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        handler = JournalHandler("vipd", tmp_path / "socket")
        try:
            for number in range(2000):
                handler.handle(logging.makeLogRecord({"msg": f"{number} {'x' * 200}", "levelno": 20}))
            unread.settimeout(60)
            told: list[str] = []
            while not told or "lost" not in told[-1]:
                (text,) = read_entry(unread.recv(1 << 16))["MESSAGE"]
                told.append(text.split()[0] if "lost" not in text else text)
            handler.handle(logging.makeLogRecord({"msg": "afterwards", "levelno": 20}))
            assert read_entry(unread.recv(1 << 16))["MESSAGE"] == ["afterwards"]
        finally:
            handler.close()
    numbers = [int(number) for number in told[:-1]]
    assert numbers == sorted(set(numbers)), "in order"
    assert numbers[:500] == list(range(500))
    assert told[-1] == f"{2000 - len(numbers)} log records are lost: nobody read the log"
    assert capfd.readouterr().err == ""


LOGGING = """
import logging, sys
from vipd.host.systemd.journal import stderr_handler
logging.basicConfig(level=20, handlers=[stderr_handler({}, "vipd")])
for number in range(5000):
    logging.getLogger("vipd").info("%d %s", number, "x" * 200)
print("done", flush=True)
sys.stdin.read()
"""


def test_a_reader_of_stderr_that_stands_still_delays_nobody() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", LOGGING], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdin is not None
        try:
            assert select.select([process.stdout], [], [], 60)[0], "it waits for whoever reads stderr"
            lines = [process.stderr.readline().split() for _ in range(5000)]
        finally:
            process.kill()
    assert [int(line[3]) for line in lines] == list(range(5000))


def test_the_stream_must_be_the_one_that_is_named(tmp_path: Path) -> None:
    """Without the socket there are priorities, and without systemd the time."""
    levels = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}
    assert {name: priority(getattr(logging, name)) for name in levels} == levels
    with (tmp_path / "log").open("w") as file:
        status = os.fstat(file.fileno())
        mine = f"{status.st_dev}:{status.st_ino}"
        assert stream_is_journal({"JOURNAL_STREAM": mine}, file.fileno())
        assert not stream_is_journal({"JOURNAL_STREAM": f"{status.st_dev}:1"}, file.fileno())
        assert not stream_is_journal({}, file.fileno())
    assert not stream_is_journal({"JOURNAL_STREAM": mine}, 9999)
    status = os.fstat(2)
    stream = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
    assert isinstance(stderr_handler(stream, "vipd", tmp_path / "none").formatter, StreamFormatter)
    assert isinstance(stderr_handler({"JOURNAL_STREAM": "1:1"}, "vipd").formatter, StreamFormatter)
    plain = stderr_handler({}, "vipd").formatter
    assert plain is not None
    assert not isinstance(plain, StreamFormatter)
    assert plain.usesTime()


@pytest.mark.root
def test_the_daemon_writes_entries_by_which_a_service_is_found() -> None:
    with unit() as node:
        directory = node.root / "journal"
        directory.mkdir()
        journal = Journal(directory / "socket")
        try:
            (node.root / "log").touch()
            found = (node.root / "log").stat()
            node.environment["JOURNAL_STREAM"] = f"{found.st_dev}:{found.st_ino}"
            node.journal_directory = directory
            node.declare("dns.yaml", block("10.96.0.10", "dns", "10.244.0.5"))
            node.tools.set("refused", "10.244.0.66\n")
            node.start()
            node.declare("bad.yaml", block("10.96.0.11", "bad", "10.244.0.66"))
            wait_until(lambda: journal.about("VIPD_EVENT", "service-quarantined"), "the quarantine")
            (added, quarantined) = journal.about("VIPD_SERVICE", "bad")
            assert added["VIPD_EVENT"] == ["service-added"]
            assert added["MESSAGE"] == [
                f"service bad added: 1 backend, 1 unchecked; by file {node.services_dir}/bad.yaml:3"
            ]
            assert quarantined["PRIORITY"] == ["3"]
            assert node.log() == "", "an entry must not be there twice"
        finally:
            journal.close()


@pytest.mark.parametrize("environment", [{}, {"JOURNAL_STREAM": "1:2"}])
def test_a_value_ends_no_record_on_stderr(
    environment: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    handler = stderr_handler(environment, "vipd")
    evil = "x\n2026-01-01 00:00:00,000 ERROR forged\x1b[2J\u202e\r"
    record = logging.LogRecord("vipd", logging.ERROR, "", 0, "%s", (evil,), None)
    try:
        raise ValueError(evil)
    except ValueError:
        record.exc_info = sys.exc_info()
    handler.handle(record)
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert said.removesuffix("\n").isprintable()
    assert r"forged\x1b[2J\u202e\r" in said
