from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from tests.model.samples import service
from vipd.declaration import operations
from vipd.declaration.operations import Outcome, RefusedError
from vipd.declaration.problems import Problem
from vipd.model.service import Backend, RejectAction, Service

DNS: dict[str, object] = {
    "name": "dns",
    "address": "10.96.0.10",
    "ports": ["53/udp"],
    "backends": ["10.244.0.5", {"address": "10.244.0.6", "weight": 2}],
}
FILED = service("filed", "10.96.0.20", "/etc/vipd/services.d/f.yaml", 12)


def world(*specs: object) -> tuple[dict[str, Service], dict[str, Service]]:
    """A snapshot with one service of a file, and the store with these services."""
    stored: Mapping[str, Service] = {}
    for spec in specs or (DNS,):
        stored = operations.add(stored, stored, spec).stored
    return {**stored, FILED.name: FILED}, dict(stored)


def applied(
    snapshot: Mapping[str, Service], stored: Mapping[str, Service], specs: object, prune: bool
) -> Outcome:
    """What applying these services comes to."""
    return operations.apply(snapshot, stored, operations.parse_services(specs), prune)


def refused(change: Callable[[], Outcome]) -> RefusedError:
    """The refusal that a change meets; everything that is stored is as before."""
    with pytest.raises(RefusedError) as caught:
        change()
    return caught.value


def test_a_new_service_is_created_beside_the_others() -> None:
    snapshot, stored = world()
    outcome = operations.add(snapshot, stored, {"address": "10.96.0.11", "ports": ["80/tcp"]})
    assert outcome.results == {"10.96.0.11:80/tcp": "created"}
    assert set(outcome.stored) == {"dns", "10.96.0.11:80/tcp"}
    assert set(stored) == {"dns"}, "the caller's own mapping is untouched"


def test_the_same_service_again_is_unchanged() -> None:
    snapshot, stored = world()
    outcome = operations.add(snapshot, stored, DNS)
    assert outcome.results == {"dns": "unchanged"}
    assert not outcome.changed


def test_another_service_of_a_taken_name_is_a_conflict_with_a_way_out() -> None:
    snapshot, stored = world()
    error = refused(lambda: operations.add(snapshot, stored, {**DNS, "affinity": "client-ip"}))
    assert error.kind == "conflict"
    assert "vipctl set dns" in error.hint


@pytest.mark.parametrize("name", [{}, {"name": "other"}])
@pytest.mark.parametrize(
    ("backends", "hint"),
    [
        ([], "vipctl describe dns shows it; vipctl add-backend dns ADDR adds to it"),
        (
            ["10.244.0.5", "10.244.9.9"],
            "vipctl describe dns shows it; vipctl add-backend dns 10.244.9.9 adds to it",
        ),
        (["10.244.0.5"], "vipctl describe dns shows it"),
    ],
)
def test_who_adds_a_service_that_is_there_is_told_how_to_add_backends(
    name: dict[str, object], backends: list[object], hint: str
) -> None:
    error = refused(lambda: operations.add(*world(), {**DNS, **name, "backends": backends}))
    assert (error.kind, error.hint) == ("conflict", hint)


def test_what_a_file_has_is_not_to_be_had_by_adding_backends() -> None:
    by_frontend = {"address": "10.96.0.20", "ports": ["53/udp"], "backends": ["10.244.9.9"]}
    assert "add-backend" not in refused(lambda: operations.add(*world(), by_frontend)).hint
    by_name = {**by_frontend, "name": "filed"}
    assert (
        refused(lambda: operations.add(*world(), by_name)).hint == "edit /etc/vipd/services.d/f.yaml, line 12"
    )


def test_a_backend_of_another_port_is_hinted_at() -> None:
    assert refused(lambda: operations.remove_backends(*world(), "dns", ["10.244.0.5:99"])).hint == (
        "did you mean 10.244.0.5?"
    )


@pytest.mark.parametrize(("address", "holder"), [("10.96.0.10", "dns"), ("10.96.0.20", "filed")])
def test_a_taken_frontend_is_a_conflict_that_names_the_holder(address: str, holder: str) -> None:
    snapshot, stored = world()
    error = refused(
        lambda: operations.add(snapshot, stored, {**DNS, "name": "other", "address": ["10.96.7.7", address]})
    )
    assert error.kind == "conflict"
    assert holder in error.what
    assert ("file:/etc" in error.why) == (holder == "filed")


@pytest.mark.parametrize("spec", [None, 7, "x", [], {}, {"address": "10.96.0.12"}, {**DNS, "colour": "red"}])
def test_what_is_no_service_is_invalid_with_problems(spec: object) -> None:
    error = refused(lambda: operations.add({}, {}, spec))
    assert error.kind == "invalid"
    assert error.problems


