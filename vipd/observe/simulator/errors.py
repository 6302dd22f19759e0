"""Why the simulator refuses a text of rules."""

from __future__ import annotations


class RulesetError(ValueError):
    """A text that the kernel would refuse, or that does not hold together. `text` is the offending line."""

    def __init__(self, text: str, why: str, hint: str = "") -> None:
        message = f"{why}: {text}" if text else why
        super().__init__(f"{message}; {hint}" if hint else message)
        self.text = text
        self.why = why


class UnknownRule(RulesetError):  # noqa: N818 - the short name is what callers speak of
    """A rule whose meaning the simulator does not know. `text` is the rule as it was read."""
