"""Programs that are missing, cannot be run or hang: what is said, and that they are found again."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.dataplane.declared import numbered
from tests.dataplane.iptables.fake_kernel import FakeKernel
from tests.dataplane.namespace import Namespace
from tests.dataplane.watched_programs import WatchedPrograms, raising
from tests.lab.daemon import Daemon
from tests.lab.inside import NotWrittenError, ProgramResult, Synced, synced, written
from tests.lab.node import Node
from tests.lab.simulated_time import simulate
from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.removal import find_leftovers, remove, remove_empty_tables
from vipd.dataplane.nftables.tools import find_nft

ONE, TWO = numbered(1, "10.244.0.1"), numbered(1, "10.244.0.2")
FAULTS: tuple[tuple[Exception, str], ...] = (
    (FileNotFoundError(errno.ENOENT, "x"), r"cannot be run: there is no such program; hint: apt install "),
    (PermissionError(errno.EACCES, "denied"), r"cannot be run: denied; hint: .*chmod 755"),
    (OSError(errno.EMFILE, "x"), r"cannot be run: vipd is out of file descriptors; hint: .*LimitNOFILE="),
    (OSError(errno.ENFILE, "x"), r"cannot be run: this host is out of file descriptors; hint: .*file-max"),
    (BlockingIOError(errno.EAGAIN, "Try again"), r"cannot be run: Try again; hint: .*TasksMax="),
    (OSError(errno.ENOEXEC, "Exec format error"), r"cannot be run: Exec format error; hint: .*install"),
    (OSError("odd"), r"cannot be run: odd; hint: vipd tries again"),
    (RuntimeError("no new thread"), r"cannot be run: RuntimeError: no new thread; hint: "),
)


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel()


@pytest.fixture
def programs() -> WatchedPrograms:
    return WatchedPrograms()


@pytest.fixture
def vipd(kernel: FakeKernel, programs: WatchedPrograms, tmp_path: Path) -> Synced:
    return synced("iptables", kernel.run, tmp_path, through=programs)


def test_whatever_keeps_a_program_from_its_work_names_it_with_reason_and_hint(
    vipd: Synced, programs: WatchedPrograms, kernel: FakeKernel, tmp_path: Path
) -> None:
    vipd.become(ONE)
    held = kernel.saved()
    for error, words in FAULTS:
        without_nft = synced("nftables", kernel.run, tmp_path, through=WatchedPrograms(raising(error)))
        with pytest.raises(NotWrittenError, match=f"^nft {words}"):
            without_nft.become(ONE)
        assert not without_nft.refused(), "no service is to be looked for"
        programs.instead = raising(error)
        vipd.declare([TWO])
        with pytest.raises(NotWrittenError, match=f"^iptables-restore {words}"):
            vipd.step()
        assert not vipd.refused()
        assert kernel.saved() == held
        programs.instead = lambda argv, stdin: None
        vipd.become(ONE)


def test_an_nft_that_hangs_is_not_waited_for() -> None:
    async def hang(argv: Sequence[str], stdin: str) -> ProgramResult:
        await asyncio.sleep(1000)
        raise AssertionError

    with pytest.raises(ApplyError, match=r"nft hangs: nft did not end within \d+ s"):
        simulate(find_nft(hang))


def test_a_variant_that_is_not_installed_is_passed_over_by_a_removal(
    vipd: Synced, kernel: FakeKernel
) -> None:
    vipd.become(ONE)
    kernel.absent |= {"iptables-legacy", "ip6tables-legacy", "nft"}
    leftovers = asyncio.run(find_leftovers(["VIPD"], kernel.run))
    asyncio.run(remove(leftovers, kernel.run))
    assert "VIPD" not in kernel.saved()
    assert asyncio.run(remove_empty_tables(["ipv4 nat"], kernel.run)) == []
    assert "*nat" in kernel.saved(), "without nft the tables stay"


def test_without_nft_only_what_needs_it_fails(kernel: FakeKernel, tmp_path: Path) -> None:
    vipd = synced("nftables", kernel.run, tmp_path, through=WatchedPrograms(raising(FileNotFoundError())))
    assert vipd.step() == ""


def test_iptables_that_is_missing_at_the_start_is_found_when_it_is_there(
    kernel: FakeKernel, tmp_path: Path
) -> None:
    kernel.absent.add("iptables")
    vipd = synced("iptables", kernel.run, tmp_path)
    for _ in range(2):
        with pytest.raises(NotWrittenError, match=r"iptables cannot .*: there is no such program; hint: apt"):
            vipd.become(ONE)
    assert "there is no such program" in vipd.versions()["ipv4"]
    kernel.absent.clear()
    assert vipd.step()
    assert "10.244.0.1" in kernel.saved()
    assert "nf_tables" in vipd.versions()["ipv4"]
    assert "--random-fully" in kernel.saved(), "what these programs can do is known too"
    assert not vipd.step()


def test_iptables_that_vanishes_is_named_and_found_again(vipd: Synced, kernel: FakeKernel) -> None:
    vipd.become(ONE)
    kernel.absent.add("iptables")
    with pytest.raises(NotWrittenError, match=r"there is no such program; hint: apt install iptables"):
        vipd.become()
    with pytest.raises(NotWrittenError, match="no such program"):
        vipd.step()  # although nothing is wanted: what was written is still there
    kernel.absent.clear()
    vipd.step()
    assert "VIPD-" not in kernel.saved()


@pytest.mark.root
def test_rules_of_the_variant_before_go_when_the_alternative_changes(tmp_path: Path) -> None:
    """As `update-alternatives --set iptables` does it, while vipd runs and between two runs of it."""
    multi = {"nft": "/usr/sbin/xtables-nft-multi", "legacy": "/usr/sbin/xtables-legacy-multi"}

    names = [f"{stem}{end}" for stem in ("iptables", "ip6tables") for end in ("", "-save", "-restore")]

    def choose(variant: str) -> None:
        for name in names:
            link = tmp_path / "new"
            link.symlink_to(multi[variant])
            link.rename(tmp_path / name)

    def backend(number: int) -> str:
        return written([numbered(1, f"10.244.0.{number}")]).partition("services:\n")[2]

    choose("nft")
    with Namespace() as namespace:
        node = Node(namespace.name, "host", "", "").with_environment(PATH=f"{tmp_path}:{os.environ['PATH']}")
        with Daemon(node, backend(1), dataplane="iptables", reject_unused_ports=False) as daemon:
            for number in range(2, 6):
                after, before = ("legacy", "nft") if number % 2 == 0 else ("nft", "legacy")
                choose(after)
                if number < 4:
                    daemon.declare(backend(number))
                else:
                    daemon.stop()
                    daemon.write(backend(number))
                    daemon.start()
                save = f"iptables-{before}-save"
                daemon.wait_until(lambda save=save: "VIPD-" in namespace.do(save), False)  # type: ignore[misc]
                assert f"10.244.0.{number}" in namespace.do(f"iptables-{after}-save")
                daemon.wait_in_sync()


def test_no_step_is_good_before_the_rules_of_the_variant_before_are_gone(
    vipd: Synced, kernel: FakeKernel, tmp_path: Path
) -> None:
    vipd.become(ONE)
    held, kernel.default = kernel.saved(), "legacy"
    programs = WatchedPrograms(
        lambda argv, stdin: ProgramResult(1, "", "busy") if argv[0] == "iptables-nft-restore" else None
    )
    after = synced("iptables", kernel.run, tmp_path, through=programs)
    with pytest.raises(NotWrittenError, match=r"former ipv4 rules in .*nf_tables.* be removed: .*busy"):
        after.become(ONE)
    assert "10.244.0.1" in kernel.saved(), "first those in use, then what was before"
    assert kernel.saved(variant="nft") == held
    with pytest.raises(NotWrittenError, match="cannot be removed"):
        after.step()
    assert not after.refused(), "no service is to blame"


def test_what_is_gone_from_the_variant_before_when_it_is_removed_is_no_failure(
    vipd: Synced, kernel: FakeKernel
) -> None:
    vipd.become(ONE)
    (jump,) = (rule for rule in kernel.chains("filter")["FORWARD"] if "VIPD-FORWARD" in rule)
    gone = f"*filter\n-D FORWARD {jump}\n-F VIPD-FORWARD\n-X VIPD-FORWARD\nCOMMIT\n"
    kernel.default = "legacy"
    vipd.restart()
    last = len(kernel.blocks) + 1
    kernel.before_block = lambda number: kernel.restore(gone, variant="nft") if number == last else None
    vipd.become(TWO)
    assert "VIPD-" not in kernel.saved(variant="nft")
    assert "10.244.0.2" in kernel.saved(variant="legacy")


def test_the_other_variant_that_cannot_be_read_is_a_warning(kernel: FakeKernel, tmp_path: Path) -> None:
    kernel.default = "legacy"
    programs = WatchedPrograms(
        lambda argv, stdin: ProgramResult(1, "", "it is ill") if argv[0] == "iptables-nft-save" else None
    )
    vipd = synced("iptables", kernel.run, tmp_path, through=programs)
    vipd.become(ONE)
    assert any("whether iptables-nft holds old rules" in text for text in vipd.warnings())


LISTINGS = {
    "Another app is currently holding the xtables lock": (4, "xtables lock"),
    "Permission denied (you must be root)": (3, "needs root"),
    "": (137, "exit code 137"),
}


def test_a_listing_that_fails_doubles_no_jump(
    vipd: Synced, programs: WatchedPrograms, kernel: FakeKernel
) -> None:
    vipd.become(ONE)
    before = kernel.saved()
    for words, (code, said) in LISTINGS.items():
        answer = ProgramResult(code, "", words)
        programs.instead = lambda argv, stdin, answer=answer: answer if "-t" in argv else None  # type: ignore[misc]
        vipd.doubt("ipv4 filter INPUT")
        with pytest.raises(NotWrittenError, match=said):
            vipd.step()
        assert not vipd.step(), "all was read instead, and is right"
        assert kernel.saved() == before


@pytest.mark.root
def test_a_rule_that_only_nft_shows_doubles_no_jump(tmp_path: Path) -> None:
    only_nft = "insert rule ip filter INPUT ct state vmap { established : accept, related : accept }"
    with Namespace() as namespace:

        def jumps() -> int:
            return namespace.do("nft", "list", "chain", "ip", "filter", "INPUT").count("jump VIPD-")

        vipd = synced("iptables", namespace.name, tmp_path)
        vipd.become(ONE)
        wanted = jumps()
        assert wanted
        namespace.do("nft", *only_nft.split())
        assert "*filter" not in namespace.do("iptables-nft-save"), "iptables leaves out the table"
        vipd.doubt("ipv4 filter INPUT")
        vipd.step()
        assert jumps() == wanted
        vipd.restart()
        vipd.become(TWO)
        vipd.restart()
        assert not vipd.step()
        assert jumps() == wanted
        vipd.doubt("ipv4 filter VIPD-NOT-THERE")
        assert not vipd.step()
        vipd.become()
        assert jumps() == 0


GARBLED: dict[str, Callable[[str], str]] = {
    "no end": lambda saved: saved.partition("COMMIT")[0],
    "other text": lambda saved: "lorem ipsum\n",
    "more text": lambda saved: f"{saved}Segmentation fault\n",
    "no rule": lambda saved: saved.replace("-A VIPD-SERVICES", "-B VIPD-SERVICES"),
    "no chain": lambda saved: saved.replace(":PREROUTING ACCEPT [0:0]", ":"),
}


def test_output_that_is_not_understood_is_not_believed(
    vipd: Synced, programs: WatchedPrograms, kernel: FakeKernel
) -> None:
    """Else it would mean that there are no chains, or fewer, and all would be written anew."""
    vipd.become(ONE)
    before = kernel.saved()

    for name, change in GARBLED.items():
        answer = ProgramResult(0, change(before), "")
        programs.instead = lambda argv, stdin, answer=answer: (  # type: ignore[misc]
            answer if argv[0] == "iptables-save" else None
        )
        vipd.doubt()
        with pytest.raises(NotWrittenError, match="is not understood"):
            vipd.step()
        assert kernel.saved() == before, name
