"""Making sockets in another network namespace: a socket stays in the one where its thread was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from pyroute2 import netns

from tests.dataplane.namespace import Namespace

T = TypeVar("T")


def inside(namespace: Namespace | str, make: Callable[[], T]) -> T:
    """What `make` returns when called in the namespace, in a thread that ends with the call."""
    made: Future[T] = Future()

    def work() -> None:
        try:
            netns.setns(namespace if isinstance(namespace, str) else namespace.name)
            made.set_result(make())
        except BaseException as error:  # handed to the caller
            made.set_exception(error)

    thread = threading.Thread(target=work, name="namespace")
    thread.start()
    thread.join()
    return made.result()
