"""Which processes are ours."""

from __future__ import annotations

import pytest

from vipd.dataplane.iptables.watch.own_processes import REMEMBERED_SECONDS, OwnProcesses


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_process_is_ours_while_it_runs_and_a_moment_longer() -> None:
    clock = Clock()
    own = OwnProcesses(clock)
    with own.running(7):
        clock.now += 1000
        assert own.wrote(7, 7)
    clock.now += REMEMBERED_SECONDS
    assert own.wrote(7, 7)
    clock.now += 0.001
    assert not own.wrote(7, 7), "its number may be somebody else's by now"


def test_a_number_used_again_is_ours_again() -> None:
    clock = Clock()
    own = OwnProcesses(clock)
    with own.running(7):
        pass
    with own.running(7):
        clock.now += 1000
        with own.running(8):
            pass
        assert own.known(7)


def test_the_kernels_pid_decides_where_it_is_the_number_we_know() -> None:
    own = OwnProcesses(Clock())
    with own.running(7):
        assert own.wrote(7, 4_000_000_000), "another socket had the address already"
        assert not own.wrote(8, 7)
        assert own.wrote(0, 7), "old kernels say no pid"


def test_in_another_pid_namespace_the_netlink_address_decides() -> None:
    own = OwnProcesses(Clock(), pids_are_global=False)
    with own.running(7):
        assert own.wrote(31007, 7)
        assert not own.wrote(7, 31007)


@pytest.mark.parametrize("pids_are_global", [True, False])
def test_a_socket_of_ours_is_known_whatever_thread_uses_it(pids_are_global: bool) -> None:
    own = OwnProcesses(lambda: 0.0, pids_are_global)
    own.add_socket(4_000_000_000)
    assert own.wrote(31007, 4_000_000_000)
    assert not own.wrote(31007, 31007)
    assert not own.wrote(4_000_000_000, 7), "a pid is no address"
    assert own.sent(4_000_000_000)
    assert not own.sent(31007)
    with own.running(31007):
        assert own.sent(31007)
