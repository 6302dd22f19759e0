"""Whatever was there before, the kernel ends as a cold start would leave it."""

from __future__ import annotations

import socket
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.dataplane.namespace import Namespace
from tests.dataplane.nftables.declared import OWN, state, walks
from tests.dataplane.nftables.programmed import Inside, Programmed
from tests.lab.examples import examples
from vipd.control.selection import HostIdentity
from vipd.dataplane.nftables import writer
from vipd.model.service import Service

pytestmark = pytest.mark.root

Step = tuple[tuple[Service, ...], str]


def machine(inside: Inside, state_dir: Path) -> Programmed:
    return Programmed(
        inside, state_dir, host=HostIdentity(frozenset(OWN)), cluster_cidrs=["10.20.0.0/16", "fd00:20::/64"]
    )


@given(walks, st.lists(st.sampled_from(["", "", "restart", "forget"]), min_size=5, max_size=5))
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
        walked, fresh = machine(Inside(one.name), directory), machine(Inside(other.name), directory)
        for services, event in zip(states, between, strict=False):
            walked.become(*services)
            if event == "restart":
                walked.restart()
            elif event == "forget":
                walked.dataplane.invalidate_all()
        fresh.become(*states[-1])
        assert not walked.step(), "the last step had left something to do"
        walked.dataplane.invalidate_all()
        assert str(walked.plan()) == ""
        assert walked.tables() == fresh.tables()
        walked.become()
        assert walked.tables().strip() == ""


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
    """The second time every chain is there, since nothing is cleared away: changes are of elements alone."""
    directory = tmp_path_factory.mktemp("state")
    written: list[bool] = []
    transact = writer._transact

    def recorded(opened: socket.socket, batch: bytes, echoes: list[bytes] | None) -> bool:
        written.append(transact(opened, batch, echoes))
        return written[-1]

    with Namespace() as one, Namespace() as other, patch.object(writer, "_transact", recorded):
        walked, fresh = machine(Inside(one.name), directory), machine(Inside(other.name), directory)
        again = random.sample(states, len(states))
        for services in (*states, *again):
            walked.declare(services)
            walked.write()
        assert all(written)
        walked.dataplane.invalidate_all()
        assert str(walked.plan()) == "", "what is read is what was written"
        walked.step()
        fresh.become(*again[-1])
        assert walked.tables() == fresh.tables()
