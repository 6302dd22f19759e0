"""The words of a command line as the API's JSON: targets, frontends, backends, checks, policies.

Every function raises CliError, as wrong usage, for a word in a wrong form. Where a file may have a mapping, a
word may be one too, as in YAML: `{address: 10.244.0.5, zone: east}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from vipd.cli.errors import USAGE, CliError
from vipd.declaration.dns_names import is_named, parse_any_backend
from vipd.declaration.syntax import (
    InvalidTextError,
    duration_text,
    parse_address,
    parse_address_and_ports,
    parse_backend,
    parse_duration,
)
from vipd.model.service import Backend, NamedBackend, NameKind, ServicePort, socket_text
from vipd.observe.api_client import Json

T = TypeVar("T")

MAX_DIGITS = 18
"""No port has as many, and a number of thousands of digits is slow to read."""

FALLBACK_WORDS = ("reject", "drop", "keep")


NO_ADDRESS = "none"

CHECK_ARGUMENTS = {
    "none": "",
    "tcp": "port",
    "http": "path",
    "https": "path",
    "udp": "send",
    "dns": "query",
    "exec": "command",
}
"""Every type of check, and its key for what follows the colon in `http:/healthz`."""

_FURTHER_KEY = re.compile(r",(?=(?:interval|timeout|rise|fall|start|jitter|port|method|host|status|body)=)")


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


def address_spec(word: str) -> Json:
    """The `address` of a Spec for `10.96.0.10,fd00:96::10`, or nothing for `none`."""
    if word == NO_ADDRESS:
        return {}
    return {"address": [_short_form(parse_address, part) for part in word.split(",")]}


def backend_specs(words: Iterable[str], *, backup: bool = False) -> list[str | Json]:
    """BackendSpecs for words such as `10.244.0.5`, `10.244.0.5:5353@2`, `[fd00::5]:53` and
    `dns:web.internal:80`.

    `backup`: they serve only while no others can.
    """
    specs = [_mapping(word) or _backend_spec(_short_form(parse_any_backend, word)) for word in words]
    if not backup:
        return specs
    return [{**({"address": spec} if isinstance(spec, str) else spec), "backup": True} for spec in specs]


def single_backends(words: Iterable[str]) -> list[str]:
    """The words for backends one by one; commas may stand between them, too."""
    found = []
    for word in words:
        parts = [word] if word.startswith("{") else [part for part in word.split(",") if part]
        if not parts:
            raise CliError(f"{word!r} names no backend", hint="ADDR, or ADDR:PORT", code=USAGE)
        found += parts
    return found


def backend_name(spec: str | Json) -> str:
    """Canonical `ADDR`, `ADDR:PORT`, `dns:NAME:PORT` or `srv:NAME` of a BackendSpec as the daemon has it."""
    if isinstance(spec, str):
        return spec
    for kind in NameKind:
        if kind in spec:
            return f"{kind}:{spec[kind]}" + (f":{spec['port']}" if spec.get("port") else "")
    address = str(spec["address"])
    return socket_text(address, spec["port"]) if spec.get("port") else address


def backend_names(words: Iterable[str]) -> list[str]:
    """Canonical form of each word, as `backend_name`; a weight has no meaning here and is refused."""
    names = []
    for word in words:
        if "@" in word:
            raise CliError(f"{word} has a weight", hint=f"write {word.partition('@')[0]}", code=USAGE)
        names.append(str(_short_form(parse_any_backend, word)))
    return names


def split_backend(word: str, command: str, everywhere: str = "") -> tuple[str, str]:
    """`dns/10.244.0.5` as target and backend. The last slash splits: a target may contain slashes itself.

    For the hint, `command` is the typed command, with `{}` for the word; `everywhere` is the same for that
    address in every service, if the verb supports that.
    """
    target, slash, backend = word.rpartition("/")
    # The last slash of a frontend precedes its protocol, and that of a name more of the name.
    if not (slash and target and is_backend(backend)):
        service, colon, named = word.partition(":")
        if colon and not is_backend(word) and is_backend(named) and not service.isdecimal():
            raise CliError(f"{word} names no backend", hint=command.format(f"{service}/{named}"), code=USAGE)
        if not is_backend(word) or "@" in word:
            hint = f"{command.format(f'{word}/ADDR')}; vipctl describe {word} shows its backends"
            raise CliError(f"{word} names no backend", hint=hint, code=USAGE)
        hint = command.format(f"TARGET/{word}")
        if everywhere and not is_named(word):
            hint += f", or in every service: {everywhere.format(parse_backend(word).address)}"
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


def check_spec(word: str) -> str | Json:
    """`tcp`, or `http:/healthz`: a type, and after a colon what it asks for. `exec:` splits the command line
    into words as a shell does, and runs no shell."""
    if mapping := _mapping(word):
        return mapping
    kind, colon, argument = word.partition(":")
    key = CHECK_ARGUMENTS.get(kind)
    if key is None:
        # Imported here because only a typing error needs it.
        from vipd.model.misspelling import nearest

        close = nearest(kind, CHECK_ARGUMENTS)
        hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(CHECK_ARGUMENTS)}"
        raise CliError(f"{word} is no check", hint=hint, code=USAGE)
    if not colon:
        return kind
    if not (key and argument):
        hint = f"--check {kind}" if not key else f"--check {kind}:{key.upper()}, or {kind} alone"
        raise CliError(f"{word} is no check", hint=hint, code=USAGE)
    if kind in ("http", "https") and argument.startswith("//"):
        path = argument.lstrip("/").partition("/")[2]
        what = f"{word} is a URL, and a check asks each backend"
        raise CliError(what, hint=f"--check {kind}:/{path}, or {kind}:PORT/{path}", code=USAGE)
    if kind in ("http", "https", "tcp"):
        _refuse_further_keys(word, kind, argument)
    return {"type": kind, **_check_argument(kind, key, argument)}


def _refuse_further_keys(word: str, kind: str, argument: str) -> None:
    """`http:/healthz,interval=1s` would be a path that nobody means."""
    first, *further = _FURTHER_KEY.split(argument)
    if further and "?" not in first:
        key = CHECK_ARGUMENTS[kind]
        spec = {"type": kind, **(_check_argument(kind, key, first) if first else {})}
        told = ", ".join(
            (*(f"{k}: {v}" for k, v in spec.items()), *(f.replace("=", ": ", 1) for f in further))
        )
        what = f"{word} names more than a check's type and what it asks for"
        raise CliError(what, hint=f"--check '{{{told}}}'", code=USAGE)


def _check_argument(kind: str, key: str, text: str) -> Json:
    if kind in ("http", "https"):
        port, slash, path = text.partition("/")
        if not port.isdecimal():
            return {key: text}
        return {"port": _number(port), **({key: f"/{path}"} if slash else {})}
    if kind == "tcp":
        return {key: _number(text)}
    return {key: _split_command(text) if kind == "exec" else text}


def _split_command(text: str) -> list[str]:
    # Imported here because only checks by a program need it.
    import shlex

    try:
        return shlex.split(text)
    except ValueError as err:
        what = f"exec:{text} is no command"
        raise CliError(what, str(err).lower(), "close the quotes", code=USAGE) from None


def limits_spec(words: Iterable[str]) -> Json | None:
    """The `limits` of a Spec for `connections=100` and `new_per_second=50`; None if the only word is
    `none`."""
    given = list(words)
    if given == ["none"]:
        return None
    limits: Json = {}
    for word in ",".join(given).split(","):
        key, equals, number = word.partition("=")
        if not (key and equals and number):
            hint = "--limit connections_per_client=100, or --limit none"
            raise CliError(f"{word} is no limit", hint=hint, code=USAGE)
        limits[key] = _number(number)
    return limits


def number_or_none(word: str) -> int | str | None:
    """The number; None for `none`; other text stays, for the declaration to refuse."""
    return None if word == "none" else _number(word)


def _number(word: str) -> int | str:
    """The number; other text stays, for the declaration to refuse."""
    return int(word) if word.isascii() and word.isdecimal() and len(word) <= MAX_DIGITS else word


def list_spec(words: Iterable[str], *, clear: str = "") -> list[str | Json] | None:
    """The items of a list, which commas separate too; None if the only one is the word that clears it."""
    items: list[str | Json] = []
    for word in words:
        mapping = _mapping(word)
        items += [mapping] if mapping else word.split(",")
    return None if items == [clear] else items


def port_specs(words: Iterable[str]) -> list[str | Json]:
    """The items of `ports`, between which there may be commas; the declaration judges the short forms."""
    items: list[str | Json] = []
    for word in words:
        mapping = _mapping(word)
        # Before a port, not before a further protocol as in 53/tcp,udp.
        items += [mapping] if mapping else re.split(",(?=[0-9])", word)
    return items


def _mapping(word: str) -> Json | None:
    """The mapping that a word is in YAML; None for one that does not begin as such."""
    if not word.startswith("{"):
        return None
    # Imported here because few command lines need YAML, which costs as much as click.
    from vipd.declaration.yaml_text import read_values

    yaml = read_values(word)
    found = yaml.documents[0] if len(yaml.documents) == 1 and not yaml.faults else None
    if not isinstance(found, dict) or not found:
        why = "; ".join(f"{fault.what}; {fault.hint}".rstrip("; ") for fault in yaml.faults[:1])
        hint = "write it as in a file, in quotes: '{address: 10.244.0.5, zone: east}'"
        raise CliError(f"{word} is no mapping", why, hint, code=USAGE)
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


def _backend_spec(backend: Backend | NamedBackend) -> str | Json:
    if isinstance(backend, NamedBackend):
        spec: dict[str, Any] = {backend.kind.value: backend.name}
        backend = backend.template
    else:
        spec = {"address": backend.address}
    if backend.port is not None:
        spec["port"] = backend.port
    if backend.weight != 1:
        spec["weight"] = backend.weight
    return backend.address if backend.address and len(spec) == 1 else spec


def is_address_list(word: str) -> bool:
    """Whether a word is an address, or several with commas between."""
    return _is_form(lambda text: [parse_address(part) for part in text.split(",")], word)


def is_frontend(word: str) -> bool:
    """Whether a word is an address with a port, as `frontend_spec` reads it."""
    return _is_form(parse_address_and_ports, word)


def backend_host(name: str) -> str:
    """The canonical name of a backend without its port."""
    backend = _short_form(parse_any_backend, name)
    return f"{backend.kind}:{backend.name}" if isinstance(backend, NamedBackend) else backend.address


def _is_form(parse: Callable[[str], object], word: str) -> bool:
    try:
        parse(word)
    except InvalidTextError:
        return False
    return True


def is_backend(word: str) -> bool:
    """Whether a word is a backend, also with a weight behind it."""
    return _is_form(parse_any_backend, word.partition("@")[0])


def _short_form(parse: Callable[[str], T], word: str) -> T:
    try:
        return parse(word)
    except InvalidTextError as err:
        raise CliError(err.what, hint=err.hint, code=USAGE) from None
