"""`running` is a vipd: what is declared is written, and the API says so."""

from __future__ import annotations

import pytest

from tests.lab.inside import Vipd, running

DNS = """\
  - name: dns
    address: 10.96.0.10
    ports: [53/udp]
    backends: [10.244.0.5, {address: 10.244.0.6, weight: 2}]
"""


@pytest.mark.parametrize("simulated", [False, True])
def test_declared_services_are_written_and_shown(simulated: bool) -> None:
    async def story(vipd: Vipd) -> None:
        assert vipd.kernel.serving() == {"dns 10.96.0.10:53/udp": {"10.244.0.5:53": 1, "10.244.0.6:53": 2}}
        assert (await vipd.status())["state"] == "in-sync", await vipd.status()
        shown = await vipd.vipctl("list")
        assert shown.code == 0
        assert "dns" in shown.stdout
        assert (await vipd.vipctl("add", "10.96.0.12:80/tcp", "10.244.0.9")).code == 0
        assert len(vipd.kernel.rules) == 2
        vipd.declare()
        await vipd.reload()
        assert vipd.kernel.names() == {"10.96.0.12:80/tcp"}

    running(story, lambda vipd: vipd.declare(DNS), simulated=simulated)
