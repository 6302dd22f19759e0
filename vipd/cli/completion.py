"""Completion in shells: the verb that prints a script, and the hidden verb that scripts call for names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import click

from vipd.cli.argument_types import BACKEND, OWN_SERVICE_BACKEND, OWN_TARGET, SERVICE_BACKEND, TARGET
from vipd.cli.connection import Daemon, connect
from vipd.cli.errors import OK, CliError
from vipd.cli.words import backend_name
from vipd.model.text import one_line
from vipd.observe.api_client import Json

TIMEOUT_SECONDS = 2.0
"""Maximum seconds that a shell waits for a daemon that does not answer. Ten thousand services
take half of one."""

Suggestion = tuple[str, str]
"""A word, and its description in a list."""


@click.command(hidden=True, add_help_option=False)
@click.argument("source")
@click.argument("words", nargs=-1)
def complete(source: str, words: tuple[str, ...]) -> int:
    """Print what may stand for the last of `words`, each with a tab and what it is.

    Silent when there is nothing to offer, also because no daemon answers.
    """
    suggest = _SUGGESTIONS.get(source)
    if suggest is None or not words:
        return OK
    try:
        found = list(suggest(connect(TIMEOUT_SECONDS), *words[-2:]))
    except CliError:
        return OK
    for word, meaning in dict(found).items():
        print(f"{one_line(word)}\t{one_line(meaning)}")
    return OK


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")), metavar="SHELL")
def completion(shell: str) -> int:
    """Print the script by which a shell completes command lines of vipctl. SHELL is bash, zsh or fish.

    Packages install these scripts. Elsewhere, put one of these lines into ~/.bashrc, ~/.zshrc after
    compinit, or ~/.config/fish/config.fish:

    \b
    source <(vipctl completion bash)
    source <(vipctl completion zsh)
    vipctl completion fish | source
    """
    # The generator reads every verb and all settings: only a user who wants a script should wait for that.
    print(import_module("vipd.cli.manual.completion").script(shell), end="")
    return OK


def _targets(daemon: Daemon, *words: str) -> Iterator[Suggestion]:
    return _named(daemon.get("services")["services"], words[-1])


def _own_targets(daemon: Daemon, *words: str) -> Iterator[Suggestion]:
    return _named(_own(daemon), words[-1])


def _service_backends(daemon: Daemon, *words: str) -> Iterator[Suggestion]:
    return _service_backends_of(daemon.get("services")["services"], words[-1])


def _own_service_backends(daemon: Daemon, *words: str) -> Iterator[Suggestion]:
    word, views = words[-1], daemon.get("services")["services"]
    # A weight may be ordered for a backend of any service; the rest is for those of vipctl.
    yield from _named([view for view in views if _is_own(view)], word)
    yield from ((place, told) for place, told in _service_backends_of(views, word) if "/" in word)


def _service_backends_of(views: Sequence[Json], word: str) -> Iterator[Suggestion]:
    """Services with a slash, and after the slash their backends."""
    for view in views:
        for place in (str(view["name"]), *_frontends(view)):
            if word.startswith(f"{place}/"):
                yield from ((f"{place}/{name}", told) for name, told in _backends_of(view, word, f"{place}/"))
            elif place.startswith(word) and place == view["name"]:
                yield f"{place}/", " ".join(_frontends(view))


def _backends(daemon: Daemon, *words: str) -> Iterator[Suggestion]:
    target, word = words if len(words) == 2 else ("", words[-1])
    return _backends_of(daemon.get("services", target)["service"], word)


def _own(daemon: Daemon) -> list[Json]:
    return [view for view in daemon.get("services")["services"] if _is_own(view)]


def _is_own(view: Json) -> bool:
    """Whether vipctl may change it, in one store or the other."""
    return str(view["owner"]) == "cli" or str(view["owner"]).startswith("etcd:")


def _named(views: Sequence[Json], word: str) -> Iterator[Suggestion]:
    """Services whose name begins with `word`, then such frontends; no frontends if it is empty."""
    for view in views:
        if str(view["name"]).startswith(word):
            yield str(view["name"]), " ".join(_frontends(view))
    for view in views if word else ():
        for frontend in _frontends(view):
            if frontend.startswith(word) and frontend != view["name"]:
                yield frontend, str(view["name"])


def _frontends(view: Json) -> list[str]:
    return [place for f in view["forwardings"] for place in (*f["frontends"], *f.get("external", ()))]


def _backends_of(view: Json, word: str, before: str = "") -> Iterator[Suggestion]:
    for backend in view["spec"].get("backends", ()):
        fields: dict[str, Any] = backend if isinstance(backend, dict) else {"address": backend}
        name = backend_name(fields)
        if f"{before}{name}".startswith(word):
            yield name, f"weight {fields.get('weight', 1)}"


_SUGGESTIONS: dict[str, Callable[..., Iterator[Suggestion]]] = {
    TARGET.source: _targets,
    OWN_TARGET.source: _own_targets,
    SERVICE_BACKEND.source: _service_backends,
    OWN_SERVICE_BACKEND.source: _own_service_backends,
    BACKEND.source: _backends,
}
"""The queries to the daemon for each of `ASKED`. Each gets the daemon and the words: the target, if
relevant, and the beginning of the word itself."""