def test_every_problem_of_a_service_is_told_at_once() -> None:
    spec = {"address": "10.96.0.300", "ports": ["99999/tcp"], "colour": 1}
    assert len(refused(lambda: operations.add({}, {}, spec)).problems) == 3


def test_one_problem_of_a_request_is_the_whole_message_and_names_no_file() -> None:
    error = refused(lambda: operations.add({}, {}, {**DNS, "colour": "red"}))
    assert error.what == 'unknown key "colour"'
    assert error.hint.startswith("known: ")
    assert [str(problem) for problem in error.problems] == [f"{error.what}; {error.hint}"]


@pytest.mark.parametrize("target", ["dns", "10.96.0.10:53/udp", "10.96.0.10"])
def test_a_service_is_found_by_name_and_by_frontend(target: str) -> None:
    assert operations.find(world()[0], target).name == "dns"


@pytest.mark.parametrize("target", ["dn", "10.96.0.10:53/tcp", "10.96.0.99", "", "a b", "[fd00::1]:1/udp"])
def test_an_unknown_target_is_not_found(target: str) -> None:
    snapshot, stored = world()
    for change in (
        lambda: operations.remove(snapshot, stored, target),
        lambda: operations.change(snapshot, stored, target, {}),
        lambda: operations.set_weight(snapshot, stored, target, "10.244.0.5", 1),
        lambda: operations.add_backends(snapshot, stored, target, ["10.244.0.7"]),
        lambda: operations.remove_backends(snapshot, stored, target, ["10.244.0.5"]),
    ):
        assert refused(change).kind == "not-found"


def test_what_a_file_owns_is_not_changed_and_the_file_is_named() -> None:
    snapshot, stored = world()
    for change in (
        lambda: operations.remove(snapshot, stored, "filed"),
        lambda: operations.change(snapshot, stored, "filed", {"affinity": "client-ip"}),
        lambda: operations.set_weight(snapshot, stored, "filed", "10.244.0.5", 1),
        lambda: operations.add_backends(snapshot, stored, "filed", ["10.244.0.7"]),
        lambda: operations.remove_backends(snapshot, stored, "filed", ["10.244.0.5"]),
        lambda: applied(snapshot, stored, [{**DNS, "name": "filed"}], False),
    ):
        error = refused(change)
        assert error.kind == "owned"
        assert "/etc/vipd/services.d/f.yaml, line 12" in error.hint


def test_fields_are_set_the_others_kept_and_null_clears() -> None:
    snapshot, stored = world({**DNS, "affinity": "client-ip", "fallback": "drop"})
    outcome = operations.change(snapshot, stored, "dns", {"affinity": None, "backends": ["10.244.9.9"]})
    changed = outcome.stored["dns"]
    assert outcome.results == {"dns": "changed"}
    assert changed.affinity is None
    assert changed.refusal is RejectAction.DROP
    assert [b.address for b in changed.backends] == ["10.244.9.9"]


@pytest.mark.parametrize("fields", [{}, {"name": "dns"}, {"affinity": None}, {"address": "10.96.0.10"}])
def test_setting_what_is_so_already_is_unchanged(fields: object) -> None:
    assert not operations.change(*world(), "dns", fields).changed


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        (None, "malformed"),
        ([], "malformed"),
        ({"name": "other"}, "conflict"),
        ({"address": "10.96.0.20"}, "conflict"),
        ({"address": None}, "invalid"),
        ({"colour": "red"}, "invalid"),
        ({"backends": ["10.244.0.5", "10.244.0.5"]}, "invalid"),
    ],
)
def test_changes_that_cannot_be_are_refused(fields: object, kind: str) -> None:
    assert refused(lambda: operations.change(*world(), "dns", fields)).kind == kind


def test_only_the_version_that_the_client_has_seen_is_changed() -> None:
    snapshot, stored = world()
    version = operations.version_of(snapshot["dns"])
    done = operations.change(snapshot, stored, "dns", {"fallback": "drop"}, version=version)
    changed = {**snapshot, **done.stored}
    error = refused(
        lambda: operations.change(changed, done.stored, "dns", {"affinity": None}, version=version)
    )
    assert error.kind == "changed"
    undone = operations.change(changed, done.stored, "dns", {"fallback": None}).stored["dns"]
    assert operations.version_of(undone) == version, "the same declaration has the same version"


