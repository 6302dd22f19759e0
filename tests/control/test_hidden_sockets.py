"""Sockets of processes that cannot be looked into."""

from __future__ import annotations

from pathlib import Path

import pytest

from vipd.host.local_sockets import LocalSockets


def proc(root: Path, user: int, state: str = "0A") -> Path:
    """A /proc on which port 22 is held by a process that cannot be looked into."""
    (root / "proc/net").mkdir(parents=True)
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout\n"
    rows = [f"0100007F:00{port}" for port in ("16", "17")] + ["00000000:0016"]
    lines = [
        f"   {n}: {row} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 {user:5} 0 {7 + n} 1\n"
        for n, row in enumerate(rows)
    ]
    (root / "proc/net/tcp").write_text(head + "".join(lines))
    return root


@pytest.mark.parametrize(("user", "guarded"), [(0, True), (1000, False)])
def test_port_22_of_root_is_the_ssh_server(tmp_path: Path, user: int, guarded: bool) -> None:
    found = {(s.address, s.port): s.protected for s in LocalSockets(proc(tmp_path, user)).read()}
    assert found == {("127.0.0.1", 22): guarded, ("127.0.0.1", 23): False, ("0.0.0.0", 22): guarded}


def test_connections_are_no_listening_sockets(tmp_path: Path) -> None:
    assert LocalSockets(proc(tmp_path, 0, "01")).read() == ()
