"""`vipctl status`, `reload` and `version`: the daemon itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import click

from vipd import __version__
from vipd.cli.changes import summary, unconfirmed_text
from vipd.cli.connection import connect
from vipd.cli.errors import DEGRADED, FAILED, OK, CliError
from vipd.cli.host import maintenance_text
from vipd.cli.output import Column, Screen, document, output_option, prose, screen, socket_option, table
from vipd.model.formatting import counted, duration
from vipd.observe.api_client import Json

IN_SYNC = "in-sync"

_LABEL = 12
KEYS_SHOWN = 10
_STATES = {
    IN_SYNC: ("in sync: the kernel has every rule", "green"),
    "starting": ("starting: waiting for the first answer of every source", "yellow"),
    "pending": ("pending: a change is on its way", "yellow"),
    "degraded": ("degraded: some services are quarantined", "red"),
    "failed": ("failed: the last apply did not succeed", "red"),
}


@click.command()
@click.option(
    "--exit-code",
    is_flag=True,
    help="Exit code 6 while the kernel is in sync and a service does not serve as declared.",
)
@output_option("text", "json", "yaml")
@socket_option
def status(form: str, exit_code: bool) -> int:
    """Show how the daemon is doing, and whether the services can serve.

    Exit code 0 when the kernel is in sync, else 1.
    """
    answer = connect().get("status")
    if form == "text":
        print("\n".join(_lines(answer, screen())))
    else:
        print(document(answer, form))
    if answer["state"] != IN_SYNC:
        return FAILED
    return DEGRADED if exit_code and answer["serving"]["state"] == "degraded" else OK


def _lines(answer: Json, terminal: Screen) -> Iterator[str]:
    for label, text in _facts(answer, terminal):
        if label:
            yield f"{terminal.paint(label, 'bold')}{' ' * (_LABEL - len(label))} {text}"
        else:
            yield from prose(text, terminal, " " * (_LABEL + 1))
    yield ""
    yield from _source_lines(answer["sources"], terminal)
    faults = list(_serving_faults(answer.get("serving", {})))
    yield from _section("Services that do not serve as declared", faults, "red", terminal)
    if answer.get("etcd"):
        yield from _section("etcd", list(_etcd_lines(answer["etcd"])), "bold", terminal)
    for title, problems in _problems(answer["sources"]).items():
        yield from _section(title, problems, "red", terminal)
    if quarantined := answer.get("quarantined"):
        told = [f"{name}: {reason}" for name, reason in quarantined.items()]
        yield from _section("Quarantined (the kernel keeps what it had for them)", told, "red", terminal)
    notes = [note for source in answer["sources"] for note in source.get("notes", ())]
    yield from _section("Notes", notes, "bold", terminal)
    yield from _section("Warnings", answer["warnings"], "yellow", terminal)


def _problems(sources: Sequence[Json]) -> dict[str, list[str]]:
    """All problems, by a title that describes what of their units serves."""
    found: dict[str, list[str]] = {}
    for source in sources:
        told = list(source["problems"])
        for unit in source.get("refused", ()):
            for problem in unit["problems"]:
                if problem in told:
                    told.remove(problem)
                found.setdefault(f"Problems ({unit['serves']})", []).append(problem)
        if told:
            found.setdefault("Problems", []).extend(told)
    return found


def _facts(answer: Json, terminal: Screen) -> Iterator[tuple[str, str]]:
    yield "State", _state(answer, terminal)
    if answer["message"]:
        yield "", answer["message"]
    yield from _serving_facts(answer.get("serving"), terminal)
    yield "vipd", f"{answer['version']}, pid {answer['pid']}, started {_when(answer['started'])}"
    dataplane = answer["dataplane"]
    yield "Dataplane", dataplane["name"]
    for family in ("ipv4", "ipv6"):
        yield f"  {family}", dataplane.get(family) or "not available"
    if fast_path := answer.get("fast_path"):
        used = f"in use between {', '.join(fast_path['devices'])}"
        yield "Fast path", used if fast_path["active"] else f"not in use: {fast_path['reason']}"
    yield "Services", str(answer["services"])
    unchecked = f", {answer['unchecked']} unchecked" if answer.get("unchecked") else ""
    yield "Backends", f"{answer['ready']} of {answer['backends']} ready{unchecked}"
    if names := answer.get("names"):
        failing = terminal.paint(f", {names['failing']} failing", "yellow") if names["failing"] else ""
        yield "Names", f"{counted(names['names'], 'DNS name')}{failing}"
    if waits := answer.get("confirmation"):
        yield "Unconfirmed", terminal.paint(unconfirmed_text(waits), "yellow")
    if announcements := answer.get("announcements"):
        yield from _announcement_facts(announcements, terminal)
    yield "Last apply", _last_apply(answer)
    yield "Applies", f"{answer['applies']}, {answer['apply_failures']} failed"


def _serving_facts(serving: Json | None, terminal: Screen) -> Iterator[tuple[str, str]]:
    """Nothing for a daemon of an earlier version."""
    if not serving or not any(serving["services"].values()):
        return
    text, colour = f"{serving['state']}: {serving['message']}", ""
    if serving["state"] == "ok":
        text, colour = "ok: every service serves as declared, and its backends pass a check", "green"
    elif serving["state"] == "degraded":
        colour = "red" if serving["services"]["no-backends"] else "yellow"
    yield "Serving", terminal.paint(text, colour)


def _serving_faults(serving: Json) -> Iterator[str]:
    """A line for each address of unhealthy backends, and one for each other kind of fault."""
    for fault in serving.get("unhealthy", ()):
        reason = f": {fault['reason']}" if fault["reason"] else ""
        yield f"{fault['address']} is unhealthy in {_named(fault)}{reason}"
    more = serving.get("unhealthy_addresses", 0) - len(serving.get("unhealthy", ()))
    if more:
        yield f"and {more} more address{'es' * (more > 1)} with unhealthy backends"
    for fault in serving.get("others", ()):
        yield f"{fault['state']}: {_named(fault)}; hint: vipctl describe {fault['names'][0]}"


def _named(fault: Json) -> str:
    """`3 services: a, b, c`; only the first ones have names."""
    more = fault["services"] - len(fault["names"])
    names = ", ".join(fault["names"]) + (f" and {more} more" if more else "")
    return f"{counted(fault['services'], 'service')} ({names})"


def _state(answer: Json, terminal: Screen) -> str:
    text, colour = _STATES.get(answer["state"], (str(answer["state"]), ""))
    refused = sum(len(source.get("refused", ())) for source in answer["sources"])
    if refused and answer["state"] == IN_SYNC:
        have = "declaration has" if refused == 1 else "declarations have"
        text, colour = f"{text} of what serves; {refused} {have} problems", "yellow"
    elif answer["state"] == IN_SYNC and any(source["problems"] for source in answer["sources"]):
        text, colour = f"{text} of what serves; see Problems", "yellow"
    return terminal.paint(text, colour)


def _announcement_facts(told: Json, terminal: Screen) -> Iterator[tuple[str, str]]:
    if told["maintenance"]:
        yield "Maintenance", terminal.paint(maintenance_text(told["maintenance"]), "yellow")
    if number := told["routes"] + told["l2"]:
        yield "Announced", f"{told['announced']} of {number} address{'es' if number > 1 else ''}"
    for method, fault in told["faults"].items():
        yield "", f"by {method}: {fault}"


def _last_apply(answer: Json) -> str:
    if not answer["last_apply"]:
        return "none yet"
    seconds = answer.get("last_apply_seconds")
    took = f"took {1000 * seconds:.0f} ms" if seconds is not None else ""
    if not answer["applies"]:
        return f"none needed; the first comparison {took}" if took else "none needed"
    return ", ".join(filter(None, (_when(answer["last_apply"]), took)))


def _when(moment: str) -> str:
    """The moment in the form of the API, and its age."""
    ago = (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()
    return f"{moment} ({duration(ago)} ago)" if ago >= 0 else moment


def _source_lines(sources: Sequence[Json], terminal: Screen) -> list[str]:
    columns = (
        Column("SOURCE"),
        Column("LOCATION"),
        Column("SERVICES", right=True),
        Column("PROBLEMS", right=True),
    )
    rows = [[s["name"], s["location"], str(s["services"]), str(len(s["problems"]))] for s in sources]
    return table(columns, rows, terminal)


def _etcd_lines(etcd: Json) -> Iterator[str]:
    place = f"following {etcd['endpoint']}" if etcd["connected"] else "not connected"
    heard = "no contact yet" if etcd["lag"] is None else f"last contact {duration(etcd['lag'])} ago"
    known = f"revision {etcd['applied_revision'] or etcd['last_change']}"
    yield f"{place}, {known}, {heard}"
    below = f"{counted(etcd['keys'], 'key')} below {etcd['prefix']}"
    yield f"{below}; newest change at revision {etcd['last_change']}"
    for label, keys in (("rejected", etcd["rejected"]), ("held", etcd["held"])):
        if keys:
            more = f" and {len(keys) - KEYS_SHOWN} more" if len(keys) > KEYS_SHOWN else ""
            yield f"{len(keys)} {label}:{more}"
            yield from (f"  {key}" for key in keys[:KEYS_SHOWN])


def _section(title: str, lines: Sequence[str], colour: str, terminal: Screen) -> Iterator[str]:
    """A title and its lines; nothing without lines."""
    if not lines:
        return
    yield ""
    yield terminal.paint(title, colour)
    for line in lines:
        yield from prose(line, terminal, "  ")


@click.command()
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@output_option("text", "json", "yaml")
@socket_option
def reload(quiet: bool, form: str) -> int:
    """Make the daemon read all its sources again, and apply them."""
    answer = connect().change("POST", "reload")
    if form != "text":
        print(document(answer, form))
    if not answer["applied"]:
        what = "sources were read, but the kernel does not have their rules yet"
        raise CliError(what, str(answer.get("message") or ""), "vipctl status shows how it goes")
    if form == "text" and not quiet:
        print(f"reloaded: {_reloaded(answer)}the kernel has the rules of every source")
    return OK


def _reloaded(answer: Json) -> str:
    """The changes since the reload; empty if the daemon's version does not report them."""
    if "services" not in answer:
        return ""
    told = summary(answer) if answer["results"] else "none changed"
    known = "1 service" if answer["services"] == 1 else f"{answer['services']} services"
    return f"{known}, {told}; "


@click.command()
@output_option("text", "json", "yaml")
@socket_option
def version(form: str) -> int:
    """Print the version of vipctl, and the daemon's when it can be reached."""
    try:
        daemon, reason = str(connect().get("version")["version"]), ""
    except CliError as err:
        daemon, reason = None, err.message
    if form != "text":
        print(document({"vipctl": __version__, "vipd": daemon}, form))
        return OK
    print(f"vipctl {__version__}")
    print(f"vipd {daemon}" if daemon else f"vipd ? ({reason})")
    return OK
