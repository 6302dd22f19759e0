"""All units of a daemon's life: what is looked at again, and what is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tests.model.samples import declared, service
from vipd.control.address_policy import AddressPolicy
from vipd.control.admission import Admission
from vipd.declaration.unit import Unit
from vipd.model.check import Check


class Looked:
    """Which checks the host was asked about."""

    def __init__(self) -> None:
        self.problems: tuple[str, ...] = ()
        self.asked = 0

    def __call__(self, _check: Check) -> tuple[str, ...]:
        self.asked += 1
        return self.problems


def served(admission: Admission) -> bool:
    """Whether the unit's candidate may serve."""
    return admission.units["a"].candidate.ok


def admitted(admission: Admission, units: Mapping[str, Unit], policy: AddressPolicy) -> set[str]:
    """The units that are other than before."""
    return admission.admit(admission.update_units([units], policy))


def test_of_a_unit_that_changes_only_what_is_new_is_looked_at() -> None:
    looked, admission = Looked(), Admission()
    policy = AddressPolicy(check_problems=looked)
    many = [service(f"s{n}", f"10.97.0.{n}") for n in range(1, 51)]
    first = Unit(declared(*many))
    assert admitted(admission, {"a": first}, policy) == {"a"}
    assert looked.asked == 50
    assert admitted(admission, {"a": first}, policy) == set()
    assert admitted(admission, {"a": Unit(first.candidate, first.candidate)}, policy) == {"a"}
    assert looked.asked == 50
    after = declared(*many[1:], service("new", "10.97.1.1"))
    assert admitted(admission, {"a": Unit(after, first.candidate)}, policy) == {"a"}
    assert looked.asked == 51


def test_with_another_policy_everything_is_looked_at_again() -> None:
    admission, units = Admission(), {"a": Unit(declared(service("web", "10.97.0.1")))}
    assert admitted(admission, units, AddressPolicy()) == {"a"}
    assert admitted(admission, units, AddressPolicy(("10.96.0.0/16",))) == {"a"}
    assert not served(admission)
    assert admitted(admission, units, AddressPolicy()) == {"a"}
    assert served(admission)


def test_a_service_that_did_not_change_keeps_no_other_of_its_file_from_changing() -> None:
    admission, held = Admission(), service("web", "10.97.0.1")
    accepted = declared(held)
    ours = AddressPolicy(host_addresses=("10.97.0.1",))
    admitted(admission, {"a": Unit(accepted, accepted)}, ours)
    assert served(admission)
    again = service("web", "10.97.0.1")
    admitted(admission, {"a": Unit(declared(again, service("dns", "10.97.0.2")), accepted)}, ours)
    assert served(admission), "the host took over its address after it was admitted"
    changed = replace(again, backends=())
    admitted(admission, {"a": Unit(declared(changed, service("dns", "10.97.0.2")), accepted)}, ours)
    assert served(admission), "what it has already is not judged again"
    moved = replace(again, addresses=("10.97.0.1", "10.97.0.3"))
    taken = replace(ours, host_addresses=("10.97.0.1", "10.97.0.3"))
    admitted(admission, {"a": Unit(declared(moved), accepted)}, taken)
    assert not served(admission), "what it claims anew is"
    assert admission.units["a"].accepted is accepted
    narrow = replace(ours, allowed=("10.96.0.0/16",))
    admitted(admission, {"a": Unit(declared(again), accepted)}, narrow)
    assert not served(admission), "the settings count for all"


def test_what_was_refused_is_looked_at_until_the_host_is_mended() -> None:
    looked, admission = Looked(), Admission()
    looked.problems = ("/bin/check: no such file; hint: install it",)
    policy, units = AddressPolicy(check_problems=looked), {"a": Unit(declared(service("web", "10.97.0.1")))}
    assert admitted(admission, units, policy) == {"a"}
    assert admitted(admission, units, policy) == set()
    assert not served(admission)
    looked.problems = ()
    assert admitted(admission, units, policy) == {"a"}
    assert served(admission)


def test_one_unit_in_place_of_another_is_one_gone_and_one_new() -> None:
    admission = Admission()
    admitted(admission, {"a": Unit(declared(service("web", "10.97.0.1")))}, AddressPolicy())
    units = {"b": Unit(declared(service("web", "10.97.0.1")))}
    assert admitted(admission, units, AddressPolicy(("10.0.0.0/8",))) == {"a", "b"}
    assert set(admission.units) == {"b"}
