"""The fast path: what is written when, and what a kernel without flowtables costs. With packets, see
tests/kernels/fast_path.py: few test machines have the module."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.dataplane.conntrack.forwardings import forwarding
from tests.dataplane.namespace import Namespace
from vipd.dataplane.base import ApplyError
from vipd.dataplane.fast_path.driver import (
    IDLE,
    OFF,
    RETRY_POLLS,
    FastPath,
    find_fast_paths,
    remove_fast_paths,
)
from vipd.host.process import ProgramResult
from vipd.host.settings.settings import Settings
from vipd.model.service import Protocol

TCP = forwarding("10.96.0.1", 80, ("10.244.0.2", 80), protocol=Protocol.TCP)
UDP = forwarding("10.96.0.1", 53, ("10.244.0.2", 53))


class Kernel:
    """Answers as nft does, for this one table."""

    def __init__(self) -> None:
        self.devices: set[str] | None = None
        """Those in the flowtable; None: there is no table."""
        self.links = {"eth0", "eth1"}
        self.refuses = ""
        self.written: list[str] = []

    async def run(self, argv: Sequence[str], stdin: str) -> ProgramResult:
        if argv[1:4] == ["-j", "list", "table"]:
            if self.devices is None:
                return ProgramResult(1, "", "Error: No such file or directory")
            names = sorted(self.devices)
            table = {"flowtable": {"name": "flows", "dev": names if len(names) > 1 else names[0]}}
            return ProgramResult(0, json.dumps({"nftables": [{"table": {}}, table, {"rule": {}}]}), "")
        self.written.append(stdin)
        if self.refuses:
            return ProgramResult(1, "", f"Error: Could not process rule: {self.refuses}\n")
        named = {name for name in ("eth0", "eth1", "eth2") if f'"{name}"' in stdin}
        if named - self.links:
            return ProgramResult(1, "", "Error: Could not process rule: No such file or directory\n")
        if stdin.startswith("delete"):
            self.devices = None
        else:
            self.devices = named | (self.devices or set() if "delete" not in stdin else set())
        return ProgramResult(0, "", "")


def fast_path(kernel: Kernel, release: str = "6.12.1", **settings: Any) -> FastPath:
    """With `fast_path: auto` unless the settings say otherwise."""
    values = {"fast_path": "auto", **settings}
    return FastPath(Settings(**values), kernel.run, lambda: set(kernel.links), release)


def active(path: FastPath) -> bool:
    return path.state.active


def sync(path: FastPath, *forwardings: Any) -> None:
    path.services_changed({each.key: each for each in forwardings})
    path.stepped()
    asyncio.run(path.sync())


def test_it_is_off_by_default_and_then_removes_what_an_earlier_daemon_left() -> None:
    kernel = Kernel()
    path = fast_path(kernel, fast_path=Settings().fast_path)
    sync(path, TCP)
    assert (path.state, kernel.written, path.warnings(), path.view()) == (OFF, [], (), None)
    kernel.devices = {"eth0"}
    sync(fast_path(kernel, fast_path="off"), TCP)
    assert kernel.devices is None


def test_it_is_written_once_there_is_a_tcp_service_and_goes_with_the_last_one() -> None:
    kernel = Kernel()
    path = fast_path(kernel)
    sync(path, UDP)
    assert path.state == IDLE
    assert kernel.devices is None
    sync(path, TCP)
    assert active(path)
    assert path.view() == {"active": True, "reason": "", "devices": ["eth0", "eth1"]}
    sync(path)
    assert len(kernel.written) == 1
    path.services_changed({TCP.key: None})
    asyncio.run(path.sync())
    assert path.state == IDLE
    assert kernel.devices is None


def test_the_flowtable_follows_the_devices_and_its_flows_stay() -> None:
    kernel = Kernel()
    path = fast_path(kernel)
    sync(path, TCP)
    kernel.links.add("eth2")
    sync(path)
    assert kernel.devices == {"eth0", "eth1", "eth2"}
    assert "delete" not in kernel.written[-1]
    assert "eth0" not in kernel.written[-1]
    kernel.links -= {"eth1", "eth2"}
    sync(path)
    assert kernel.devices == {"eth0"}
    writes = len(kernel.written)
    sync(path)
    assert len(kernel.written) == writes, "one device is no list in the output of nft"


def test_a_device_that_vanishes_before_the_write_is_left_out_of_the_next_try() -> None:
    kernel = Kernel()
    seen = iter([{"eth0", "eth2"}])
    path = FastPath(Settings(fast_path="auto"), kernel.run, lambda: next(seen, set(kernel.links)), "6.12")
    kernel.links = {"eth0"}
    sync(path, TCP)
    assert active(path)
    assert kernel.devices == {"eth0"}


def test_a_kernel_that_refuses_it_is_asked_again_seldom_and_named() -> None:
    kernel = Kernel()
    kernel.refuses = "No such file or directory"
    path = fast_path(kernel)
    sync(path, TCP)
    assert not active(path)
    assert "modprobe nf_flow_table_inet" in path.warnings()[0]
    for _ in range(RETRY_POLLS):
        sync(path)
    assert len(kernel.written) == 1
    kernel.refuses = ""
    sync(path)
    assert active(path)
    assert path.warnings() == ()


@pytest.mark.parametrize(("release", "works"), [("6.1.0-56-amd64", False), ("6.4.0", True), ("10.0", True)])
def test_flows_that_must_end_need_a_kernel_that_can_end_them(release: str, works: bool) -> None:
    kernel = Kernel()
    path = fast_path(kernel, release)
    sync(path, TCP)
    assert active(path)
    sync(path, replace(TCP, ends_flows=True))
    assert active(path) is works
    assert (kernel.devices is not None) is works
    assert works or str(TCP.key.service) in path.warnings()[0]


def test_flows_without_vipds_mark_have_none() -> None:
    path = fast_path(Kernel(), compat="kube-proxy")
    sync(path, TCP)
    assert "kube-proxy" in path.warnings()[0]


def test_devices_are_bounded_and_named_safely_and_only_vipds_tcp_flows_are_added() -> None:
    kernel = Kernel()
    odd, many = {'a"b', "x;y", "vipd0"}, {f"e{n}" for n in range(1000)}
    for links, named in (({"eth0", "br-1.20", *odd}, 2), (many, 256)):
        path = FastPath(Settings(fast_path="auto"), kernel.run, lambda links=links: links)  # type: ignore[misc]
        kernel.links |= links
        sync(path, TCP)
        (devices,) = re.findall(r"devices = \{(.*?)\}", kernel.written[-1])
        assert len(devices.split(",")) == named
    (rule,) = (line for line in kernel.written[-1].splitlines() if "flow add" in line)
    for part in ("ct mark and 0x2000 == 0x2000", "meta l4proto tcp", "iiftype ether", "oiftype ether"):
        assert part in rule


@pytest.mark.root
def test_in_this_kernel_it_works_or_leaves_nothing_behind() -> None:
    with Namespace() as namespace:
        path = FastPath(Settings(fast_path="auto"), namespace.run, lambda: {"lo"})
        sync(path, TCP)
        found = asyncio.run(find_fast_paths(["VIPD", "OTHER"], namespace.run))
        assert found == (("VIPD",) if active(path) else ())
        assert active(path) or "nf_flow_table_inet" in path.warnings()[0]
        asyncio.run(remove_fast_paths(found, namespace.run))
        assert asyncio.run(find_fast_paths(["VIPD"], namespace.run)) == ()


def test_without_nft_there_is_nothing_to_clean_up() -> None:
    async def run(argv: Sequence[str], stdin: str) -> ProgramResult:
        raise FileNotFoundError(argv[0])

    assert asyncio.run(find_fast_paths(["VIPD"], run)) == ()
    path = FastPath(Settings(fast_path="auto"), run, lambda: {"eth0"})
    sync(path, TCP)
    assert "nft" in path.warnings()[0]
    with pytest.raises(ApplyError):
        asyncio.run(remove_fast_paths(["VIPD"], run))


def test_a_first_service_does_not_wait_for_the_next_poll() -> None:
    async def follow() -> None:
        kernel = Kernel()
        path = fast_path(kernel)
        polling = asyncio.create_task(path.poll())
        await asyncio.sleep(0)
        path.services_changed({TCP.key: TCP})
        await asyncio.wait_for(polling, 2.5)
        await path.sync()
        assert active(path)

    asyncio.run(follow())


def test_before_the_first_step_a_fast_path_of_an_earlier_vipd_stays() -> None:
    kernel = Kernel()
    kernel.devices = {"eth0", "eth1"}
    path = fast_path(kernel)
    asyncio.run(path.sync())
    assert kernel.written == []
    path.stepped()
    asyncio.run(path.sync())
    assert path.state == IDLE
    assert kernel.devices is None
