"""Traces packets on request, in the network namespace that it was started in; ends with its standard input.

Each line on standard input is a JSON list of expected packets: objects with `source`, `destination`, `port`,
`protocol` and `explanation`. READY is printed once they are traced; when each was seen once, or nothing more
comes, a JSON list of what was seen, as `vipctl trace -o json` tells it, in the order of what was expected,
null for a packet that never came.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from vipd.model import Protocol
from vipd.observe.trace.events import Chain
from vipd.observe.trace.hits import chains_of, hits_of
from vipd.observe.trace.journey import Journey
from vipd.observe.trace.outcome import compare, outcome_of
from vipd.observe.trace.packets import Flow
from vipd.observe.trace.report import Report
from vipd.observe.trace.rules import ChainRules, read_rules
from vipd.observe.trace.watching import Watch
from vipd.process import run

LONGEST = 60.0
"""Seconds after which what has not come will not come; a busy machine sends the last one late."""


def flow_of(asked: dict[str, Any]) -> Flow:
    """The flow that one expected packet begins."""
    return Flow(asked["destination"], asked["port"], Protocol(asked["protocol"]), asked["source"])


def told(journey: Journey, listed: dict[Chain, ChainRules], explanation: dict[str, Any]) -> dict[str, Any]:
    """What `vipctl trace` would say of a journey."""
    hits = hits_of(journey, listed, _prefix_of(explanation), explanation["service_port"] or "")
    outcome = outcome_of(journey, hits)
    return Report(journey, hits, outcome, compare(outcome, hits, explanation)).view(explanation, "")


def _prefix_of(explanation: dict[str, Any]) -> str:
    """That of the chains which are expected to be passed; the golden rules are a real kube-proxy's."""
    chains = [rule["chain"] for each in explanation["outcomes"] for rule in each["rules"]]
    return "KUBE" if any(chain.startswith("KUBE-") for chain in chains) else "VIPD"


def followed(asked: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    """The first journey of each expected packet."""
    flows = [flow_of(each) for each in asked]
    found: dict[Flow, Journey] = {}
    with Watch(flows) as watch:
        print("READY", flush=True)
        for journey in watch.journeys(LONGEST):
            start = journey.start
            found.setdefault(Flow(start.destination, start.port, start.protocol, start.source), journey)
            if len(found) == len(flows):
                break
        assert not watch.notes, watch.notes
    chains = {chain for journey in found.values() for chain in chains_of(journey)}
    listed = asyncio.run(read_rules(chains, run))
    return [
        told(found[flow], listed, each["explanation"]) if flow in found else None
        for flow, each in zip(flows, asked, strict=True)
    ]


def main() -> None:
    """Serve requests until standard input closes."""
    for line in sys.stdin:
        print(json.dumps(followed(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