def test_a_backend_that_registered_itself_is_no_other_version() -> None:
    service = world()[0]["dns"]
    joined = replace(service, backends=(*service.backends, Backend("10.244.0.9", registered=True)))
    assert operations.version_of(joined) == operations.version_of(service)


def test_a_weight_is_set() -> None:
    outcome = operations.set_weight(*world(), "dns", "10.244.0.5", 0)
    assert {b.address: b.weight for b in outcome.stored["dns"].backends} == {"10.244.0.5": 0, "10.244.0.6": 2}
    assert not operations.set_weight(*world(), "dns", "10.244.0.6", 2).changed


@pytest.mark.parametrize("weight", [None, -1, 65536, 1.0, "3", True, [1]])
def test_what_is_no_weight_is_invalid(weight: object) -> None:
    assert refused(lambda: operations.set_weight(*world(), "dns", "10.244.0.5", weight)).kind == "invalid"


@pytest.mark.parametrize(
    ("backend", "kind"), [("10.244.0.9", "not-found"), ("10.244.0.5:99", "not-found"), ("x", "invalid")]
)
def test_a_backend_that_is_not_there_is_told(backend: str, kind: str) -> None:
    assert refused(lambda: operations.set_weight(*world(), "dns", backend, 1)).kind == kind
    assert refused(lambda: operations.remove_backends(*world(), "dns", [backend])).kind == kind


def test_backends_are_added_after_those_that_are_there() -> None:
    specs = ["10.244.0.5", "10.244.0.7", {"address": "10.244.0.8", "port": 5353}]
    outcome = operations.add_backends(*world(), "dns", specs)
    addresses = [str(b) for b in outcome.stored["dns"].backends]
    assert addresses == ["10.244.0.5", "10.244.0.6", "10.244.0.7", "10.244.0.8:5353"]
    assert not operations.add_backends(*world(), "dns", ["10.244.0.5"]).changed


@pytest.mark.parametrize(
    ("specs", "kind"),
    [
        (["10.244.0.5@3"], "conflict"),
        (["10.244.0.6"], "conflict"),
        (["10.244.0.5:53"], "invalid"),
        (["x"], "invalid"),
        (["fd00::1"], "invalid"),
        ([{"address": "10.244.0.7", "size": 1}], "invalid"),
    ],
)
def test_backends_that_cannot_be_added_are_refused(specs: object, kind: str) -> None:
    assert refused(lambda: operations.add_backends(*world(), "dns", specs)).kind == kind


def test_a_request_to_add_backends_that_lacks_them_is_malformed() -> None:
    assert refused(lambda: operations.add_backends(*world(), "dns", None)).kind == "malformed"


def test_adding_backends_keeps_a_fallback() -> None:
    snapshot, stored = world({**DNS, "fallback": {"backends": ["10.244.9.9"]}})
    outcome = operations.add_backends(snapshot, stored, "dns", ["10.244.0.7"])
    assert [b.address for b in outcome.stored["dns"].fallback] == ["10.244.9.9"]


def test_backends_are_removed_all_or_none() -> None:
    outcome = operations.remove_backends(*world(), "dns", ["10.244.0.5"])
    assert [b.address for b in outcome.stored["dns"].backends] == ["10.244.0.6"]
    assert refused(
        lambda: operations.remove_backends(*world(), "dns", ["10.244.0.5", "10.244.0.9"])
    ).kind == ("not-found")
    assert operations.remove_backends(*world(), "dns", ["10.244.0.5", "10.244.0.6"]).changed


@pytest.mark.parametrize("names", [None, "10.244.0.5", [1], {"a": 1}])
def test_names_of_backends_must_be_a_list_of_text(names: object) -> None:
    assert refused(lambda: operations.remove_backends(*world(), "dns", names)).kind == "malformed"


def test_a_service_is_removed_and_the_others_stay() -> None:
    snapshot, stored = world(DNS, {"name": "web", "address": "10.96.0.11", "ports": [80]})
    outcome = operations.remove(snapshot, stored, "10.96.0.10:53/udp")
    assert outcome.results == {"dns": "removed"}
    assert set(outcome.stored) == {"web"}


WEB: dict[str, object] = {"name": "web", "address": "10.96.0.11", "ports": [80]}


def test_apply_creates_changes_and_keeps() -> None:
    outcome = applied(*world(DNS, WEB), [{**WEB, "ports": [81]}, {**WEB, "name": "new"}], False)
    assert outcome.results == {"web": "changed", "new": "created"}
    assert set(outcome.stored) == {"dns", "web", "new"}


