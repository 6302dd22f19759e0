"""The words of a command line as the API's JSON: targets, backends, affinity, fallback.

Every function raises CliError, as wrong usage, for a word in a wrong form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from vipd.cli.errors import USAGE, CliError
from vipd.declaration.syntax import (
    InvalidTextError,
    duration_text,
    parse_address_and_ports,
    parse_backend,
    parse_duration,
)
from vipd.model.service import Backend, ServicePort
from vipd.observe.api_client import Json

T = TypeVar("T")

FALLBACK_WORDS = ("reject", "drop", "keep")


def frontend_spec(word: str, target_port: int | None) -> Json:
    """The `address` and `ports` of a Spec for `10.96.0.10:53/udp`, `10.96.0.10:80:8080` or
    `10.96.0.10:53/tcp,udp`."""
    address, ports = _short_form(parse_address_and_ports, word)
    if target_port is not None and any(port.target is not None for port in ports):
        raise CliError(f"{word} names the backends' port already", hint="leave --target out", code=USAGE)
    return {"address": address, "ports": [_port_spec(port, port.target or target_port) for port in ports]}


def _port_spec(port: ServicePort, target: int | None) -> str | Json:
    if target is None:
        return str(port)
    return {"port": port.port, "protocol": str(port.protocol), "target": target}


def backend_specs(words: Iterable[str]) -> list[str | Json]:
    """BackendSpecs for words such as `10.244.0.5`, `10.244.0.5:5353@2` and `[fd00::5]:53`."""
    return [_backend_spec(_short_form(parse_backend, word)) for word in words]


def backend_names(words: Iterable[str]) -> list[str]:
    """Canonical `ADDR` or `ADDR:PORT` of each word; a weight has no meaning here and is refused."""
    names = []
    for word in words:
        if "@" in word:
            raise CliError(f"{word} has a weight", hint=f"write {word.partition('@')[0]}", code=USAGE)
        names.append(str(_short_form(parse_backend, word)))
    return names


def split_backend(word: str, command: str, everywhere: str = "") -> tuple[str, str]:
    """`dns/10.244.0.5` as target and backend. The last slash splits: a target may contain slashes itself.

    For the hint, `command` is the typed command, with `{}` for the word; `everywhere` is the same for that
    address in every service, if the verb supports that.
    """
    target, slash, backend = word.rpartition("/")
    # The last slash of a frontend precedes its protocol, and that of a name more of the name.
    if not (slash and target and _is_backend(backend)):
        if not _is_backend(word) or "@" in word:
            hint = f"{command.format(f'{word}/ADDR')}; vipctl describe {word} shows its backends"
            raise CliError(f"{word} names no backend", hint=hint, code=USAGE)
        hint = command.format(f"TARGET/{word}")
        hint += (
            f", or in every service: {everywhere.format(parse_backend(word).address)}" if everywhere else ""
        )
        raise CliError(f"{word} names no service", hint=hint, code=USAGE)
    return target, backend_names([backend])[0]


def affinity_spec(word: str) -> str | Json | None:
    """`none` or `false` is None, `client-ip` or `true` client-ip, and a duration such as `10m` that with
    this timeout."""
    if word in ("none", "false"):
        return None
    if word in ("client-ip", "true"):
        return "client-ip"
    return {"by": "client-ip", "timeout": duration_text(_short_form(parse_duration, word))}


def seconds(word: str) -> int:
    """Seconds, at least 1, of a duration such as `10m`."""
    found = _short_form(parse_duration, word)
    if not found:
        raise CliError(f"{word} is no time", hint="at least 1s", code=USAGE)
    return found


def fallback_spec(words: Sequence[str]) -> str | Json:
    """`reject`, `drop`, `keep`, or the backends that serve while no other can; commas separate them, too."""
    single = [part for word in words for part in word.split(",") if part]
    if len(single) == 1 and single[0] in FALLBACK_WORDS:
        return single[0]
    if not single or set(FALLBACK_WORDS) & set(single):
        hint = "either reject, or drop, or keep, or the addresses of backends"
        raise CliError(f"{' '.join(words)!r} is no fallback", hint=hint, code=USAGE)
    return {"backends": backend_specs(single)}


def _backend_spec(backend: Backend) -> str | Json:
    spec: dict[str, Any] = {"address": backend.address}
    if backend.port is not None:
        spec["port"] = backend.port
    if backend.weight != 1:
        spec["weight"] = backend.weight
    return backend.address if len(spec) == 1 else spec


def _is_backend(word: str) -> bool:
    try:
        parse_backend(word.partition("@")[0])
    except InvalidTextError:
        return False
    return True


def _short_form(parse: Callable[[str], T], word: str) -> T:
    try:
        return parse(word)
    except InvalidTextError as err:
        raise CliError(err.what, hint=err.hint, code=USAGE) from None
