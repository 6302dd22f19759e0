"""All attacks, and those that are run together."""

from __future__ import annotations

import random

from tests.attacks import by_api, by_etcd, by_files, by_network
from tests.attacks.attack import ATTACKS, Attack

MODULES = (by_api, by_etcd, by_files, by_network)
TOGETHER = (
    ("checks that wait for an hour", "names without an answer", "sixty readers of everything"),
    (
        "programs that answer just in time",
        "half requests to a health port",
        "dry runs of sixty thousand services",
    ),
    ("backends that flap", "registrations of 1 4 megabytes", "sixty requests for the state"),
    ("sixty thousand services", "answers of a byte a second", "subscribers who read nothing"),
    ("a folder that is emptied", "names with answers of 64 kilobytes", "reloads all the time"),
    (
        "a thousand checks ten times a second",
        "a file that changes fifty times a second",
        "overrides all the time",
    ),
)
"""Three different budgets each."""
RANDOM_COMBINATIONS = 3


def combinations(seed: int = 0) -> list[tuple[Attack, ...]]:
    """The chosen combinations of three attacks, and some at random, in an order that the seed gives."""
    source = random.Random(seed)
    chosen = [tuple(ATTACKS[name] for name in names) for names in TOGETHER]
    names = [name for name, each in ATTACKS.items() if each.dataplane == "iptables"]
    chosen += [tuple(ATTACKS[n] for n in source.sample(names, 3)) for _ in range(RANDOM_COMBINATIONS)]
    source.shuffle(chosen)
    return chosen
