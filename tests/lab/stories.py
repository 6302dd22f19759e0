"""Tests that are coroutines: each is the story of what runs in this process."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any


def story_of(
    run: Callable[..., object], *arguments: object, **settings: Any
) -> Callable[[Callable[..., Awaitable[object]]], Callable[..., None]]:
    """Have `run`, such as `inside.running`, run a test as its story, with these further arguments.

    The test's positional parameters are what a story gets, those by name alone are fixtures of pytest.
    """

    def decorate(test: Callable[..., Awaitable[object]]) -> Callable[..., None]:
        @functools.wraps(test)
        def whole(**fixtures: object) -> None:
            run(functools.partial(test, **fixtures), *arguments, **settings)

        signature = inspect.signature(test)
        fixtures = [each for each in signature.parameters.values() if each.kind is each.KEYWORD_ONLY]
        whole.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return whole

    return decorate
