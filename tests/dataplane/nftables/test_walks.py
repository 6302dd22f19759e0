"""Whatever was there before, the kernel ends as a cold start would leave it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.dataplane.namespace import Namespace
from tests.dataplane.nftables.declared import OWN, state, walks
from tests.dataplane.nftables.listed import tables
from tests.lab.examples import examples
from tests.lab.inside import Synced, synced
from vipd.model.service import Service

pytestmark = pytest.mark.root

CIDRS = ["10.20.0.0/16", "fd00:20::/64"]


def vipd_in(namespace: Namespace, state_dir: Path) -> Synced:
    return synced("nftables", namespace.name, state_dir, own=OWN, cluster_cidrs=CIDRS)


@given(walks, st.lists(st.sampled_from(["", "", "restart", "doubt"]), min_size=5, max_size=5))
@settings(
    max_examples=examples(20),
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
def test_every_walk_ends_like_a_cold_start(
    tmp_path_factory: pytest.TempPathFactory, states: list[tuple[Service, ...]], between: list[str]
) -> None:
    directory = tmp_path_factory.mktemp("state")
    with Namespace() as one, Namespace() as other:
        walked, fresh = (vipd_in(each, directory) for each in (one, other))
        for services, event in zip(states, between, strict=False):
            walked.become(*services)
            if event == "restart":
                walked.restart()
                assert walked.pending() == ""
            elif event == "doubt":
                walked.doubt()
        fresh.become(*states[-1])
        assert not walked.step(), "the last step had left something to do"
        walked.doubt()
        assert walked.pending() == ""
        listed = tables(one)
        assert listed == tables(other)
        assert not {name for name in walked.names() if name not in listed}, "names that users are shown"
        walked.become()
        assert tables(one).strip() == ""


@given(st.lists(state().filter(bool), min_size=2, max_size=4), st.randoms())
@settings(
    max_examples=examples(10),
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
def test_without_new_chains_it_ends_so_too_and_nothing_is_refused(
    tmp_path_factory: pytest.TempPathFactory, states: list[tuple[Service, ...]], random: Random
) -> None:
    """The second time every chain is there, since nothing is cleared away: changes are of elements alone, and
    the kernel refuses none of them."""
    directory = tmp_path_factory.mktemp("state")
    with Namespace() as one, Namespace() as other:
        walked, fresh = (vipd_in(each, directory) for each in (one, other))
        again = random.sample(states, len(states))
        for services in (*states, *again):
            walked.declare(services)
            walked.step(tidy=False)
        assert walked.netlink_refusals == []
        walked.doubt()
        assert walked.pending() == "", "what is read is what was written"
        walked.step()
        fresh.become(*again[-1])
        assert tables(one) == tables(other)
