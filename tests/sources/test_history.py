"""The store's history: what it keeps, and how a change that is not confirmed is taken back."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.model.samples import service
from vipd.model.service import Backend, Service
from vipd.sources import confirmation, history, store
from vipd.sources.confirmation import Clocks, Confirmation
from vipd.sources.history import ChangeNote, Entry, ServiceChange
from vipd.sources.store import StoreError, StoreSource

START = datetime(2026, 1, 1, tzinfo=UTC)
A = service("a", "10.96.0.10", "10.244.0.5")
B = service("b", "10.96.0.11", "10.244.0.6")
A2 = replace(A, backends=(Backend("10.244.0.7"),))
WITHIN_A_MINUTE = ChangeNote("ann (pid 7)", "", 60)


@dataclass
class Machine:
    """A host's clocks, which a test sets."""

    time_of_day: datetime = START
    uptime: float = 1000.0
    boot: str = "first"

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: self.time_of_day, lambda: self.uptime, lambda: self.boot)

    def wait(self, seconds: float) -> None:
        self.time_of_day += timedelta(seconds=seconds)
        self.uptime += seconds

    def reboot(self) -> None:
        self.uptime, self.boot = 5.0, self.boot + "'"

    def start(self, directory: Path) -> StoreSource:
        """vipd starts: the store has read its files."""
        made = StoreSource(directory / "services.yaml", self.clocks)
        made.load()
        return made


@pytest.fixture
def machine() -> Machine:
    return Machine()


def holding(*services: Service) -> dict[str, Service]:
    return {each.name: each for each in services}


def summary_of(entry: Entry) -> tuple[int, str, str, str]:
    return entry.revision, entry.by, entry.reason, entry.summary()


