"""What goes wrong outside vipd, and how the rules get right again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dataplane.declared import HTTP, backends, kube_like_services, numbered
from tests.dataplane.iptables.fake_kernel import FakeKernel
from tests.lab.inside import NotWrittenError, Synced, synced
from vipd.model.service import Family, Service

BOTH_FAMILIES = Service(
    "test/both", ("10.96.9.1", "fd00:96::9"), (HTTP,), backends("10.244.0.1", "fd00:1::1")
)
FIRST = [*kube_like_services(), numbered(1, "10.244.0.1"), numbered(2)]
SECOND = [*kube_like_services()[:1], numbered(1), numbered(2, "10.244.0.1", "10.244.0.2"), numbered(3)]
OUTSIDE = "Permission denied"
"""A failure that no rule is to blame for."""


def rules(kernel: FakeKernel) -> tuple[str, str]:
    return kernel.saved(Family.IPV4), kernel.saved(Family.IPV6)


@pytest.fixture
def undisturbed(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """The rules of a first daemon that nothing disturbs."""

    def written(*services: Service) -> tuple[str, str]:
        kernel = FakeKernel()
        synced("iptables", kernel.run, tmp_path / "undisturbed").become(*services)
        return rules(kernel)

    return written


def loaded(directory: Path, *services: Service) -> tuple[FakeKernel, Synced]:
    """A kernel with what a vipd has written, and that vipd."""
    kernel = FakeKernel()
    vipd = synced("iptables", kernel.run, directory)
    vipd.become(*services)
    return kernel, vipd


Undisturbed = Callable[..., tuple[str, str]]


@pytest.mark.parametrize("before", [[], FIRST], ids=["first load", "change"])
def test_any_block_that_fails_is_reported_in_the_tools_words_and_made_good(
    before: list[Service], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    after = SECOND if before else FIRST
    kernel, vipd = loaded(tmp_path / "counting", *before)
    start = len(kernel.blocks)
    vipd.become(*after)
    count = len(kernel.blocks) - start
    assert count > 3
    for number in range(1, count + 1):
        kernel, vipd = loaded(tmp_path / str(number), *before)
        kernel.failing[start + number] = OUTSIDE
        with pytest.raises(NotWrittenError, match=r"tables-restore failed with exit code 1: .*Permission"):
            vipd.become(*after)
        assert vipd.step() or not before
        assert rules(kernel) == undisturbed(*after), number
        assert vipd.pending() == ""
        kernel, vipd = loaded(tmp_path / f"{number} once", *before)
        kernel.failing[start + number] = "line 1 failed: once"
        if before:  # as if for its rules: made good at once
            vipd.become(*after)
            assert rules(kernel) == undisturbed(*after), number
            assert vipd.drift() == ""


def test_the_line_that_was_refused_is_quoted(vipd: Synced, kernel: FakeKernel) -> None:
    kernel.failing[1] = f"line 2 failed: {OUTSIDE}"
    with pytest.raises(NotWrittenError, match=r"\(line 2: :VIPD-"):
        vipd.become(*FIRST)


def drop_table(kernel: FakeKernel) -> None:
    """`iptables -t nat -F` and `-X`."""
    chains = kernel.chains("nat")
    own = [name for name in chains if name.startswith("VIPD-")]
    lines = [f"-F {name}" for name in chains] + [f"-X {name}" for name in own]
    kernel.restore("\n".join(["*nat", *lines, "COMMIT", ""]))


def flush_table(kernel: FakeKernel) -> None:
    """`iptables -t nat -F`: the chains stay, empty."""
    kernel.restore("\n".join(["*nat", *(f"-F {name}" for name in kernel.chains("nat")), "COMMIT", ""]))


def delete_jump(kernel: FakeKernel) -> None:
    kernel.restore(f"*nat\n-D PREROUTING {kernel.chains('nat')['PREROUTING'][0]}\nCOMMIT\n")


def empty_service_chain(kernel: FakeKernel) -> None:
    name = next(name for name in sorted(kernel.chains("nat")) if "-SVC-" in name)
    kernel.restore(f"*nat\n-F {name}\nCOMMIT\n")


def delete_service_chain(kernel: FakeKernel) -> None:
    name = next(name for name in sorted(kernel.chains("nat")) if "-SVC-" in name)
    users = [(c, r) for c, rules in kernel.chains("nat").items() for r in rules if r.endswith(f"-j {name}")]
    lines = [*(f"-D {chain} {rule}" for chain, rule in users), f"-F {name}", f"-X {name}"]
    kernel.restore("\n".join(["*nat", *lines, "COMMIT", ""]))


def double_jump(kernel: FakeKernel) -> None:
    jump = kernel.chains("nat")["PREROUTING"][0]
    kernel.restore(f"*nat\n-D PREROUTING {jump}\n-A PREROUTING {jump}\n-A PREROUTING {jump}\nCOMMIT\n")


RIVALS = [drop_table, flush_table, delete_jump, empty_service_chain, delete_service_chain, double_jump]


@pytest.mark.parametrize("rival", RIVALS)
@pytest.mark.parametrize("block", [1, 2], ids=["between plan and write", "between two blocks"])
def test_a_rival_amid_a_step_costs_one_retry_at_most(
    rival: Callable[[FakeKernel], None],
    block: int,
    vipd: Synced,
    kernel: FakeKernel,
    undisturbed: Undisturbed,
) -> None:
    vipd.become(*FIRST)
    place = len(kernel.blocks) + block
    kernel.before_block = lambda number: rival(kernel) if number == place else None
    try:
        vipd.become(*SECOND)
    except NotWrittenError:
        vipd.step()
    vipd.doubt()
    vipd.step()
    assert rules(kernel) == undisturbed(*SECOND)
    assert vipd.pending() == ""


def test_one_family_that_fails_does_not_hold_back_the_other(
    kernel: FakeKernel, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    wanted = undisturbed(BOTH_FAMILIES)
    kernel.absent.add("ip6tables")
    vipd = synced("iptables", kernel.run, tmp_path)
    with pytest.raises(NotWrittenError, match="ip6tables cannot be run"):
        vipd.become(BOTH_FAMILIES)
    assert kernel.saved(Family.IPV4) == wanted[0]
    kernel, vipd = loaded(tmp_path / "failing iptables")
    kernel.failing[1] = OUTSIDE
    with pytest.raises(NotWrittenError):
        vipd.become(BOTH_FAMILIES)
    assert kernel.saved(Family.IPV6) == wanted[1]
    vipd.step()
    assert rules(kernel) == wanted


def test_missing_ip6tables_is_no_fault_without_ipv6_services(kernel: FakeKernel, tmp_path: Path) -> None:
    kernel.absent.add("ip6tables")
    vipd = synced("iptables", kernel.run, tmp_path)
    vipd.become(numbered(1, "10.244.0.1"))
    assert vipd.pending() == ""
    assert "ip6tables cannot be run" in vipd.versions()["ipv6"]


CANARY = "*{}\n:KUBE-PROXY-CANARY - [0:0]\nCOMMIT\n"


def test_kube_prefix_beside_a_kube_proxy_must_be_forced_and_leaves_its_canaries(tmp_path: Path) -> None:
    for table in ("mangle", "nat", "filter"):
        kernel = FakeKernel()
        kernel.restore(CANARY.format(table))
        before = kernel.saved()
        with pytest.raises(NotWrittenError, match=r"chain_prefix KUBE is refused .* force_chain_prefix"):
            synced("iptables", kernel.run, tmp_path, chain_prefix="KUBE").become(*FIRST)
        assert kernel.saved() == before
        for settings in ({"chain_prefix": "KUBE", "force_chain_prefix": True}, {"chain_prefix": "VIPD"}):
            vipd = synced("iptables", kernel.run, tmp_path, **settings)
            vipd.become(*FIRST)
            assert f"{settings['chain_prefix']}-SERVICES" in kernel.chains("nat")
            vipd.become()
            left = [name for name in kernel.chains(table) if name.startswith("KUBE-")]
            assert left == ["KUBE-PROXY-CANARY"]


@pytest.mark.parametrize(
    ("version", "usable"), [("1.8.2", False), ("1.8.0", False), ("1.8.3", True), ("1.6.1", True)]
)
def test_iptables_that_duplicates_rules_is_refused(version: str, usable: bool, tmp_path: Path) -> None:
    kernel = FakeKernel(version=version)
    vipd = synced("iptables", kernel.run, tmp_path)
    if usable:
        vipd.become(numbered(1, "10.244.0.1"))
        assert ("--random-fully" in kernel.saved()) == (version != "1.6.1")
        return
    with pytest.raises(NotWrittenError, match=f"{version} .*1.8.3 or later"):
        vipd.become(numbered(1, "10.244.0.1"))
    assert not kernel.blocks


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_variant_is_chosen_by_setting(variant: str, tmp_path: Path, undisturbed: Undisturbed) -> None:
    kernel = FakeKernel(default="legacy" if variant == "nft" else "nft")
    synced("iptables", kernel.run, tmp_path, iptables_variant=variant).become(BOTH_FAMILIES)
    assert {b.program for b in kernel.blocks} == {
        f"{stem}-{variant}-restore" for stem in ("iptables", "ip6tables")
    }
    assert kernel.saved(variant=variant) == undisturbed(BOTH_FAMILIES)[0]
    assert not kernel.saved()
    kernel.absent.add(f"iptables-{variant}")
    with pytest.raises(
        NotWrittenError, match=rf"iptables-{variant} cannot be.*hint: set iptables_variant: auto"
    ):
        synced("iptables", kernel.run, tmp_path, iptables_variant=variant).become(BOTH_FAMILIES)


def test_what_is_done_to_the_host_is_recorded_before_the_first_write(
    vipd: Synced, kernel: FakeKernel, tmp_path: Path
) -> None:
    kernel.restore("*filter\n:FOREIGN - [0:0]\nCOMMIT\n")
    recorded: list[str] = []

    def note(number: int) -> None:
        recorded.append("".join(file.read_text() for file in tmp_path.iterdir()))

    kernel.before_block = note
    vipd.become(numbered(1, "10.244.0.1"))
    assert "VIPD" in recorded[0]
    assert "ipv4 nat" in recorded[0]
    assert "ipv4 filter" not in recorded[0], "it was there"
