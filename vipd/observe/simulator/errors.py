"""Why the simulator refuses a text of rules."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar


class RulesetError(ValueError):
    """A text that the kernel would reject, or that is inconsistent. `text` is the offending line."""

    def __init__(self, text: str, why: str, hint: str = "") -> None:
        message = f"{why}: {text}" if text else why
        super().__init__(f"{message}; {hint}" if hint else message)
        self.text = text
        self.why = why


class UnknownRule(RulesetError):  # noqa: N818 - the short name is what callers speak of
    """A rule whose meaning the simulator does not know. `text` is the rule as read."""


N = TypeVar("N", bound=str | tuple[str, str])


def chains_in_loops(next_of: Mapping[N, Collection[N]]) -> list[N]:
    """The chains that form a loop or hang from one. `next_of` returns for every chain where it leads."""
    callers = dict.fromkeys(next_of, 0)
    for names in next_of.values():
        for name in names:
            callers[name] += 1
    free = [chain for chain, count in callers.items() if not count]
    for chain in free:
        for name in next_of[chain]:
            callers[name] -= 1
            if not callers[name]:
                free.append(name)
    return sorted(set(next_of) - set(free)) if len(free) < len(next_of) else []
