"""`vipctl describe`: all about a service on a screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import compress

import click

from vipd.cli.argument_types import TARGET
from vipd.cli.changes import unconfirmed_text
from vipd.cli.connection import Daemon, connect
from vipd.cli.errors import OK
from vipd.cli.events import last_events
from vipd.cli.list import HEALTH_COLOURS, STATE_COLOURS, fallback, frontends_of
from vipd.cli.output import Cell, Column, Screen, document, output_option, prose, screen, socket_option, table
from vipd.model.formatting import duration
from vipd.observe.api_client import Json

_LABEL = 13
_MESSAGE, _IGNORED, _UNCONFIRMED = "  Message", "  Ignored", "  Unconfirmed"
"""Facts that are prose, besides those of `_KEYS`."""

MAX_CONNECTIONS = Column("MAX CONN", right=True)
"""Left out where no backend has a limit."""

COLUMNS = (
    Column("ADDRESS"),
    Column("WEIGHT", right=True),
    Column("SHARE%", right=True),
    Column("READY"),
    Column("HEALTH"),
    MAX_CONNECTIONS,
    Column("CHAIN"),
    Column("REASON", prose=True),
)
"""The reason is last because it is prose: there it may be long without breaking the table."""

_STATES = {
    "ok": "ok",
    "unchecked": "unchecked: not all of its backends are known to work",
    "pending": "pending: not in the kernel yet",
    "quarantined": "quarantined: the kernel does not take its rules",
}
_ADDRESSES = {
    "address": "Address",
    "external_addresses": "External",
    "load_balancer_addresses": "Balanced",
}
_KEYS = {
    "description": "Description",
    "allow_from": "Allow from",
    "health_port": "Health port",
    "balance": "Balance",
    "check": "Check",
    "slow_start": "Slow start",
    "on_remove": "On remove",
    "flow_takeover": "Flow takeover",
    "limits": "Limits",
}
"""Keys that are shown as they are declared, and only then."""
_MASQUERADE = {
    "always": "every new flow",
    "forwarded": "new flows that come from other hosts",
    "off-cluster": "new flows from outside cluster_cidrs",
    "hairpin": "only flows of a backend to itself",
}
_POLICIES = {"local": "only backends on this host", "cluster": "backends on every host"}
_DISTRIBUTIONS = {
    "prefer-same-zone": "ready backends for this host's zone, else all",
    "prefer-same-node": "ready backends on this host, else those for its zone, else all",
}


@click.command()
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True, type=TARGET)
@output_option("text", "json", "yaml")
@socket_option
def describe(targets: tuple[str, ...], form: str) -> int:
    """Show who owns a service, what it does, and how each of its backends is doing."""
    daemon = connect()
    views = [daemon.get("services", target)["service"] for target in targets]
    if form != "text":
        # One target is one object, as the API has it; several are a list.
        print(document({"service": views[0]} if len(views) == 1 else {"services": views}, form))
        return OK
    terminal = screen()
    print("\n\n".join("\n".join(_lines(view, daemon, terminal)) for view in views))
    return OK


def _lines(view: Json, daemon: Daemon, terminal: Screen) -> Iterator[str]:
    for label, text in _facts(view, terminal):
        named = f"{terminal.paint(label, 'bold')}{' ' * (_LABEL - len(label))} "
        told = label in (_MESSAGE, _IGNORED, _UNCONFIRMED, *_KEYS.values())
        lines = prose(text, terminal, " " * (_LABEL + 1)) if told else [f"{named}{text}"]
        yield from (named + lines[0].lstrip(), *lines[1:]) if told else lines
    for forwarding in view["forwardings"]:
        yield ""
        yield from _forwarding_lines(forwarding, terminal)
    events = list(last_events(daemon, view["name"], terminal))
    yield from ("", *events) if events else ()


def _facts(view: Json, terminal: Screen) -> Iterator[tuple[str, str]]:
    status = view["status"]
    state = str(status["state"])
    yield "Name", terminal.paint(view["name"], "bold")
    yield "Owner", _owner(view)
    for key, label in _ADDRESSES.items():
        if key in view["spec"]:
            yield from _labelled(label, [_address(address) for address in _listed(view["spec"][key])])
    yield from _labelled("Ports", [_port(port) for port in _listed(view["spec"]["ports"])])
    for key, label in _KEYS.items():
        if key in view["spec"]:
            yield label, _words(view["spec"][key])
    yield "Affinity", _affinity(view["forwardings"])
    yield from _labelled("Masquerade", _masquerade(view["forwardings"]))
    yield "Fallback", fallback(view)
    yield from _labelled("Traffic", list(_traffic(view["spec"])))
    yield from _labelled("Names", [text for each in view.get("names", ()) for text in _name(each, terminal)])
    yield from _labelled("Announced", [_announced(each, terminal) for each in view.get("announced", ())])
    yield "Status", terminal.paint(_state(state, status["ready"]), STATE_COLOURS.get(state, ""))
    yield "  Applied", "no" if state in ("pending", "quarantined") else "yes"
    yield "  Ready", f"{status['ready']} of {status['backends']}"
    if waits := view.get("confirmation"):
        yield _UNCONFIRMED, unconfirmed_text(waits)
    if status["message"]:
        yield _MESSAGE, status["message"]
    for problem in status.get("ignored", ()):
        yield _IGNORED, problem


def _announced(found: Json, terminal: Screen) -> str:
    """`203.0.113.10 by routes: yes, for 5m`."""
    since = datetime.fromisoformat(found["since"])
    lasting = duration(max(0.0, (datetime.now(UTC) - since).total_seconds()))
    served = found["reason"] == "served"
    state = terminal.paint(*(("yes", "green") if found["announced"] else ("no", "yellow")))
    why = "" if served else f": {found['why']}"
    return f"{found['address']} by {found['by']}: {state}, for {lasting}{why}"


def _name(found: Json, terminal: Screen) -> Iterator[str]:
    """`dns:web.internal:80: 2 addresses, answered 5s ago, again in 55s`, and what is wrong with it."""
    number = len(found["addresses"])
    parts = ["1 address" if number == 1 else f"{number} addresses"]
    if found["answered"]:
        ago = (datetime.now(UTC) - datetime.fromisoformat(found["answered"])).total_seconds()
        parts.append(f"answered {duration(max(0.0, ago))} ago")
    if found["next_seconds"] is not None:
        parts.append(f"asked again in {duration(found['next_seconds'])}")
    whose = ", of the fallback" if found["fallback"] else ""
    yield f"{found['backend']}{whose}: {', '.join(parts)}"
    if found["fault"]:
        yield terminal.paint(f"  {found['fault']}", "yellow" if number else "red")
    if found["held"]:
        yield terminal.paint(f"  not in the last answer, serving on: {', '.join(found['held'])}", "yellow")
    if found["left_out"]:
        yield terminal.paint(f"  {found['left_out']} more are left out: dns_max_addresses", "yellow")


def _state(state: str, ready: int) -> str:
    if state == "no-backends":
        return "some frontends have no backends" if ready else "no backends"
    return _STATES.get(state, state)


def _address(address: object) -> str:
    return str(address["address"]) if isinstance(address, dict) else str(address)


def _labelled(label: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    for i, text in enumerate(texts):
        yield ("" if i else label), text


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _owner(view: Json) -> str:
    origin = view.get("origin") or {}
    if not origin.get("path"):
        return str(view["owner"])
    return f"{view['owner']}, line {origin['line']}" if origin.get("line") else str(view["owner"])


def _port(port: object) -> str:
    if not isinstance(port, dict):
        return str(port)
    text = f"{port['port']}/{port.get('protocol', 'tcp')}"
    if port.get("target"):
        text += f" to port {port['target']}"
    if port.get("node_port"):
        text += f", node port {port['node_port']}"
    return f"{text} ({port['name']})" if port.get("name") else text


def _words(value: object) -> str:
    """A declared value in words: `http, path /healthz, interval 1s`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        kind, rest = value.get("type"), {key: each for key, each in value.items() if key != "type"}
        return ", ".join([*([str(kind)] if kind else []), *(f"{key} {_words(rest[key])}" for key in rest)])
    return ", ".join(map(_words, value)) if isinstance(value, list) else str(value)


