"""Backends by name that etcd declares: each host asks its own name servers, as far as its settings allow."""

from __future__ import annotations

from typing import Any

from tests.lab.inside import Vipd
from tests.sources.etcd.following import Follower, follow, key
from tests.sources.etcd.members import Cluster

NAME, SPARE = "web.internal", "sorry.internal"
WEB = f"address: 10.96.7.1\nports: 80/tcp\nbackends: [dns:{NAME}:8080]\nfallback: dns:{SPARE}:8080\n"
ALLOWED: dict[str, Any] = {"allowed_names": {"etcd": ["internal"]}}


def test_a_service_of_etcd_has_the_names_that_the_settings_allow(etcd: Cluster) -> None:
    etcd.put(key("web"), WEB)

    def prepare(vipd: Vipd) -> None:
        vipd.names |= {f"dns:{NAME}": ["10.244.0.1", "10.244.0.2"], f"dns:{SPARE}": ["10.244.9.9"]}

    async def refused(host: Follower) -> None:
        await host.until_problem("allowed_names")
        assert host.names() == set()

    async def allowed(host: Follower) -> None:
        both = {"10.244.0.1:8080", "10.244.0.2:8080"}
        await host.until(lambda: host.serving().get("web") == both, "its names")
        etcd.put(key("web"), WEB.replace(SPARE, "sorry.example.com"))
        await host.until_problem("allowed_names")
        assert host.serving() == {"web": both}

    follow(etcd.urls, refused, prepare=prepare)
    follow(etcd.urls, allowed, prepare=prepare, settings=ALLOWED)