def full_disk(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """From now on these files cannot be written; returns them, to be emptied when there is room again."""
    full = list(names)

    def wrapped(module: Any) -> None:
        write = module.write_durably

        def write_unless_full(path: Path, data: bytes) -> None:
            if path.name in full:
                raise OSError(28, "No space left on device")
            write(path, data)

        monkeypatch.setattr(module, "write_durably", write_unless_full)

    wrapped(history)
    wrapped(store)
    return full


class TestEntries:
    def test_each_change_is_an_entry_that_survives_a_restart(self, machine: Machine, tmp_path: Path) -> None:
        source = machine.start(tmp_path)
        source.save(holding(A), ChangeNote("ann (pid 7)"))
        machine.wait(5)
        source.save(holding(A2, B), ChangeNote("bob (pid 8)", "rollback to 0"))
        source.save(holding(B))
        for each in (source, machine.start(tmp_path)):
            assert [summary_of(entry) for entry in each.history.entries] == [
                (1, "ann (pid 7)", "", "a created"),
                (2, "bob (pid 8)", "rollback to 0", "a changed, b created"),
                (3, "", "", "a removed"),
            ]
            assert [entry.at for entry in each.history.entries[:2]] == [START, START + timedelta(seconds=5)]
            changes = each.changes_in(each.history.entries[1])
            assert [(change.name, *specs) for change, *specs in changes] == [("a", A, A2), ("b", None, B)]

    def test_what_changes_nothing_is_no_entry(self, machine: Machine, tmp_path: Path) -> None:
        source = machine.start(tmp_path)
        source.save(holding(A))
        source.save(holding(replace(A)))
        assert len(source.history.entries) == 1

    def test_it_leads_back_to_each_revision(self, machine: Machine, tmp_path: Path) -> None:
        source = machine.start(tmp_path)
        for services in (holding(A), holding(A2, B), holding(B), holding(A, B)):
            source.save(services)
        assert source.services_at(0) == {"a": None, "b": None}
        assert source.services_at(1) == {"a": A, "b": None}
        assert source.services_at(2) == {"a": A2}
        assert source.services_at(3) == {"a": None}
        assert source.services_at(4) == {}

    def test_it_is_bounded_in_number_and_bytes_but_keeps_the_newest(
        self, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(history, "MAX_ENTRIES", 3)
        source = machine.start(tmp_path)
        for number in range(5):
            source.save(holding(replace(A, backends=(Backend(f"10.244.1.{number}"),))))
        assert [entry.revision for entry in source.history.entries] == [3, 4, 5]
        assert (source.history.oldest, source.history.newest) == (2, 5)
        size = sum(len(entry.encoded) for entry in source.history.entries[1:])
        monkeypatch.setattr(history, "MAX_BYTES", size)
        source.save(holding(A))
        assert [entry.revision for entry in source.history.entries] == [4, 5, 6]
        monkeypatch.setattr(history, "MAX_BYTES", 10)
        source.save(holding(B))
        assert [entry.revision for entry in machine.start(tmp_path).history.entries] == [7]

    def test_many_changes_of_one_user_leave_those_of_others(
        self, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(history, "MAX_ENTRIES", 5)
        source, ann, bob = machine.start(tmp_path), ChangeNote("ann (pid 7)"), ChangeNote("bob (pid 9)")
        source.save(holding(B), bob)
        for number in range(20):
            flooded = replace(A, backends=(Backend(f"10.244.1.{number}"),))
            source.save(holding(B, flooded), replace(ann, by=f"ann (pid {number})"))
        for kept in (source.history, machine.start(tmp_path).history):
            assert [entry.revision for entry in kept.entries] == [1, 18, 19, 20, 21]
            assert kept.entries[0].by == "bob (pid 9)"
            # What became one leads back to what was before the first of it.
            assert [(c.name, c.before) for c in kept.entries[1].changes()] == [("a", None)]
            assert (kept.oldest, kept.entries[1].before) == (0, 1)
        assert source.services_at(1) == {"a": None}
        assert source.services_at(18)["a"] == replace(A, backends=(Backend("10.244.1.16"),))

    def test_a_summary_names_some_services_and_counts_the_rest(self) -> None:
        changes = [ServiceChange(f"s{n}", None, "x") for n in range(200)]
        entry = Entry.of(1, START, ChangeNote(), changes)
        assert len(entry.names) == history.NAMES_KEPT
        assert entry.actions == {"created": 200}
        assert entry.summary().endswith("s9 created and 190 more")

    def test_texts_of_others_are_one_line(self) -> None:
        entry = Entry.of(1, START, ChangeNote("x\ny\x1b[31m" + "z" * 1000), [])
        assert entry.by.isprintable()
        assert len(entry.by) == history.MAX_TEXT


class TestFullDisk:
    @pytest.mark.parametrize("name", ["history.jsonl", "services.yaml"])
    def test_it_refuses_the_change_and_loses_none(
        self, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        source = machine.start(tmp_path)
        source.save(holding(A))
        full = full_disk(monkeypatch, name)
        with pytest.raises(StoreError, match=f"{name}: cannot be written: No space left"):
            source.save(holding(B), WITHIN_A_MINUTE)
        for each in (source, machine.start(tmp_path)):
            assert dict(each.services) == holding(A)
            assert [entry.revision for entry in each.history.entries] == [1]
            assert each.seconds_to_confirm() is None
        full.clear()
        source.save(holding(B))
        assert [summary_of(entry)[3] for entry in machine.start(tmp_path).history.entries] == [
            "a created",
            "a removed, b created",
        ]

    def test_it_does_not_keep_an_unconfirmed_change(
        self, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = machine.start(tmp_path)
        source.save(holding(A))
        source.save(holding(A2, B), WITHIN_A_MINUTE)
        full = full_disk(monkeypatch, "history.jsonl", "services.yaml")
        machine.wait(60)
        assert source.take_back_due() == {"a": "changed", "b": "removed"}
        for _ in range(2):
            with pytest.raises(StoreError, match="No space left"):
                source.save_taken_back()
        with pytest.raises(StoreError, match="No space left"):
            source.save(holding(B))
        assert dict(source.services) == holding(A)
        again = machine.start(tmp_path)
        assert again.take_back_due(), "a restart does it again"
        assert dict(again.services) == holding(A)
        full.clear()
        source.save_taken_back()
        assert not source.unsaved
        after = machine.start(tmp_path)
        assert dict(after.services) == holding(A)
        assert after.seconds_to_confirm() is None
        assert len(after.history.entries) == 3

    def test_it_leaves_a_change_unconfirmed(
        self, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = machine.start(tmp_path)
        source.save(holding(A), WITHIN_A_MINUTE)
        full = full_disk(monkeypatch, "history.jsonl")
        with pytest.raises(StoreError, match="No space left"):
            source.confirm()
        assert source.seconds_to_confirm() == 60
        full.clear()
        assert source.confirm().revision == 1
        assert machine.start(tmp_path).seconds_to_confirm() is None


class TestCrash:
    def test_between_history_and_file_the_change_was_not_accepted(
        self, machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        source = machine.start(tmp_path)
        source.save(holding(A))
        before = (tmp_path / "services.yaml").read_bytes()
        source.save(holding(A2, B), WITHIN_A_MINUTE)
        (tmp_path / "services.yaml").write_bytes(before)
        with caplog.at_level(logging.WARNING):
            again = machine.start(tmp_path)
        assert "revision 2 was not stored, as vipd ended before" in caplog.text
        assert [entry.revision for entry in again.history.entries] == [1]
        assert again.seconds_to_confirm() is None
        again.save_taken_back()
        caplog.clear()
        machine.start(tmp_path)
        assert not caplog.records, "the file has that too"

    def test_a_change_that_was_taken_back_stays_so(self, machine: Machine, tmp_path: Path) -> None:
        source = machine.start(tmp_path)
        source.save(holding(A))
        source.save(holding(A2, B), WITHIN_A_MINUTE)
        unconfirmed = (tmp_path / "services.yaml").read_bytes()
        machine.wait(60)
        source.take_back_due()
        source.save_taken_back()
        (tmp_path / "services.yaml").write_bytes(unconfirmed)
        again = machine.start(tmp_path)
        assert dict(again.services) == holding(A)
        assert again.unsaved
        again.save_taken_back()
        assert b"name: b" not in (tmp_path / "services.yaml").read_bytes()
        assert [summary_of(entry)[2] for entry in again.history.entries][2:] == [
            "takes back 2: not confirmed within 1m"
        ]

    def test_a_later_change_does_not_bring_back_what_was_taken_back(
        self, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class CrashError(BaseException):
            pass

        def crash(*_: object) -> None:
            raise CrashError

        source = machine.start(tmp_path)
        source.save(holding(A))
        source.save(holding(A2), WITHIN_A_MINUTE)
        machine.wait(60)
        source.take_back_due()
        with monkeypatch.context() as patched:
            patched.setattr(store, "write_durably", crash)
            with pytest.raises(CrashError):
                source.save(holding(A, B))
        assert dict(machine.start(tmp_path).services) == holding(A)

    def test_a_damaged_file_of_the_store_drops_no_entry(self, machine: Machine, tmp_path: Path) -> None:
        machine.start(tmp_path).save(holding(A))
        (tmp_path / "services.yaml").write_text("nonsense")
        (tmp_path / "services.yaml.last-good").unlink()
        source = machine.start(tmp_path)
        assert source.faults()
        assert [entry.revision for entry in source.history.entries] == [1]
        assert not source.unsaved


class TestConfirmation:
    def test_confirmed_in_time_it_stays(self, machine: Machine, tmp_path: Path) -> None:
        source = machine.start(tmp_path)
        source.save(holding(A), WITHIN_A_MINUTE)
        machine.wait(59)
        assert source.take_back_due() == {}
        assert source.seconds_to_confirm() == 1
        source.confirm()
        machine.wait(3600)
        for each in (source, machine.start(tmp_path)):
            assert each.take_back_due() == {}
            assert dict(each.services) == holding(A)

    def test_the_log_and_the_history_say_who_and_why(
        self, machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        source = machine.start(tmp_path)
        source.save(holding(A), WITHIN_A_MINUTE)
        machine.wait(61)
        source.take_back_due()
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert record.getMessage() == (
            "revision 1 by ann (pid 7) is taken back: not confirmed within 1m: a removed"
        )
        assert summary_of(source.history.entries[-1]) == (
            2,
            "vipd",
            "takes back 1: not confirmed within 1m",
            "a removed",
        )
        assert source.history.entries[-1].takes_back

    def test_it_is_seen_with_its_services_alone(self, machine: Machine, tmp_path: Path) -> None:
        source = machine.start(tmp_path)
        source.save(holding(A))
        source.save(holding(A, B), WITHIN_A_MINUTE)
        machine.wait(17.5)
        view = {"revision": 2, "until": "2026-01-01T00:01:00Z", "seconds_left": 43}
        for each in (source, machine.start(tmp_path)):
            assert each.confirmation_view() == view
            assert each.confirmation_view("b") == view
            assert each.confirmation_view("a") is None

    @pytest.mark.parametrize("jump", [timedelta(days=-400), timedelta(days=400)])
    def test_setting_the_time_of_day_changes_nothing(
        self, machine: Machine, tmp_path: Path, jump: timedelta
    ) -> None:
        source = machine.start(tmp_path)
        source.save(holding(A), WITHIN_A_MINUTE)
        machine.time_of_day += jump
        for each in (source, machine.start(tmp_path)):
            assert each.take_back_due() == {}
            assert each.seconds_to_confirm() == 60
        machine.wait(60)
        for each in (source, machine.start(tmp_path)):
            assert each.take_back_due() == {"a": "removed"}

    def test_a_reboot_does_not_lengthen_it(self, machine: Machine, tmp_path: Path) -> None:
        machine.start(tmp_path).save(holding(A), WITHIN_A_MINUTE)
        machine.wait(20)
        machine.reboot()
        source = machine.start(tmp_path)
        assert source.seconds_to_confirm() == 40
        machine.time_of_day -= timedelta(days=1)
        assert source.seconds_to_confirm() == 40, "the uptime counts again"
        machine.uptime += 40
        assert source.take_back_due()

    @pytest.mark.parametrize("clock", [timedelta(seconds=60), timedelta(days=-1), timedelta(days=9000)])
    def test_after_a_reboot_a_time_that_is_over_or_cannot_be_right_takes_it_back(
        self, machine: Machine, tmp_path: Path, clock: timedelta
    ) -> None:
        machine.start(tmp_path).save(holding(A), WITHIN_A_MINUTE)
        machine.reboot()
        machine.time_of_day = START + clock
        source = machine.start(tmp_path)
        assert source.take_back_due() == {"a": "removed"}
        assert dict(source.services) == {}

    def test_without_a_boot_id_the_time_of_day_counts(self, machine: Machine, tmp_path: Path) -> None:
        machine.boot = ""
        machine.start(tmp_path).save(holding(A), WITHIN_A_MINUTE)
        machine.wait(20)
        assert machine.start(tmp_path).seconds_to_confirm() == 40

    def test_this_hosts_clocks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        clocks = Clocks()
        assert len(clocks.boot_id()) == 36
        assert clocks.uptime() > 0
        assert Confirmation.begin(1, 60, clocks).seconds_left(clocks) <= 60
        monkeypatch.setattr(confirmation, "_BOOT_ID", tmp_path / "none")
        assert clocks.boot_id() == ""


HEAD = '{"format": 1, "confirmation": null}\n'
ENTRY = '{"revision": 1, "at": "2026-01-01T00:00:00+00:00", "by": "x", "reason": ""}\n'
SERVICE = '{"name": "a", "before": null, "after": "x"}\n'
WAITS = '{"revision": 1, "seconds": 60, "until": "2026-01-01T00:01:00+00:00", "boot_id": "", "deadline": 1}'
DAMAGED = {
    "no text": "\xff",
    "empty": "",
    "another format": HEAD.replace("1", "2"),
    "no object": "[]\n",
    "cut": (HEAD + ENTRY + SERVICE)[:-9],
    "deep": "[" * 100_000 + "\n",
    "a service without a change": HEAD + SERVICE,
    "a change twice": HEAD + ENTRY + ENTRY,
    "a revision that is no number": HEAD + ENTRY.replace("1", '"1"', 1),
    "a negative revision": HEAD + ENTRY.replace("1", "-1", 1),
    "no time": HEAD + ENTRY.replace("2026-01-01T00:00:00+00:00", "x"),
    "nobody": HEAD + ENTRY.replace('"x"', "1"),
    "a service that does not differ": HEAD + ENTRY + SERVICE.replace("null", '"x"'),
    "a service without a name": HEAD + ENTRY + SERVICE.replace('"a"', "7"),
    "a text that is none": HEAD + ENTRY + SERVICE.replace('"x"', "7"),
    "a confirmation of nothing": HEAD.replace("null", WAITS),
    "a confirmation without a time": HEAD.replace("null", WAITS.replace("60", "0")) + ENTRY + SERVICE,
    "an endless confirmation": HEAD.replace("null", WAITS.replace(": 1}", ": NaN}")) + ENTRY + SERVICE,
    "a confirmation without an end": HEAD.replace("null", '{"revision": 1}') + ENTRY + SERVICE,
    "a confirmed service that is none": (
        HEAD.replace("null", WAITS) + ENTRY + SERVICE.replace("null", '"  - {name: a}"')
    ),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_history_is_named_and_left_alone_until_it_is_moved(
    machine: Machine, tmp_path: Path, content: str
) -> None:
    path = tmp_path / "history.jsonl"
    machine.start(tmp_path).save(holding(A))
    path.write_text(content, encoding="latin-1")
    source = machine.start(tmp_path)
    (fault,) = source.faults()
    assert fault.startswith(f"{path}: ")
    assert "hint: move it aside, then vipctl reload" in fault
    assert dict(source.services) == holding(A), "what serves does not depend on it"
    assert source.take_back_due() == {}
    with pytest.raises(StoreError, match="move it aside"):
        source.save({})
    assert path.read_text(encoding="latin-1") == content
    path.rename(tmp_path / "aside")
    source.reload()
    assert source.faults() == ()
    source.save({})
    assert [summary_of(entry)[3] for entry in source.history.entries] == ["a removed"]


def test_what_is_written_is_read_again_as_the_same(machine: Machine, tmp_path: Path) -> None:
    source = machine.start(tmp_path)
    source.save(holding(A, replace(B, name="shop/b")), WITHIN_A_MINUTE)
    lines = (tmp_path / "history.jsonl").read_bytes().splitlines()
    assert [json.loads(line).get("name") for line in lines] == [None, None, "a", "shop/b"]
    again = machine.start(tmp_path)
    assert again.history.entries == source.history.entries
    assert again.history.confirmation == source.history.confirmation