def _affinity(forwardings: Sequence[Json]) -> str:
    seconds = next((f["affinity_seconds"] for f in forwardings), None)
    return f"a client keeps its backend for {duration(seconds)}" if seconds else "none"


def _masquerade(forwardings: Sequence[Json]) -> list[str]:
    modes = dict.fromkeys(str(f["masquerade"]) for f in forwardings)
    return [f"{mode}: {_MASQUERADE[mode]}" if mode in _MASQUERADE else mode for mode in modes] or ["-"]


def _traffic(spec: Json) -> Iterator[str]:
    """What of its traffic a service leaves to other hosts or backends; nothing where all is as by default."""
    for part, policy in spec.get("traffic_policy", {}).items():
        yield f"{part} {policy}: {_POLICIES.get(policy, policy)}"
    distribution = spec.get("traffic_distribution", "")
    if not distribution and any("zone" in b for b in spec.get("backends", ()) if isinstance(b, dict)):
        distribution = "prefer-same-zone"
    if distribution:
        yield f"{distribution}: {_DISTRIBUTIONS.get(distribution, distribution)}"


def _forwarding_lines(forwarding: Json, terminal: Screen) -> Iterator[str]:
    heading = ", ".join(frontends_of(forwarding))
    yield terminal.paint(heading, "bold") + (f"  chain {forwarding['chain']}" if forwarding["chain"] else "")
    endpoints = forwarding["endpoints"]
    if not any(endpoint["ready"] for endpoint in endpoints):
        verdict = "dropped" if forwarding.get("refusal") == "drop" else "refused"
        yield f"  no backend is ready: new flows are {verdict}"
    if endpoints:
        known = {
            MAX_CONNECTIONS: any(endpoint["max_connections"] for endpoint in endpoints),
        }
        shown = [known.get(column, True) for column in COLUMNS]
        rows = [list(compress(_endpoint_row(endpoint), shown)) for endpoint in endpoints]
        yield from table(list(compress(COLUMNS, shown)), rows, terminal, indent="  ")


def _endpoint_row(endpoint: Json) -> list[str | Cell]:
    ready, health = bool(endpoint["ready"]), str(endpoint.get("health") or "-")
    return [
        endpoint["endpoint"],
        str(endpoint["weight"]),
        f"{100 * (endpoint['share'] or 0):.1f}",
        Cell("yes", "green") if ready else Cell("no", "red"),
        Cell(health, HEALTH_COLOURS.get(health, "")),
        str(endpoint["max_connections"] or "-"),
        endpoint["chain"] or "-",
        endpoint["reason"],
    ]
