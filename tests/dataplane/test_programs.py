"""Programs that are missing, cannot be run or hang: what is said, and that they are found again."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.dataplane.declared import Machine, numbered
from tests.dataplane.iptables.fake_kernel import FakeKernel
from tests.dataplane.namespace import Namespace
from vipd.dataplane import programs
from vipd.dataplane.base import ApplyError, MissingProgramError
from vipd.dataplane.iptables.names import ChainId
from vipd.dataplane.iptables.tools import Tools, list_chain
from vipd.dataplane.nftables.tools import apply_transaction, check_transaction, find_nft
from vipd.dataplane.programs import finish
from vipd.dataplane.registry import resolve_dataplane
from vipd.host.process import ProgramResult, ProgramTimeoutError, Runner
from vipd.host.settings.settings import Settings
from vipd.model.service import Family

ONE = numbered(1, "10.244.0.1")
TWO = numbered(1, "10.244.0.2")
FAULTS: tuple[tuple[Exception, str], ...] = (
    (FileNotFoundError(errno.ENOENT, "x"), r"cannot be run: there is no such program; hint: apt install nft"),
    (PermissionError(errno.EACCES, "denied"), r"cannot be run: denied; hint: .*chmod 755"),
    (OSError(errno.EMFILE, "x"), r"cannot be run: vipd is out of file descriptors; hint: .*LimitNOFILE="),
    (OSError(errno.ENFILE, "x"), r"cannot be run: this host is out of file descriptors; hint: .*file-max"),
    (BlockingIOError(errno.EAGAIN, "Try again"), r"cannot be run: Try again; hint: .*TasksMax="),
    (OSError(errno.ENOEXEC, "Exec format error"), r"cannot be run: Exec format error; hint: .*install"),
    (OSError("odd"), r"cannot be run: odd; hint: vipd tries again"),
    (ProgramTimeoutError("nft", 25), r"hangs: nft did not end within 25 s and was killed; hint: see dmesg"),
    (RuntimeError("no new thread"), r"cannot be run: RuntimeError: no new thread; hint: "),
)


def failing(error: Exception) -> Runner:
    """Programs none of which can be run."""

    async def run(argv: Sequence[str], stdin: str) -> ProgramResult:
        raise error

    return run


@pytest.mark.parametrize(("error", "said"), FAULTS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize(
    "use",
    [
        find_nft,
        lambda run: apply_transaction("x", run),
        lambda run: check_transaction("x", run),
        lambda run: finish(["nft"], "", run),
    ],
    ids=("find", "transact", "rehearse", "finish"),
)
def test_whatever_keeps_a_program_from_its_work_names_it_with_reason_and_hint(
    error: Exception, said: str, use: Callable[[Runner], object]
) -> None:
    with pytest.raises(ApplyError, match=f"^nft {said}") as raised:
        asyncio.run(use(failing(error)))  # type: ignore[arg-type]
    assert not raised.value.rules_at_fault, "no service is to be looked for"
    assert isinstance(raised.value, MissingProgramError) is isinstance(error, FileNotFoundError)


def test_a_version_that_is_not_told_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vipd.dataplane.nftables.tools.VERSION_SECONDS", 0.01)

    async def hang(argv: Sequence[str], stdin: str) -> ProgramResult:
        await asyncio.sleep(1000)
        raise AssertionError

    with pytest.raises(ApplyError, match=r"nft hangs: nft did not end within"):
        asyncio.run(find_nft(hang))


@pytest.fixture
def kernel() -> FakeKernel:
    """Without rules."""
    return FakeKernel()


def test_iptables_that_is_missing_at_the_start_is_found_when_it_is_there(
    kernel: FakeKernel, tmp_path: Path
) -> None:
    kernel.absent.add("iptables")
    machine = Machine(kernel.run, tmp_path)
    for _ in range(2):
        with pytest.raises(ApplyError, match=r"iptables cannot be run: there is no such program; hint: apt"):
            machine.become([ONE])
    assert "there is no such program" in machine.dataplane.versions()["ipv4"]
    assert Family.IPV4 not in {watched.family for watched in machine.dataplane.watched()}
    kernel.absent.clear()
    assert machine.step()
    assert "10.244.0.1" in kernel.saved()
    assert "nf_tables" in machine.dataplane.versions()["ipv4"]
    assert Family.IPV4 in {watched.family for watched in machine.dataplane.watched()}
    assert "--random-fully" in kernel.saved(), "what these programs can do is known too"
    assert not machine.step()


def test_iptables_that_vanishes_is_named_and_found_again(kernel: FakeKernel, tmp_path: Path) -> None:
    machine = Machine(kernel.run, tmp_path)
    machine.become([ONE])
    kernel.absent.add("iptables")
    with pytest.raises(ApplyError, match=r"there is no such program; hint: apt install iptables"):
        machine.become([])
    with pytest.raises(ApplyError, match="no such program"):
        machine.step()  # although nothing is wanted: what was written is still there
    kernel.absent.clear()
    machine.step()
    assert "VIPD-" not in kernel.saved()


@pytest.fixture
def alternatives(monkeypatch: pytest.MonkeyPatch, kernel: FakeKernel) -> None:
    """`iptables` is whichever variant the fake kernel has for it now."""
    monkeypatch.setattr(programs, "identity", lambda name: (name, kernel.default))
    monkeypatch.setattr("vipd.dataplane.iptables.other_variant.has_legacy_tables", lambda *_: True)


@pytest.mark.usefixtures("alternatives")
@pytest.mark.parametrize(("before", "after"), [("nft", "legacy"), ("legacy", "nft")])
@pytest.mark.parametrize("restarted", [False, True], ids=("running", "restarted"))
def test_rules_of_the_variant_before_go_with_the_first_step(
    kernel: FakeKernel, tmp_path: Path, before: str, after: str, restarted: bool
) -> None:
    kernel.default = before
    machine = Machine(kernel.run, tmp_path)
    machine.become([ONE])
    kernel.default = after
    if restarted:
        machine.restart()
    plan = machine.become([TWO])
    assert "other iptables variant" in str(plan)
    assert "VIPD-" not in kernel.saved(variant=before)
    assert "10.244.0.2" in kernel.saved(variant=after)
    (v4, *_) = machine.dataplane.watched()
    assert v4.legacy is (after == "legacy")
    assert not machine.step()


@pytest.mark.usefixtures("alternatives")
def test_no_step_is_good_before_the_rules_of_the_variant_before_are_gone(
    kernel: FakeKernel, tmp_path: Path
) -> None:
    machine = Machine(kernel.run, tmp_path)
    machine.become([ONE])
    kernel.default = "legacy"
    held = kernel.saved(variant="nft")

    tried: list[str] = []

    async def run(argv: Sequence[str], stdin: str) -> ProgramResult:
        if argv[0] == "iptables-nft-restore":
            tried.append(stdin)
            return ProgramResult(1, "", "busy")
        return await kernel.run(argv, stdin)

    machine = Machine(run, tmp_path)
    with pytest.raises(ApplyError, match=r"former ipv4 rules in .*nf_tables.* cannot be removed: .*busy"):
        machine.become([ONE])
    assert tried
    assert "10.244.0.1" in kernel.saved(variant="legacy"), "first those in use, then what was before"
    assert kernel.saved(variant="nft") == held
    with pytest.raises(ApplyError, match="cannot be removed"):
        machine.step()
    assert not machine.dataplane.quarantined(), "no service is to blame"


@pytest.mark.usefixtures("alternatives")
def test_what_is_gone_from_the_variant_before_when_it_is_removed_is_no_failure(
    kernel: FakeKernel, tmp_path: Path
) -> None:
    machine = Machine(kernel.run, tmp_path)
    machine.become([ONE])
    (jump,) = (rule for rule in kernel.chains("filter")["FORWARD"] if "VIPD-FORWARD" in rule)
    gone = f"*filter\n-D FORWARD {jump}\n-F VIPD-FORWARD\n-X VIPD-FORWARD\nCOMMIT\n"
    kernel.default = "legacy"
    machine.restart()
    machine.declare([TWO])
    plan = machine.plan()
    kernel.restore(gone, variant="nft")
    machine.apply(plan)
    assert "VIPD-" not in kernel.saved(variant="nft")
    assert "10.244.0.2" in kernel.saved(variant="legacy")


@pytest.mark.usefixtures("alternatives")
def test_the_other_variant_that_cannot_be_read_is_a_warning(kernel: FakeKernel, tmp_path: Path) -> None:
    async def run(argv: Sequence[str], stdin: str) -> ProgramResult:
        if argv[0] == "iptables-legacy-save":
            return ProgramResult(1, "", "it is ill")
        return await kernel.run(argv, stdin)

    machine = Machine(run, tmp_path)
    machine.become([ONE])
    assert any("whether iptables-legacy holds old rules" in text for text in machine.dataplane.warnings())


TOOLS = Tools("iptables-restore", "iptables-save", "iptables v1.8.9 (nf_tables)", (1, 8, 9))


def answering(finished: ProgramResult) -> Runner:
    async def run(argv: Sequence[str], stdin: str) -> ProgramResult:
        return finished

    return run


@pytest.mark.parametrize(
    ("finished", "said"),
    [
        (ProgramResult(4, "", "Another app is currently holding the xtables lock"), "xtables lock"),
        (ProgramResult(3, "", "Permission denied (you must be root)"), "needs root"),
        (ProgramResult(137, "", ""), "exit code 137"),
        (
            ProgramResult(1, "", "chain `INPUT' in table `filter' is incompatible, use 'nft' tool."),
            "nft list ruleset",
        ),
    ],
)
def test_only_a_chain_that_is_missing_counts_as_missing(finished: ProgramResult, said: str) -> None:
    with pytest.raises(ApplyError, match=said):
        asyncio.run(list_chain(TOOLS, ChainId("filter", "INPUT"), answering(finished)))
    missing = ProgramResult(1, "", "iptables: No chain/target/match by that name.\n")
    assert asyncio.run(list_chain(TOOLS, ChainId("filter", "VIPD-X"), answering(missing))) is None


def test_a_listing_that_fails_doubles_no_jump(kernel: FakeKernel, tmp_path: Path) -> None:
    async def run(argv: Sequence[str], stdin: str) -> ProgramResult:
        if "-S" in argv:
            return ProgramResult(4, "", "Another app is currently holding the xtables lock.")
        return await kernel.run(argv, stdin)

    machine = Machine(run, tmp_path)
    machine.become([ONE])
    before = kernel.saved()
    machine.dataplane.invalidate([(Family.IPV4, ChainId("filter", "INPUT"))])
    with pytest.raises(ApplyError, match="xtables lock"):
        machine.step()
    assert not machine.step(), "all was read instead, and is right"
    assert kernel.saved() == before


@pytest.mark.root
def test_a_rule_that_only_nft_shows_doubles_no_jump(tmp_path: Path) -> None:
    only_nft = "insert rule ip filter INPUT ct state vmap { established : accept, related : accept }"
    with Namespace() as namespace:

        def asked(*argv: str) -> ProgramResult:
            return asyncio.run(namespace.run(argv, ""))

        def jumps() -> int:
            return asked("nft", "list", "chain", "ip", "filter", "INPUT").stdout.count("jump VIPD-")

        machine = Machine(namespace.run, tmp_path)
        machine.become([ONE])
        wanted = jumps()
        assert wanted
        assert asked("nft", *only_nft.split()).exit_code == 0
        assert "*filter" not in asked("iptables-nft-save").stdout, "iptables leaves out the table"
        machine.dataplane.invalidate([(Family.IPV4, ChainId("filter", "INPUT"))])
        machine.step()
        assert jumps() == wanted
        machine.restart()
        machine.become([TWO])
        machine.restart()
        assert not machine.step()
        assert jumps() == wanted
        asked("iptables-nft", "-F", "VIPD-SERVICES")
        gone = ChainId("filter", "VIPD-NOT-THERE")
        tools = Tools("iptables-nft-restore", "iptables-nft-save", "", ())
        assert asyncio.run(list_chain(tools, gone, namespace.run)) is None
        machine.become([])
        assert jumps() == 0


@pytest.mark.parametrize(
    "garbled",
    [
        lambda saved: saved.partition("COMMIT")[0],
        lambda saved: "lorem ipsum\n",
        lambda saved: f"{saved}Segmentation fault\n",
        lambda saved: saved.replace("-A VIPD-SERVICES", "-B VIPD-SERVICES"),
        lambda saved: saved.replace(":PREROUTING ACCEPT [0:0]", ":"),
    ],
    ids=["no end", "other text", "more text", "no rule", "no chain"],
)
def test_output_that_is_not_understood_is_not_believed(
    garbled: Callable[[str], str], kernel: FakeKernel, tmp_path: Path
) -> None:
    """Else it would mean that there are no chains, or fewer, and all would be written anew."""
    cut = False

    async def run(argv: Sequence[str], stdin: str) -> ProgramResult:
        finished = await kernel.run(argv, stdin)
        return (
            ProgramResult(0, garbled(finished.stdout), "") if cut and argv[0].endswith("-save") else finished
        )

    machine = Machine(run, tmp_path)
    machine.become([ONE])
    before, cut = kernel.saved(), True
    machine.dataplane.invalidate_all()
    with pytest.raises(ApplyError, match="is not understood"):
        machine.step()
    assert kernel.saved() == before


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "Permission denied"), ProgramTimeoutError("nft", 5)]
)
def test_auto_without_an_nft_that_works_is_iptables_and_says_why(
    error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(state_dir=tmp_path, chain_prefix=f"T{os.getpid()}")
    assert asyncio.run(resolve_dataplane("auto", settings, failing(error))) == "iptables"
    assert "dataplane auto: iptables, for nftables cannot be tried: nft " in caplog.text


def test_a_difference_leaves_everything_known(kernel: FakeKernel, tmp_path: Path) -> None:
    machine = Machine(kernel.run, tmp_path)
    machine.become([ONE])

    async def difference_text() -> str:
        return str(await machine.dataplane.difference(await machine.dataplane.survey()))

    assert asyncio.run(difference_text()) == ""
    (watched, *_) = machine.dataplane.watched()
    assert watched.expected() is not None, "else a poll sees no foreign change until the next step"
    kernel.restore("*nat\n-F VIPD-SERVICES\nCOMMIT\n")
    assert "+ -A VIPD-SERVICES" in asyncio.run(difference_text())
    before = len(kernel.processes)
    assert not machine.step(), "what a step knows is not touched"
    assert len(kernel.processes) == before, "nothing is read again"
    machine.dataplane.invalidate_all()
    assert machine.step()
    assert asyncio.run(difference_text()) == ""
