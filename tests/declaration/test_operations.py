"""Changes of what is declared: what each does to the store, and which are refused, with the way out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.inside import Vipd, running

Json = dict[str, Any]

DNS: Json = {
    "name": "dns",
    "address": "10.96.0.10",
    "ports": ["53/udp"],
    "backends": ["10.244.0.5", {"address": "10.244.0.6", "weight": 2}],
}
WEB: Json = {"name": "web", "address": "10.96.0.11", "ports": ["80/tcp"]}
FILED = "  - {name: filed, address: 10.96.0.20, ports: [53/udp], backends: [10.244.0.5]}\n"
ADD, APPLY = ("POST", "/v1/services"), ("POST", "/v1/apply")
SET, REMOVE = ("PATCH", "/v1/services/{}"), ("DELETE", "/v1/services/{}")
WEIGHT = ("PATCH", "/v1/services/{}/backends/{}")
GROW, SHRINK = ("POST", "/v1/services/{}/backends"), ("DELETE", "/v1/services/{}/backends")
Request = tuple[tuple[str, str], str, object]
"""Verb; target, with a backend behind a space; body."""


def with_filed(vipd: Vipd) -> None:
    vipd.declare(FILED)


def spec(**fields: object) -> Json:
    return {"service": DNS | fields}


def web(*backends: str, address: str = "10.96.0.30") -> Json:
    return WEB | {"address": address, "backends": list(backends)}


async def ask(vipd: Vipd, request: Request) -> Any:
    (method, path), target, body = request
    words = [word.replace("/", "%2F").replace("[", "%5B").replace("]", "%5D") for word in target.split(" ")]
    return await vipd.ask(method, path.format(*words), body)


async def stored(vipd: Vipd) -> dict[str, Json]:
    """What is exported, by name, without the service of a file."""
    exported = (await vipd.ask("GET", "/v1/export")).body["services"]
    return {service["name"]: service for service in exported if service["name"] != "filed"}


async def begin(vipd: Vipd, *specs: Json) -> dict[str, Json]:
    """The store holds these and nothing else."""
    answer = await vipd.ask("POST", "/v1/apply", {"services": list(specs), "prune": True})
    assert answer.status == 200, answer
    return await stored(vipd)


CHANGED: dict[str, tuple[list[Json], Request, Json, Json]] = {
    "a new service stands beside the others": (
        [DNS],
        (ADD, "", {"service": {"address": "10.96.0.12", "ports": ["80/tcp"]}}),
        {"10.96.0.12:80/tcp": "created"},
        {"10.96.0.12:80/tcp": {"address": "10.96.0.12"}, "dns": DNS},
    ),
    "the same service again": ([DNS], (ADD, "", {"service": DNS}), {"dns": "unchanged"}, {"dns": DNS}),
    "fields are set, the others kept, and null clears": (
        [DNS | {"affinity": "client-ip", "fallback": "drop"}],
        (SET, "dns", {"service": {"affinity": None, "backends": ["10.244.9.9"]}}),
        {"dns": "changed"},
        {"dns": {"affinity": None, "fallback": "drop", "backends": ["10.244.9.9"]}},
    ),
    **{
        f"setting {fields} where it is so": (
            [DNS],
            (SET, "dns", {"service": fields}),
            {"dns": "unchanged"},
            {"dns": DNS},
        )
        for fields in ({}, {"name": "dns"}, {"affinity": None}, {"address": "10.96.0.10"})  # type: ignore[list-item]
    },
    "a weight is set": (
        [DNS],
        (WEIGHT, "dns 10.244.0.5", {"weight": 0}),
        {"dns": "changed"},
        {
            "dns": {
                "backends": [{"address": "10.244.0.5", "weight": 0}, {"address": "10.244.0.6", "weight": 2}]
            }
        },
    ),
    "a weight is so": ([DNS], (WEIGHT, "dns 10.244.0.6", {"weight": 2}), {"dns": "unchanged"}, {"dns": DNS}),
    "backends are added behind those that are there": (
        [DNS],
        (GROW, "dns", {"backends": ["10.244.0.5", "10.244.0.7", {"address": "10.244.0.8", "port": 5353}]}),
        {"dns": "changed"},
        {"dns": {"backends": [*DNS["backends"], "10.244.0.7", {"address": "10.244.0.8", "port": 5353}]}},
    ),
    "a backend is there": (
        [DNS],
        (GROW, "dns", {"backends": ["10.244.0.5"]}),
        {"dns": "unchanged"},
        {"dns": DNS},
    ),
    "adding backends keeps a fallback": (
        [DNS | {"fallback": {"backends": ["10.244.9.9"]}}],
        (GROW, "dns", {"backends": ["10.244.0.7"]}),
        {"dns": "changed"},
        {"dns": {"fallback": {"backends": ["10.244.9.9"]}}},
    ),
    "a backend is removed": (
        [DNS],
        (SHRINK, "dns", {"backends": ["10.244.0.5"]}),
        {"dns": "changed"},
        {"dns": {"backends": [{"address": "10.244.0.6", "weight": 2}]}},
    ),
    "all backends are removed": (
        [DNS],
        (SHRINK, "dns", {"backends": ["10.244.0.5", "10.244.0.6"]}),
        {"dns": "changed"},
        {"dns": {"backends": None}},
    ),
    "a service is removed by its frontend": (
        [DNS, WEB],
        (REMOVE, "10.96.0.10:53/udp", None),
        {"dns": "removed"},
        {"web": WEB},
    ),
    "a service is removed by its address": ([DNS], (REMOVE, "10.96.0.10", None), {"dns": "removed"}, {}),
    "apply creates, changes and keeps": (
        [DNS, WEB],
        (APPLY, "", {"services": [WEB | {"ports": ["81/tcp"]}, WEB | {"name": "new"}]}),
        {"web": "changed", "new": "created"},
        {"dns": DNS, "new": WEB | {"name": "new"}, "web": {"ports": ["81/tcp"]}},
    ),
    "apply with prune removes what it does not name, and nothing of files": (
        [DNS, WEB],
        (APPLY, "", {"services": [WEB], "prune": True}),
        {"web": "unchanged", "dns": "removed"},
        {"web": WEB},
    ),
    "apply may move a frontend from one service to another": (
        [DNS, WEB],
        (
            APPLY,
            "",
            {
                "services": [
                    WEB | {"address": "10.96.0.10", "ports": ["53/udp"]},
                    DNS | {"address": "10.96.0.11"},
                ]
            },
        ),
        {"web": "changed", "dns": "changed"},
        {"dns": {"address": "10.96.0.11"}, "web": {"address": "10.96.0.10"}},
    ),
    "a virtual IP may become a backend's address in the step in which it is removed": (
        [DNS, web()],
        (APPLY, "", {"services": [web(address="10.244.0.6")], "prune": True}),
        {"web": "changed", "dns": "removed"},
        {"web": {"address": "10.244.0.6"}},
    ),
    "names of DNS are added, weighted and removed as addresses are": (
        [DNS | {"backends": ["10.244.0.5", "dns:a.b:80"]}],
        (GROW, "dns", {"backends": ["srv:_x._tcp.a.b", {"dns": "a.b", "port": 80}]}),
        {"dns": "changed"},
        {"dns": {"backends": ["10.244.0.5", {"dns": "a.b", "port": 80}, {"srv": "_x._tcp.a.b"}]}},
    ),
    "the weight of a name": (
        [DNS | {"backends": ["dns:a.b:80"]}],
        (WEIGHT, "dns dns:a.b:80", {"weight": 7}),
        {"dns": "changed"},
        {"dns": {"backends": [{"dns": "a.b", "port": 80, "weight": 7}]}},
    ),
    "a name without its port is that with it": (
        [DNS | {"backends": ["10.244.0.5", "dns:a.b:80"]}],
        (SHRINK, "dns", {"backends": ["dns:a.b"]}),
        {"dns": "changed"},
        {"dns": {"backends": ["10.244.0.5"]}},
    ),
}


def test_what_each_change_does() -> None:
    async def story(vipd: Vipd) -> None:
        for name, (before, request, results, after) in CHANGED.items():
            began = await begin(vipd, *before)
            answer = await ask(vipd, request)
            assert answer.status == 200, (name, answer)
            assert {each["name"]: each["action"] for each in answer.body["results"]} == results, name
            found = await stored(vipd)
            assert found.keys() == after.keys(), name
            for service, fields in after.items():
                assert {key: found[service].get(key) for key in fields} == fields, name
            assert answer.body["changed"] is (found != began), name
            assert (await vipd.service("filed"))["spec"]["backends"] == ["10.244.0.5"], name

    running(story, with_filed)


def taken(name: str, backends: list[str], hint: str) -> tuple[Request, str, str]:
    fields: Json = {"backends": backends} | ({"name": name} if name else {})
    body = {key: value for key, value in (DNS | fields).items() if name or key != "name"}
    return (ADD, "", {"service": body}), "conflict", hint


STRAY = "name the backends of dns instead: 10.244.0.5, 10.244.0.6"
BY_FILE = "services.yaml, line 3"
REFUSED: list[tuple[Request, str, str]] = [
    ((ADD, "", spec(affinity="client-ip")), "conflict", "vipctl set dns"),
    *(
        taken(name, backends, hint)
        for name in ("", "other")
        for backends, hint in (
            ([], "vipctl describe dns shows it; vipctl add-backend dns ADDR adds to it"),
            (
                ["10.244.0.5", "10.244.9.9"],
                "vipctl describe dns shows it; vipctl add-backend dns 10.244.9.9 adds",
            ),
            (["10.244.0.5"], "vipctl describe dns shows it"),
        )
    ),
    ((ADD, "", {"service": DNS | {"name": "filed", "address": "10.96.0.20"}}), "conflict", BY_FILE),
    ((ADD, "", spec(name="other", address=["10.96.7.7", "10.96.0.10"])), "conflict", "dns"),
    ((ADD, "", spec(name="other", address=["10.96.7.7", "10.96.0.20"])), "conflict", "services.yaml"),
    *(((ADD, "", {"service": body}), "invalid", "") for body in (7, "x", [], {}, {"address": "10.96.0.12"})),
    ((ADD, "", spec(name="new", colour="red", address="10.96.0.12")), "invalid", "known: "),
    *(
        (request, "not-found", "")
        for target in ("dn", "10.96.0.10:53/tcp", "10.96.0.99", "a b", "[fd00::1]:1/udp")
        for request in (
            (REMOVE, target.replace(" ", "%20"), None),
            (SET, target.replace(" ", "%20"), {"service": {}}),
            (WEIGHT, f"{target.replace(' ', '%20')} 10.244.0.5", {"weight": 1}),
            (GROW, target.replace(" ", "%20"), {"backends": ["10.244.0.7"]}),
            (SHRINK, target.replace(" ", "%20"), {"backends": ["10.244.0.5"]}),
        )
    ),
    ((REMOVE, "filed", None), "owned", BY_FILE),
    ((SET, "filed", {"service": {"affinity": "client-ip"}}), "owned", BY_FILE),
    ((GROW, "filed", {"backends": ["10.244.0.7"]}), "owned", BY_FILE),
    ((SHRINK, "filed", {"backends": ["10.244.0.5"]}), "owned", BY_FILE),
    ((APPLY, "", {"services": [DNS | {"name": "filed"}]}), "owned", BY_FILE),
    ((SET, "dns", {}), "malformed", ""),
    ((SET, "dns", []), "malformed", ""),
    ((SET, "dns", {"service": {"name": "other"}}), "conflict", ""),
    ((SET, "dns", {"service": {"address": "10.96.0.20"}}), "conflict", ""),
    ((SET, "dns", {"service": {"address": None}}), "invalid", ""),
    ((SET, "dns", {"service": {"colour": "red"}}), "invalid", ""),
    ((SET, "dns", {"service": {"backends": ["10.244.0.5", "10.244.0.5"]}}), "invalid", ""),
    *(
        ((WEIGHT, "dns 10.244.0.5", {"weight": w}), "invalid", "")
        for w in (None, -1, 65536, 1.0, "3", True, [1])
    ),
    *(
        (request, kind, "")
        for backend, kind in (("10.244.0.9", "not-found"), ("10.244.0.5:99", "not-found"), ("x", "invalid"))
        for request in (
            (WEIGHT, f"dns {backend}", {"weight": 1}),
            (SHRINK, "dns", {"backends": [backend]}),
        )
    ),
    ((SHRINK, "dns", {"backends": ["10.244.0.5:99"]}), "not-found", "did you mean 10.244.0.5?"),
    ((SHRINK, "dns", {"backends": ["10.244.0.5", "10.244.0.9"]}), "not-found", ""),
    *(
        ((SHRINK, "dns", {"backends": names}), "malformed", "")
        for names in (None, "10.244.0.5", [1], {"a": 1})
    ),
    *(
        ((GROW, "dns", {"backends": [backend]}), kind, "")
        for backend, kind in (
            ("10.244.0.5@3", "conflict"),
            ("10.244.0.6", "conflict"),
            ("10.244.0.5:53", "invalid"),
            ("x", "invalid"),
            ("fd00::1", "invalid"),
            ({"address": "10.244.0.7", "size": 1}, "invalid"),
        )
    ),
    ((GROW, "dns", {"backends": None}), "malformed", ""),
    ((APPLY, "", {"services": None}), "malformed", ""),
    ((APPLY, "", {"services": {}}), "malformed", ""),
    ((APPLY, "", {"services": [WEB, WEB]}), "invalid", ""),
    ((APPLY, "", {"services": [WEB, WEB | {"name": "twin"}]}), "conflict", ""),
    ((APPLY, "", {"services": [WEB, DNS | {"name": "grab", "address": "10.96.0.20"}]}), "conflict", ""),
    ((APPLY, "", {"services": [DNS | {"name": "grab"}]}), "conflict", ""),
    ((APPLY, "", {"services": [WEB | {"name": "web2"}, {"name": "bad"}]}), "invalid", ""),
    # A backend that is a virtual IP, and a virtual IP that is a backend.
    (
        (ADD, "", {"service": web(address="10.96.0.31") | {"name": "x", "fallback": ["10.96.0.10:80"]}}),
        "conflict",
        STRAY,
    ),
    ((SET, "web", {"service": {"backends": ["10.96.0.10:53"]}}), "conflict", STRAY),
    ((GROW, "web", {"backends": ["10.96.0.10"]}), "conflict", STRAY),
    ((APPLY, "", {"services": [web("10.96.0.10:53")]}), "conflict", STRAY),
    ((APPLY, "", {"services": [DNS, web("10.96.0.10:53")], "prune": True}), "conflict", STRAY),
    ((ADD, "", {"service": web(address="10.244.0.6") | {"name": "taken"}}), "conflict", "a backend of dns"),
    ((SET, "web", {"service": {"address": "10.244.0.6"}}), "conflict", "a backend of dns"),
    ((APPLY, "", {"services": [web(address="10.244.0.6")]}), "conflict", "a backend of dns"),
    ((WEIGHT, "named srv:_x._tcp.a.b", {"weight": 7}), "invalid", "has the weights of its records"),
    ((SHRINK, "named", {"backends": ["dns:a.b:81"]}), "not-found", "did you mean dns:a.b:80?"),
]


def test_what_is_refused_changes_nothing_and_says_why_or_what_to_do() -> None:
    named = web("srv:_x._tcp.a.b", "dns:a.b:80", address="10.96.0.33") | {"name": "named"}

    async def story(vipd: Vipd) -> None:
        before = await begin(vipd, DNS, web(), named)
        differing = []
        for request, kind, words in REFUSED:
            answer = await ask(vipd, request)
            error = answer.body.get("error", {})
            said = " ".join(str(error.get(key)) for key in ("what", "why", "hint"))
            if answer.kind != kind or words not in said:
                differing.append((request[1:], answer.kind, said))
        assert not differing
        assert await stored(vipd) == before

    running(story, with_filed)


def test_every_problem_of_a_request_is_told_at_once_with_its_place() -> None:
    async def story(vipd: Vipd) -> None:
        many = await vipd.add({"address": "10.96.0.300", "ports": ["99999/tcp"], "colour": 1})
        assert len(many.body["error"]["problems"]) == 3
        one = (await vipd.add(DNS | {"colour": "red"})).body["error"]
        assert one["what"] == 'unknown key "colour"'
        assert one["problems"] == [f"{one['what']}; {one['hint']}"]
        (placed,) = (await vipd.add(DNS | {"backends": ["10.244.0.5", "oops"]})).body["error"]["problems"]
        assert placed.startswith("backends[1]: ")
        specs = [{"name": name, "address": name, "ports": [1]} for name in ("x", "y")]
        both = "\n".join((await vipd.ask("POST", "/v1/apply", {"services": specs})).body["error"]["problems"])
        assert '"x"' in both
        assert '"y"' in both

    running(story)


@pytest.mark.parametrize("fallback", [False, True])
def test_what_names_resolved_to_is_neither_exported_nor_stored(fallback: bool) -> None:
    backends = ["10.244.0.5", {"dns": "a.b", "port": 80}]
    keys: Json = {"fallback": {"backends": backends}} if fallback else {"backends": backends}
    served = {key: value for key, value in DNS.items() if key != "backends"} | keys

    async def story(vipd: Vipd) -> None:
        vipd.names["dns:a.b"] = ["10.244.7.7"]
        await vipd.add(served)
        await vipd.until(lambda: "10.244.7.7" in str(vipd.kernel.serving()) or fallback)
        grown = await vipd.ask("PATCH", "/v1/services/dns", {"service": {"affinity": "client-ip"}})
        assert grown.status == 200, grown
        assert (await stored(vipd))["dns"] == served | {"affinity": "client-ip"}
        assert "10.244.7.7" not in (vipd.state_dir / "services.yaml").read_text()

    running(story, with_filed)


def test_what_an_earlier_version_stored_may_still_be_mended() -> None:
    def prepare(vipd: Vipd) -> None:
        vipd.state_dir.mkdir()
        (vipd.state_dir / "services.yaml").write_text(
            "apiVersion: vipd/v1\nservices:\n"
            "  - {name: dns, address: 10.96.0.10, ports: [53/udp], backends: [10.244.0.5]}\n"
            "  - {name: web, address: 10.96.0.30, ports: [80/tcp], backends: [10.96.0.10, 10.244.0.9]}\n"
        )

    async def story(vipd: Vipd) -> None:
        for request in (
            (WEIGHT, "web 10.244.0.9", {"weight": 2}),
            (SHRINK, "web", {"backends": ["10.96.0.10"]}),
        ):
            answer = await ask(vipd, request)
            assert answer.body.get("changed"), answer
        assert (await stored(vipd))["web"]["backends"] == [{"address": "10.244.0.9", "weight": 2}]

    running(story, prepare)


def test_the_same_declaration_has_the_same_version() -> None:
    async def story(vipd: Vipd) -> None:
        await vipd.add(DNS)
        versions = [(await vipd.ask("GET", "/v1/services/dns")).body["version"]]
        for fallback in ("drop", None):
            path = f"/v1/services/dns?version={versions[-1]}"
            assert (await vipd.ask("PATCH", path, {"service": {"fallback": fallback}})).status == 200
            versions.append((await vipd.ask("GET", "/v1/services/dns")).body["version"])
        assert versions[0] == versions[2] != versions[1]

    running(story)
