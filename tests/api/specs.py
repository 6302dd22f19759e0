"""Services for requests to the API, and what their answers come to."""

from __future__ import annotations

from tests.lab.inside import Answer, Vipd, declare

DNS: dict[str, object] = {
    "name": "kube-system/kube-dns",
    "address": ["10.96.0.10", "fd00:0:10::10"],
    "ports": ["53/udp"],
    "backends": ["10.244.0.5", {"address": "10.244.0.6", "weight": 2}, "fd01::5"],
}
WEB: dict[str, object] = {
    "name": "web",
    "address": "10.96.0.11",
    "ports": ["80/tcp"],
    "backends": ["10.244.0.7"],
}


def actions(answer: Answer) -> dict[str, str]:
    """What a change did, by name."""
    assert answer.status == 200, answer.body
    return {result["name"]: result["action"] for result in answer.body["results"]}


def stored(vipd: Vipd) -> set[str]:
    """The services that are on disk, which a restarted vipd would read."""
    path = vipd.state_dir / "services.yaml"
    if not path.exists():
        return set()
    declared = declare(path.read_bytes(), str(path))
    assert not declared.problems, "the store's own file is always a good declaration"
    return {service.name for service in declared.services}
