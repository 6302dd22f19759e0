"""Files that claim the same: who serves, and what the others are told."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from itertools import permutations
from pathlib import Path
from random import Random

import pytest

from tests.control.test_step_cost import counted
from tests.lab.inside import Vipd, running
from tests.model.samples import block

VIP = "10.96.0.10"
Saves = dict[str, tuple[str, ...] | None]
"""Files, each with its services; None: it cannot be read."""


def one(name: str, address: str = VIP, *backends: str) -> str:
    return block(address, name, *(backends or ("10.244.0.5",)))


def save(vipd: Vipd, saves: Saves) -> None:
    for name, blocks in saves.items():
        vipd.declare(*(["  - {address: 10.96.0.300}\n"] if blocks is None else blocks), name=f"{name}.yaml")


async def problems(vipd: Vipd) -> dict[str, list[str]]:
    """What each file that is refused is told."""
    sources = (await vipd.status())["sources"]
    return {
        unit["unit"].rpartition("/")[2].removesuffix(".yaml"): [
            problem.replace(f"{vipd.services_dir}/", "") for problem in unit["problems"]
        ]
        for source in sources
        for unit in source["refused"]
    }


def outcome(*history: Saves) -> tuple[set[str], dict[str, list[str]]]:
    """What serves after these saves, one after the other, and the problems of each file. The first is there
    when vipd starts."""

    async def story(vipd: Vipd) -> tuple[set[str], dict[str, list[str]]]:
        for saves in history[1:]:
            save(vipd, saves)
            await vipd.reload()
        return vipd.kernel.names(), await problems(vipd)

    # In simulated time nobody looks between two saves.
    return running(story, lambda vipd: save(vipd, history[0]), simulated=True)


@pytest.mark.parametrize(("incumbent", "newcomer"), [("a", "b"), ("b", "a")])
def test_an_incumbent_keeps_its_frontend_whichever_file_sorts_first(incumbent: str, newcomer: str) -> None:
    served, told = outcome({incumbent: (one("old"),)}, {newcomer: (one("new"), one("more", "10.96.0.99"))})
    assert served == {"old"}, "the newcomer is refused as a whole file"
    assert told == {
        newcomer: [
            (
                f"{newcomer}.yaml:3: new: {VIP}:53/udp already belongs to old at {incumbent}.yaml:3; "
                "one address, port and protocol can serve once"
            )
        ]
    }
    served, told = outcome({incumbent: (one("dns"),)}, {newcomer: (one("dns", "10.96.0.11"),)})
    assert served == {"dns"}
    assert f"{incumbent}.yaml:3" in told[newcomer][0], "a name that is taken is refused, too"
    served, told = outcome({incumbent: (one(""),)}, {newcomer: (one("").replace("5]", "6]"),)})
    assert told == {
        newcomer: [
            (
                f"{newcomer}.yaml:3: {VIP}:53/udp already belongs to the service at {incumbent}.yaml:3; "
                "one address, port and protocol can serve once"
            )
        ]
    }


def test_a_refused_file_goes_on_with_its_last_accepted_version() -> None:
    after = (one("b", "10.96.0.11", "10.244.9.9"), one("grab"))
    served, told = outcome({"a": (one("old"),), "b": (one("b", "10.96.0.11"),)}, {"b": after})
    assert (served, set(told)) == ({"old", "b"}, {"b"})
    served, told = outcome({"a": (one("old"),)}, {"a": None})
    assert (served, set(told)) == ({"old"}, {"a"})


def test_of_newcomers_the_first_name_wins() -> None:
    assert outcome({"a": (one("a"),), "b": (one("b"),)})[0] == {"a"}
    assert outcome({}, {"b": (one("b"),), "a": (one("a"),)})[0] == {"a"}


@pytest.mark.parametrize(("source", "target"), [("a", "b"), ("b", "a")])
def test_a_service_may_move_to_another_file_and_two_may_swap(source: str, target: str) -> None:
    leave: Saves = {source: ()}
    come: Saves = {target: (one("dns"),)}
    for saves in permutations((leave, come)):
        assert outcome({source: (one("dns"),)}, *saves, {}) == ({"dns"}, {})
    x, y = one("x"), one("y", "10.96.0.11")
    assert outcome({"a": (x,), "b": (y,)}, {"a": (y,), "b": (x,)}) == ({"x", "y"}, {})


def test_a_file_that_is_sent_back_takes_its_claims_back_from_a_newcomer() -> None:
    """It gave up an address, but asks for what another has; so nobody else can have the address."""
    served, told = outcome(
        {"a": (one("a"),), "c": (one("c", "10.96.0.50"),)},
        {"a": (one("a", "10.96.0.50"),), "b": (one("b"),)},
    )
    assert (served, set(told)) == ({"a", "c"}, {"a", "b"})


@pytest.mark.parametrize(("vips", "users"), [("a", "b"), ("b", "a")])
def test_who_names_a_virtual_ip_as_a_backend_is_refused(vips: str, users: str) -> None:
    dns = one("dns", VIP, "10.244.0.5", "10.244.0.6")
    web = one("web", "10.96.0.99", "10.244.0.7", VIP)
    served, told = outcome({vips: (dns,)}, {users: (web,)})
    assert served == {"dns"}
    assert told == {
        users: [
            (
                f"{users}.yaml:3: web: the backend {VIP} is a virtual IP, that of dns at {vips}.yaml:3: "
                "a packet is translated only once; name the backends of dns instead: 10.244.0.5, 10.244.0.6"
            )
        ]
    }
    assert outcome({vips: (dns,)}, {users: (web,)}, {vips: ()}, {}) == ({"web"}, {})


def test_a_backend_keeps_nobody_from_its_address() -> None:
    dns, web = one("dns"), one("web", "10.96.0.99", "10.244.0.7", VIP)
    for history in permutations(({"a": (dns,)}, {"b": (web,)})):
        assert outcome({**history[0], **history[1]})[0] == {"dns", "web"}

    async def story(vipd: Vipd) -> None:
        save(vipd, {"a": (dns,)})
        await vipd.reload()
        assert vipd.kernel.names() == {"dns", "web"}
        (warning,) = (await vipd.status())["warnings"]
        start = f"{VIP}: both a virtual IP and the address of a backend of another service"
        assert warning.startswith(start)
        save(vipd, {"a": ()})
        await vipd.reload()
        assert (await vipd.status())["warnings"] == []

    running(story, lambda vipd: save(vipd, {"b": (web,)}))


def test_fallbacks_count_and_external_addresses_do_not() -> None:
    spare = one("web", "10.96.0.99").replace("}\n", f", fallback: {{backends: [{VIP}]}}}}\n")
    outside = one("dns").replace("address:", "external_addresses:")
    for vip, user, refused in ((one("dns"), spare, True), (outside, spare, False)):
        assert bool(outcome({"a": (vip,)}, {"b": (user,)})[1]) is refused


def test_many_users_of_an_address_are_all_told() -> None:
    users: Saves = {f"x{n}": (one(f"x{n}", f"10.97.0.{n}", VIP),) for n in range(100)}
    served, told = outcome({"a": (one("dns"),)}, users)
    assert served == {"dns"}
    assert told.keys() == users.keys()
    assert all(len(found) == 1 for found in told.values())


ADDRESSES = [f"10.96.0.{n}" for n in range(1, 6)]


def some_services(random: Random) -> tuple[str, ...] | None:
    """What a file may declare: it does not contradict itself."""
    if random.random() < 0.15:
        return None
    names, addresses = random.sample("abcde", 3), random.sample(ADDRESSES, 3)
    backends = [a for a in ("10.244.0.5", *ADDRESSES) if a not in addresses]
    count = random.randrange(4)
    return tuple(one(n, a, random.choice(backends)) for n, a in zip(names[:count], addresses, strict=False))


def served(vipd: Vipd) -> dict[str, str]:
    """The address of each service; none is there twice."""
    rules = vipd.kernel.rules.values()
    found = {f.key.service: f.addresses[0] for f in rules}
    assert len(found) == len(rules) == len(set(found.values()))
    return found


async def saved(vipd: Vipd, random: Random, declared: dict[str, str]) -> None:
    """Some files change; what is in all of them is noted in `declared`."""
    before, after = await problems(vipd), declared.copy()
    for name in random.sample("pqrs", random.randint(1, 3)):
        blocks = some_services(random)
        save(vipd, {name: blocks})
        after[name] = "".join(blocks or ())
    await vipd.reload()
    refused, now = await problems(vipd), served(vipd)
    for name in after.keys() - refused:
        names = {service for service in "abcde" if f"name: {service}," in after[name]}
        assert names <= now.keys(), "what is not refused serves"
    for name in declared.keys() & after.keys():
        if declared[name] == after[name] and name not in before:
            names = {service for service in "abcde" if f"name: {service}," in declared[name]}
            assert names <= now.keys(), "an incumbent of a file that is the same goes on"
    declared.update(after)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_saved_nothing_serves_twice_and_a_restart_comes_to_the_same(seed: int) -> None:
    random = Random(seed)

    async def story(vipd: Vipd) -> object:
        declared: dict[str, str] = {}
        for _ in range(12):
            await saved(vipd, random, declared)
        return served(vipd), set(await problems(vipd))

    async def restarted(vipd: Vipd) -> object:
        return served(vipd), set(await problems(vipd))

    with tempfile.TemporaryDirectory(prefix="vipd-") as directory:
        before = running(story, root=Path(directory))
        assert running(restarted, root=Path(directory)) == before


def calls(start: Iterable[Saves], *, then: Iterable[Saves] = ()) -> int:
    """How many functions are called while vipd takes in these files: with the first it starts."""

    async def story(vipd: Vipd) -> int:
        for saves in then:
            save(vipd, saves)
        with counted("c_call") as made:
            await vipd.reload()
        return made[0]

    def prepare(vipd: Vipd) -> None:
        for saves in start:
            save(vipd, saves)

    return running(story, prepare)


def numbered(name: str, number: int, *backends: str) -> str:
    return one(f"{name}{number}", f"10.97.{number >> 8}.{number & 255}", *backends)


def one_by_one(number: int) -> tuple[Saves, Saves]:
    """Each newcomer wants what an incumbent has."""
    held: Saves = {f"a{n}": (numbered("a", n),) for n in range(number)}
    return held, {f"b{n}": (numbered("b", n),) for n in range(number)}


def one_after_the_other(number: int) -> tuple[Saves, Saves]:
    """Each wants what the next one has, and the last one what it cannot have."""
    held: Saves = {f"{n:06}": (numbered("s", n),) for n in range(number)}
    held["last"] = (numbered("s", number),)
    return held, {f"{n:06}": (numbered("s", n + 1),) for n in range(number)}


def a_file_beside_its_copy(number: int) -> tuple[Saves, Saves]:
    services = tuple(numbered("s", n) for n in range(10 * number))
    return {"b": services}, {"a": services}


def many_users_of_one_address(number: int) -> tuple[Saves, Saves]:
    return {"vip": (one("vip"),)}, {f"u{n}": (numbered("u", n, VIP),) for n in range(number)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [one_by_one, one_after_the_other, a_file_beside_its_copy, many_users_of_one_address],
    ids=lambda shape: shape.__name__,
)
def test_conflicts_cost_what_is_claimed(shape: Callable[[int], tuple[Saves, Saves]]) -> None:
    # Twice, for what runs beside it counts, too.
    few, many = (min(calls([a], then=[b]) for _ in range(2)) for a, b in (shape(10), shape(80)))
    assert many < 12 * few, "eight times as many cost some eight times as much, not 64 times"
