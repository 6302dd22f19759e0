"""Which processes and sockets are ours."""

from __future__ import annotations

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
    with own.running(7):
        clock.now += 1000
        with own.running(8):
            pass
        assert own.wrote(7, 7), "a number used again is ours again"


GLOBAL, APART = True, False
"""Whether this process is in the pid namespace whose numbers the kernel tells."""
WROTE = [
    # The kernel's pid decides where it is the number we know.
    (GLOBAL, 7, 4_000_000_000, True),  # another socket had the address already
    (GLOBAL, 8, 7, False),
    (GLOBAL, 0, 7, True),  # old kernels say no pid
    (APART, 31007, 7, True),
    (APART, 7, 31007, False),
    # A socket of ours is known whatever thread uses it; a pid is no address.
    (GLOBAL, 31007, 4_100_000_000, True),
    (APART, 31007, 4_100_000_000, True),
    (GLOBAL, 31007, 31007, False),
    (APART, 4_100_000_000, 31007, False),
]


def test_who_wrote() -> None:
    for pids_are_global, pid, port, ours in WROTE:
        own = OwnProcesses(lambda: 0.0, pids_are_global)
        own.add_socket(4_100_000_000)
        with own.running(7):
            assert own.wrote(pid, port) is ours, (pids_are_global, pid, port)
            assert own.sent(4_100_000_000)
            assert own.sent(7)
            assert not own.sent(31007)
