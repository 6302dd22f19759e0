"""All that is told of one traced packet, as values for a screen and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vipd.observe.trace.events import Chain
from vipd.observe.trace.hits import Hit, table_of
from vipd.observe.trace.journey import Journey
from vipd.observe.trace.outcome import Comparison, Fate, Outcome

GONE = "a rule that is gone"
"""What is said of a rule that was deleted before it could be looked up."""


@dataclass(frozen=True, slots=True)
class Report:
    """One packet."""

    journey: Journey
    hits: tuple[Hit, ...]
    outcome: Outcome
    comparison: Comparison | None
    """None: there was no prediction."""
    answer: str = ""
    """What the sender learnt, if this program is the sender."""

    @property
    def agrees(self) -> bool:
        """Nothing is otherwise than predicted."""
        return self.comparison is None or not self.comparison.differences

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Table, chain, what the chain is for, what the rule did; jumps that led nowhere are left out."""
        for number, hit in enumerate(self.hits):
            after = self.hits[number + 1] if number + 1 < len(self.hits) else None
            if not hit.leads or (after is not None and after.chain.name == hit.leads):
                yield table_words(hit.chain), hit.chain.name, hit.part, self._did(hit)

    def blamed(self) -> str:
        """The rule that decided, and whether it is vipd's; empty when none is known."""
        by = self.outcome.by
        if by is None:
            return ""
        told = by.does if by.ours else f"{by.rule or by.does or GONE} (not a rule of vipd)"
        return f"{table_words(by.chain)} {by.chain.name}: {told}"

    def view(self, explanation: Mapping[str, Any] | None, reason: str) -> dict[str, Any]:
        """As JSON. `explanation` is the prediction, or else `reason` why there is none."""
        start, outcome = self.journey.start, self.outcome
        return {
            "packet": {
                "source": start.source,
                "source_port": start.source_port,
                "destination": start.destination,
                "port": start.port,
                "protocol": str(start.protocol),
                "arriving": "forwarded" if self.journey.forwarded else "local",
            },
            "verdict": str(outcome.fate),
            "destination": outcome.destination,
            "source_seen": outcome.source,
            "masqueraded": outcome.masqueraded,
            "answer": self.answer or None,
            "rules": [_hit_view(hit) for hit in self.hits],
            "agrees": None if self.comparison is None else self.agrees,
            "differences": list(self.comparison.differences) if self.comparison else [],
            "prediction": _prediction_view(explanation, self.comparison),
            "no_prediction": reason or None,
        }

    def _did(self, hit: Hit) -> str:
        does = hit.does or GONE
        if hit is self.outcome.by and hit.ours and self.outcome.fate is Fate.DELIVERED:
            does = f"to {self.outcome.destination}"
        return does if hit.mark is None else f"{does}, mark {hit.mark:#x}"


def table_words(chain: Chain) -> str:
    """`nat`, `nat (legacy)`, or for a table of nft `ip vipd`."""
    return f"{chain.table} (legacy)" if chain.legacy else table_of(chain)


def _hit_view(hit: Hit) -> dict[str, Any]:
    return {
        "family": hit.chain.family,
        "table": hit.chain.table,
        "chain": hit.chain.name,
        "part": hit.part,
        "rule": hit.rule,
        "does": hit.does,
        "verdict": str(hit.verdict) or None,
        "mark": hit.mark,
        "vipd": hit.ours,
    }


def _prediction_view(
    explanation: Mapping[str, Any] | None, comparison: Comparison | None
) -> dict[str, Any] | None:
    if explanation is None or comparison is None:
        return None
    outcomes: Sequence[Mapping[str, Any]] = explanation["outcomes"]
    return {
        "summary": explanation["summary"],
        "share": comparison.share,
        "outcomes": [
            {key: each[key] for key in ("verdict", "backend", "probability", "masqueraded")}
            for each in outcomes
        ],
    }
