"""A vipd in this process, and command lines that are said to it."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable
from typing import Any

from tests.lab.inside import Output, Vipd, running

Say = Callable[[str], Awaitable[Output]]
Story = Callable[[Vipd, Say], Awaitable[None]]


def conversation(
    story: Story, prepare: Callable[[Vipd], object] = lambda vipd: None, **settings: Any
) -> None:
    """Run a story beside a vipd; it says lines such as `list -o name`."""

    async def whole(vipd: Vipd) -> None:
        async def say(line: str) -> Output:
            return await vipd.vipctl(*shlex.split(line))

        await story(vipd, say)

    running(whole, prepare, None, simulated=False, **settings)
