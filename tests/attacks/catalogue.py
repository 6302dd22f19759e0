"""All attacks, and those that are run together."""

from __future__ import annotations

import random
from types import ModuleType

from tests.attacks import by_api, by_etcd, by_files, by_network
from tests.attacks.attack import ATTACKS, Attack

MODULES = (by_api, by_etcd, by_files, by_network)
TOGETHER = (
    ("checks that wait for an hour", "registrations that come and go", "sixty readers of everything"),
    (
        "programs that answer just in time",
        "half requests to a health port",
        "dry runs of sixty thousand services",
    ),
    ("backends that flap", "registrations of 1 4 megabytes", "sixty requests for the state"),
    ("sixty thousand services", "keys with odd names", "subscribers who read nothing"),
    ("a folder that is emptied", "names with answers of 64 kilobytes", "reloads all the time"),
    ("a thousand checks ten times a second", "a key that changes all the time", "overrides all the time"),
)
"""Three different budgets each. At most one writes the attacker's file, which another would replace."""
EACH_TIME = (
    ("more names than are looked up",),
    ("half requests to a health port",),
    ("pipes and links among the files", "backends at others future addresses"),
)
"""What is tried by day, some at the same time."""
RANDOM_COMBINATIONS = 3


def combinations(seed: int = 0) -> list[tuple[Attack, ...]]:
    """The chosen combinations of three attacks, and some at random, in an order that the seed gives."""
    source = random.Random(seed)
    chosen = [tuple(ATTACKS[name] for name in names) for names in TOGETHER]
    groups = [_attacks(by_files, by_network), _attacks(by_api), _attacks(by_etcd)]
    chosen += [tuple(source.choice(group) for group in groups) for _ in range(RANDOM_COMBINATIONS)]
    source.shuffle(chosen)
    return chosen


def _attacks(*modules: ModuleType) -> list[Attack]:
    """The attacks of these modules that run with iptables, as those beside them do."""
    names = {module.__name__ for module in modules}
    return [
        each for each in ATTACKS.values() if each.run.__module__ in names and each.dataplane == "iptables"
    ]
