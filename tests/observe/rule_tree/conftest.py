from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.observe.rule_tree.kernel_rules import KernelRules, kernel_rules


@pytest.fixture(scope="module")
def kernel() -> Iterator[KernelRules]:
    """A kernel without rules."""
    with kernel_rules() as made:
        yield made
