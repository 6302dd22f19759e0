"""`vipctl explain`: the effect of the compiled rules on one packet, from the daemon or computed here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from urllib.parse import urlencode

import click

from vipd.cli.argument_types import FILE, SETTING, TARGET, WORDS, Word
from vipd.cli.connection import connect
from vipd.cli.errors import OK, USAGE, CliError
from vipd.cli.list import HEALTH_COLOURS
from vipd.cli.output import (
    Cell,
    Column,
    Screen,
    document,
    output_option,
    prose,
    screen,
    socket_option,
    table,
    truncate_middle,
)
from vipd.observe.api_client import DaemonError, Json

BACKEND_COLUMNS = (Column("BACKEND"), Column("SHARE%", right=True), Column("SOURCE SEEN"))
HEALTH = Column("HEALTH")
"""Only a daemon knows it."""
RULE_COLUMNS = (Column("CHAIN"), Column("SHARE%", right=True), Column("RULE", min_width=20))
WIDE_RULE_COLUMNS = (Column("CHAIN"), Column("SHARE%", right=True), Column("MEANING"), Column("RULE"))

SCOPE = "These are vipd's own rules alone; vipctl trace follows a real packet."

_MAX_BRANCHES = 8
"""Maximum number of branches shown where a path forks; the table of backends has them all."""

_MIN_NAME_WIDTH, _BESIDES_NAME = 20, 54
"""Columns that the name of a chain gets at least, and those that everything beside it gets."""

MALFORMED = 400
"""HTTP status of a question that cannot be read."""

_Row = tuple[str, str, str, str]
"""Chain, share, the meaning of the rule, and the rule itself."""

_COLOURS = {"delivered": "green", "rejected": "red", "dropped": "red", "mixed": "yellow"}


@click.command()
@click.argument("target", metavar="TARGET", type=TARGET)
@click.option(
    "--from",
    "source",
    metavar="ADDR[:PORT]|local",
    type=Word(WORDS, ("local",)),
    required=True,
    help="The packet's source; local, or any address of this host: a program here.",
)
@click.option(
    "-f",
    "--file",
    "files",
    metavar="FILE",
    type=FILE,
    multiple=True,
    help="Compile FILE, and ask no daemon; repeatable.",
)
@click.option(
    "--settings", "settings_file", metavar="FILE", type=FILE, help="With -f: settings, as in vipd.yaml."
)
@click.option(
    "--set",
    "assignments",
    metavar="KEY=VALUE",
    type=SETTING,
    multiple=True,
    help="With -f: one setting; repeatable.",
)
@click.option(
    "--dataplane",
    type=click.Choice(["iptables", "nftables"]),
    help="With -f: whose rules; default: as set.",
)
@output_option("text", "wide", "json", "yaml")
@socket_option
def explain(
    target: str,
    source: str,
    *,
    files: tuple[str, ...],
    settings_file: str | None,
    assignments: tuple[str, ...],
    dataplane: str | None,
    form: str,
) -> int:
    """Show what the compiled rules do to a packet, rule by rule, without touching the kernel.

    TARGET is ADDR:PORT/PROTOCOL, also of a node port, or the name of a service. With -f FILE, which may be a
    directory or - for standard input, no daemon is asked. Rules that others put into the kernel are not
    looked at; trace shows what a real packet meets. -o wide shows each rule itself, too.

    \b
    vipctl explain --from 10.10.0.9 10.96.0.10:53/udp
    vipctl explain --from local -f dns.yaml dns
    """
    if files:
        # Imported on use: only without a daemon parts of it have to be imported.
        from vipd.cli.inputs import read_inputs
        from vipd.cli.offline import admitted, explain_files, host_addresses, read_settings

        settings = read_settings(settings_file, assignments)
        inputs = admitted(read_inputs(files), settings, host_addresses(settings))
        view = explain_files(inputs.require_ok(), settings, source, target, dataplane or "")
    elif settings_file or assignments or dataplane:
        own = "the daemon has its own"
        raise CliError("--settings, --set and --dataplane go with -f FILE", own, code=USAGE)
    else:
        view = _asked(source, target)
    if form in ("text", "wide"):
        print("\n".join(_lines(view, screen(), wide=form == "wide")))
    else:
        print(document({"explanation": view}, form))
    return OK


def _asked(source: str, target: str) -> Json:
    query = urlencode({"from": source, "target": target})
    try:
        answer: Json = connect().get_query("explain", query)["explanation"]
    except CliError as err:
        if isinstance(err.__cause__, DaemonError) and err.__cause__.status == MALFORMED:
            # Input that the daemon cannot parse is from this command line.
            err.code = USAGE
        raise
    return answer


def _lines(view: Json, terminal: Screen, *, wide: bool = False) -> Iterator[str]:
    """The answer as text; `wide`: with each rule as it is written, and no column cut."""
    colour = _COLOURS.get(view["verdict"], "bold")
    yield from (terminal.paint(line, colour) for line in prose(view["summary"], terminal))
    if view["reason"]:
        yield from prose(view["reason"], terminal)
    if view["hint"]:
        yield from prose(f"hint: {view['hint']}", terminal)
    for note in view["notes"]:
        yield from prose(f"note: {note}", terminal)
    if view["backends"]:
        yield ""
        columns = (*BACKEND_COLUMNS, *([HEALTH] if view["backends"][0].get("health") else []))
        yield from table(columns, [_backend_row(backend, view) for backend in view["backends"]], terminal)
    if view["outcomes"]:
        yield from _rule_lines(view["outcomes"], Screen(None, terminal.colour) if wide else terminal, wide)
    yield ""
    yield from prose(SCOPE, terminal)


def _backend_row(backend: Json, view: Json) -> list[str | Cell]:
    seen = "this host's" if backend["masqueraded"] else f"its own, {view['packet']['source']}"
    health = [Cell(each, HEALTH_COLOURS.get(each, "")) for each in [backend.get("health")] if each]
    return [backend["endpoint"], _percent(backend["share"]), seen, *health]


def _rule_lines(outcomes: Sequence[Json], terminal: Screen, wide: bool = False) -> Iterator[str]:
    """One path; at a fork, every branch with its share, and then only the most probable one."""
    likeliest = max(outcomes, key=lambda outcome: float(outcome["probability"]))
    path = likeliest["rules"]
    fork = _fork(outcomes) if len(outcomes) > 1 else len(path)
    rows = [(rule["table"], _rule_row(rule)) for rule in _informative(path[:fork], path)]
    if fork < len(path):
        rows += [(path[fork]["table"], row) for row in _branch_rows(outcomes, fork)]
        rows += [(rule["table"], _rule_row(rule)) for rule in _informative(path[fork + 1 :], path)]
    if rows and fork + 1 < len(path):
        yield ""
        yield f"Rules, after the fork those on the way to {likeliest['backend'] or likeliest['verdict']}:"
    elif rows:
        yield ""
        yield "Rules:"
    if terminal.width is not None:
        room = max(_MIN_NAME_WIDTH, terminal.width - _BESIDES_NAME)
        rows = [(name, (truncate_middle(row[0], room), *row[1:])) for name, row in rows]
    widths = [max(len(row[1][i]) for row in rows) for i in range(3 if wide else 2)] if rows else []
    for name, group in groupby(rows, key=lambda row: row[0]):
        yield terminal.paint(f"  {name}", "bold")
        # All groups get columns of the same width, so that they read as one table.
        cells: list[list[str | Cell]] = [
            [
                chain.ljust(widths[0]),
                share.rjust(widths[1]),
                *([told.ljust(widths[2]), rule] if wide else [told]),
            ]
            for _, (chain, share, told, rule) in group
        ]
        columns = WIDE_RULE_COLUMNS if wide else RULE_COLUMNS
        yield from table(columns, cells, terminal, headers=False, indent="    ")


def _informative(rules: Sequence[Json], path: Sequence[Json]) -> Iterator[Json]:
    """Rules without jumps to chains of which no rule matched. `rules` are a part of the path."""
    following = {id(rule): after for rule, after in pairwise(path)}
    for rule in rules:
        after = following.get(id(rule))
        chain = _only_leads_to(str(rule["rule"]))
        if not chain or (after is not None and after["chain"] == chain):
            yield rule


def _only_leads_to(rule: str) -> str:
    """The chain of a jump; nothing for a rule that does something by itself."""
    word, _, chain = rule.rpartition(" ")
    if word.endswith(("jump", "goto")):
        return chain
    chain = rule.rpartition(" -j ")[2].partition(" ")[0]
    # Of iptables' targets only names of chains contain a hyphen.
    return chain if rule.startswith("-") and "-" in chain else ""


def _fork(outcomes: Sequence[Json]) -> int:
    """Number of common rules at the start of all paths."""
    paths = [outcome["rules"] for outcome in outcomes]
    for index, rules in enumerate(zip(*paths, strict=False)):
        if any(rule != rules[0] for rule in rules):
            return index
    return min(map(len, paths))


def _branch_rows(outcomes: Sequence[Json], fork: int) -> list[_Row]:
    rows = [
        _branch_row(outcome, outcome["rules"][fork])
        for outcome in outcomes[:_MAX_BRANCHES]
        if len(outcome["rules"]) > fork
    ]
    more = len(outcomes) - _MAX_BRANCHES
    return [*rows, ("", "", f"and {more} more, as above", "")] if more > 0 else rows


def _branch_row(outcome: Json, rule: Json) -> _Row:
    """What distinguishes a branch, or else where it leads."""
    chain, share, told, text = _rule_row(rule, _percent(outcome["probability"]))
    backend = outcome["backend"] or ""
    return chain, share, told if backend in told else f"{told} -> {backend}", text


def _rule_row(rule: Json, share: str = "") -> _Row:
    element = f" (element {rule['element']})" if rule.get("element") else ""
    return rule["chain"], share, rule["meaning"], f"{rule['rule']}{element}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
