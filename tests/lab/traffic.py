"""Outcomes of traffic in the lab, as values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from ipaddress import ip_address


@dataclass(frozen=True, slots=True)
class Answer:
    """The backend that answered, and the source address and port that it saw."""

    backend: str
    source: str
    source_port: int

    @classmethod
    def parse(cls, text: str) -> Answer:
        """Read a server's answer, `b1 10.10.0.2:40000`; raises ValueError for anything else."""
        backend, peer = text.split()
        address, _, port = peer.rpartition(":")
        return cls(backend, str(ip_address(address.strip("[]"))), int(port))


@dataclass(frozen=True, slots=True)
class Result:
    answers: tuple[Answer, ...]
    failures: Counter[str]
    """Flows without an answer, by `refused`, `timeout`, `closed` or an errno's name."""
    resent: int = 0
    """TCP segments that had to be sent again."""

    @classmethod
    def of(cls, outcomes: list[dict[str, str]]) -> Result:
        answers = tuple(Answer.parse(o["answer"]) for o in outcomes if "answer" in o)
        failures = Counter(o["failure"] for o in outcomes if "failure" in o)
        return cls(answers, failures, sum(int(o.get("resent", 0)) for o in outcomes))

    @property
    def backends(self) -> Counter[str]:
        return Counter(answer.backend for answer in self.answers)

    @property
    def sources(self) -> set[str]:
        return {answer.source for answer in self.answers}

    def all_answered(self) -> Result:
        """Itself; raises AssertionError when a flow failed."""
        assert not self.failures, f"flows failed: {dict(self.failures)}; answered: {dict(self.backends)}"
        return self

    def all_failed(self, kind: str) -> Result:
        """Itself; raises AssertionError unless every flow failed in this one way."""
        assert set(self.failures) == {kind}, f"failures: {dict(self.failures)}, wanted only {kind}"
        assert not self.answers, f"answered although all should fail: {dict(self.backends)}"
        return self

    def at_once(self) -> Result:
        """Itself; raises AssertionError when TCP retransmitted, a second later: a first segment was lost.
        Checks nothing for UDP, which does not retransmit."""
        assert not self.resent, f"{self.resent} segments were sent again"
        return self