def test_apply_with_prune_removes_what_is_not_named_and_nothing_of_files() -> None:
    outcome = applied(*world(DNS, WEB), [WEB], True)
    assert outcome.results == {"web": "unchanged", "dns": "removed"}
    assert set(outcome.stored) == {"web"}
    assert applied(*world(DNS, WEB), [], True).stored == {}
    assert not applied(*world(DNS, WEB), [WEB, DNS], True).changed


def test_apply_may_move_a_frontend_from_one_service_to_another() -> None:
    specs = [{**WEB, "address": "10.96.0.10", "ports": ["53/udp"]}, {**DNS, "address": "10.96.0.11"}]
    outcome = applied(*world(DNS, WEB), specs, False)
    assert outcome.results == {"web": "changed", "dns": "changed"}


@pytest.mark.parametrize(
    ("specs", "kind"),
    [
        (None, "malformed"),
        ({}, "malformed"),
        ([WEB, WEB], "invalid"),
        ([WEB, {**WEB, "name": "twin"}], "conflict"),
        ([WEB, {**WEB, "name": "grab", "address": "10.96.0.20", "ports": ["53/udp"]}], "conflict"),
        ([{**WEB, "name": "grab", "address": "10.96.0.10", "ports": ["53/udp"]}], "conflict"),
        ([WEB, {"name": "bad"}], "invalid"),
    ],
)
def test_apply_refuses_all_when_one_cannot_be(specs: object, kind: str) -> None:
    snapshot, stored = world()
    assert refused(lambda: applied(snapshot, stored, specs, False)).kind == kind
    assert set(stored) == {"dns"}


def test_apply_tells_the_problems_of_every_service_at_once() -> None:
    specs = [{"name": "one", "address": "x", "ports": [1]}, {"name": "two", "address": "y", "ports": [1]}]
    problems = "\n".join(map(str, refused(lambda: applied({}, {}, specs, False)).problems))
    assert '"x"' in problems
    assert '"y"' in problems


def test_a_problem_says_where_in_the_service_it_is() -> None:
    error = refused(lambda: operations.add({}, {}, {**DNS, "backends": ["10.244.0.5", "oops"]}))
    (problem,) = error.problems
    assert isinstance(problem, Problem)
    assert problem.path == "backends[1]"


def web(*backends: str, address: str = "10.96.0.30") -> dict[str, object]:
    return {"name": "web", "address": address, "ports": ["80/tcp"], "backends": list(backends)}


def test_a_backend_that_is_a_virtual_ip_is_refused_with_those_behind_it() -> None:
    snapshot, stored = world(DNS, web())
    spare = {
        "name": "more",
        "address": "10.96.0.31",
        "ports": ["80/tcp"],
        "fallback": {"backends": ["10.96.0.10:80"]},
    }
    stray: dict[str, object] = {"backends": ["10.96.0.10:53"]}
    for change in (
        lambda: operations.add(snapshot, stored, spare),
        lambda: operations.change(snapshot, stored, "web", stray),
        lambda: operations.add_backends(snapshot, stored, "web", ["10.96.0.10"]),
        lambda: applied(snapshot, stored, [web("10.96.0.10:53")], prune=False),
        lambda: applied(snapshot, stored, [DNS, web("10.96.0.10:53")], prune=True),
    ):
        refusal = refused(change)
        assert refusal.kind == "conflict"
        assert "backend 10.96.0.10 is a virtual IP, that of dns" in refusal.what
        assert refusal.hint == "name the backends of dns instead: 10.244.0.5, 10.244.0.6"


def test_a_virtual_ip_that_is_a_backend_is_refused() -> None:
    snapshot, stored = world(DNS, web())
    for change in (
        lambda: operations.add(snapshot, stored, web(address="10.244.0.6") | {"name": "taken"}),
        lambda: operations.change(snapshot, stored, "web", {"address": "10.244.0.6"}),
        lambda: applied(snapshot, stored, [web(address="10.244.0.6")], prune=False),
    ):
        refusal = refused(change)
        assert refusal.kind == "conflict"
        assert "10.244.0.6 is the address of a backend of dns" in refusal.what
    # What leaves in the same step is in nobody's way.
    assert applied(snapshot, stored, [web(address="10.244.0.6")], prune=True).changed


def test_what_has_been_stored_so_before_may_still_be_mended() -> None:
    snapshot, stored = world(DNS, web("10.244.0.9"))
    wrong = replace(stored["web"], backends=(Backend("10.96.0.10"), Backend("10.244.0.9")))
    snapshot["web"] = stored["web"] = wrong
    assert operations.set_weight(snapshot, stored, "web", "10.244.0.9", 2).changed
    assert operations.remove_backends(snapshot, stored, "web", ["10.96.0.10"]).changed
