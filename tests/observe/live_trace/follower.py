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

from vipd.host.process import run
from vipd.model.service import Protocol
from vipd.observe.live_trace.events import Chain
from vipd.observe.live_trace.matched_rules import matched_rules
from vipd.observe.live_trace.matching import ChainRules, chains_of
from vipd.observe.live_trace.outcome import compare, outcome_of
from vipd.observe.live_trace.packet_trace import PacketTrace
from vipd.observe.live_trace.packets import Flow
from vipd.observe.live_trace.report import Report
from vipd.observe.live_trace.rule_reader import read_rules
from vipd.observe.live_trace.watching import TraceSession

LONGEST = 60.0
"""Seconds after which what has not come will not come; a busy machine sends the last one late."""


def flow_of(asked: dict[str, Any]) -> Flow:
    """The flow that one expected packet begins."""
    return Flow(asked["destination"], asked["port"], Protocol(asked["protocol"]), asked["source"])


def report_of(
    trace: PacketTrace, listed: dict[Chain, ChainRules], explanation: dict[str, Any]
) -> dict[str, Any]:
    """What `vipctl trace` would say of a trace."""
    hits = matched_rules(trace, listed, _prefix_of(explanation), explanation["service_port"] or "")
    outcome = outcome_of(trace, hits)
    return Report(trace, hits, outcome, compare(outcome, hits, explanation)).view(explanation, "")


def _prefix_of(explanation: dict[str, Any]) -> str:
    """That of the chains which are expected to be passed; the golden rules are a real kube-proxy's."""
    chains = [rule["chain"] for each in explanation["outcomes"] for rule in each["rules"]]
    return "KUBE" if any(chain.startswith("KUBE-") for chain in chains) else "VIPD"


def followed(asked: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    """The first trace of each expected packet."""
    flows = [flow_of(each) for each in asked]
    found: dict[Flow, PacketTrace] = {}
    with TraceSession(flows) as watch:
        print("READY", flush=True)
        for trace in watch.traces(LONGEST):
            start = trace.start
            found.setdefault(Flow(start.destination, start.port, start.protocol, start.source), trace)
            if len(found) == len(flows):
                break
        assert not watch.notes, watch.notes
    chains = {chain for trace in found.values() for chain in chains_of(trace)}
    listed = asyncio.run(read_rules(chains, run))
    return [
        report_of(found[flow], listed, each["explanation"]) if flow in found else None
        for flow, each in zip(flows, asked, strict=True)
    ]


def main() -> None:
    """Serve requests until standard input closes."""
    for line in sys.stdin:
        print(json.dumps(followed(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
