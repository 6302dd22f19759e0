"""What a program is started with, while pytest and other threads change this process's environment."""

from __future__ import annotations

import os
import threading

from tests.lab.fork_server import own_environment

NAME = "TAKEN_OUT_AND_PUT_BACK"
COPIES = 5000


def test_the_environment_is_copied_while_another_thread_takes_names_out_of_it() -> None:
    ended = threading.Event()

    def change() -> None:
        while not ended.is_set():
            os.environ[NAME] = "1"
            del os.environ[NAME]

    changer = threading.Thread(target=change)
    changer.start()
    try:
        copies = [own_environment() for _ in range(COPIES)]
    finally:
        ended.set()
        changer.join()
    rest = {name: value for name, value in os.environ.items() if name != NAME}
    assert all({name: value for name, value in copy.items() if name != NAME} == rest for copy in copies)
