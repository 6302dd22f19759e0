"""Whatever was there before, the kernel ends as a cold start would leave it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.dataplane.namespace import Namespace
from tests.dataplane.nftables.declared import OWN, walks
from tests.dataplane.nftables.programmed import Inside, Programmed
from tests.lab.examples import examples
from vipd.control.selection import HostIdentity
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
