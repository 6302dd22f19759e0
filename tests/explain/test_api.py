"""`GET /v1/explain` of the real server."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.api.serving import DNS, Api, served
from tests.fake_dataplane import FakeDataplane
from vipd.dataplane.iptables.options import RuleOptions
from vipd.model import Family


@dataclass(slots=True)
class Explained(FakeDataplane):
    """A fake whose rules would be vipd's defaults."""

    def options_of(self, family: Family) -> RuleOptions:
        return RuleOptions(family)

    def host_addresses(self) -> frozenset[str]:
        return frozenset({"192.0.2.1"})


def wired(api: Api) -> None:
    api.dataplane = Explained()


def test_it_answers_of_the_daemon_s_own_services() -> None:
    async def story(api: Api) -> None:
        await api.add(DNS)
        answer = await api.ask("GET", "/v1/explain?from=10.10.0.9&target=10.96.0.10%3A53%2Fudp")
        found = answer.body["explanation"]
        assert found["service_port"] == "kube-system/kube-dns"
        assert {b["endpoint"]: b["share"] for b in found["backends"]} == {
            "10.244.0.5:53": 0.333333,
            "10.244.0.6:53": 0.666667,
        }
        named = await api.ask("GET", "/v1/explain?from=local&target=kube-system%2Fkube-dns")
        assert named.body["explanation"]["packet"]["arriving"] == "local"

    served(story, wired)


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
