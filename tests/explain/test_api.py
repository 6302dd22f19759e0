"""`GET /v1/explain` of the real server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.api.serving import DNS, Api, served
from tests.fake_dataplane import FakeDataplane
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.nftables.options import TableOptions
from vipd.model import Family
from vipd.observe.reasons import Options


@dataclass(slots=True)
class Explained(FakeDataplane):
    """A fake whose rules would be vipd's defaults."""

    by_table: bool = False

    def options_of(self, family: Family) -> Options:
        return TableOptions(family) if self.by_table else RuleOptions(family)

    def host_addresses(self) -> frozenset[str]:
        return frozenset({"192.0.2.1"})


def wired(api: Api) -> None:
    api.dataplane = Explained()


def wired_by_table(api: Api) -> None:
    api.dataplane = Explained(by_table=True)


@pytest.mark.parametrize(("wire", "table"), [(wired, "nat"), (wired_by_table, "ip vipd")])
def test_it_answers_of_the_daemon_s_own_services(wire: Callable[[Api], None], table: str) -> None:
    async def story(api: Api) -> None:
        await api.add(DNS)
        answer = await api.ask("GET", "/v1/explain?from=10.10.0.9&target=10.96.0.10%3A53%2Fudp")
        found = answer.body["explanation"]
        assert found["service_port"] == "kube-system/kube-dns"
        assert {b["endpoint"]: b["share"] for b in found["backends"]} == {
            "10.244.0.5:53": 0.333333,
            "10.244.0.6:53": 0.666667,
        }
        outcome = found["outcomes"][0]
        assert table in {rule["table"] for rule in outcome["rules"]}
        assert found["notes"] == []
        named = await api.ask("GET", "/v1/explain?from=local&target=kube-system%2Fkube-dns")
        assert named.body["explanation"]["packet"]["arriving"] == "local"

    served(story, wire)


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("from=local&target=nope", 404),
        ("from=local&target=10.96.0.10", 400),
        ("from=fd00%3A%3A1&target=10.96.0.10%3A53", 400),
        ("target=dns", 400),
        ("from=local", 400),
    ],
)
def test_what_cannot_be_answered(query: str, status: int) -> None:
    async def story(api: Api) -> None:
        assert (await api.ask("GET", f"/v1/explain?{query}")).status == status

    served(story, wired)


def test_a_dataplane_without_such_rules() -> None:
    async def story(api: Api) -> None:
        assert (await api.ask("GET", "/v1/explain?from=local&target=dns")).kind == "invalid"

    served(story)
