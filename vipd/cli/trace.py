"""`vipctl trace`: the way of a real packet through this host's kernel, compared with `explain`."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from urllib.parse import urlencode

import click

from vipd.cli.argument_types import TARGET, WORDS, Word
from vipd.cli.connection import connect
from vipd.cli.errors import FAILED, INTERRUPTED, OK, TIMED_OUT, UNREACHABLE, USAGE, CliError
from vipd.cli.output import Column, Screen, document, output_option, prose, screen, socket_option, table
from vipd.cli.rules import file_chain_prefix
from vipd.cli.words import seconds
from vipd.dataplane.conntrack.entries import Entry
from vipd.dataplane.conntrack.netlink import Conntrack, ConntrackError, open_socket
from vipd.declaration.syntax import InvalidTextError, parse_frontend
from vipd.host.process import run
from vipd.model.service import Family, Frontend, Protocol, family_of
from vipd.observe.api_client import DaemonError, Json
from vipd.observe.explain.query import LOCAL, QueryError, Source, is_own, parse_source
from vipd.observe.live_trace.matched_rules import matched_rules
from vipd.observe.live_trace.matching import chains_of
from vipd.observe.live_trace.outcome import compare, outcome_of
from vipd.observe.live_trace.packet_trace import PacketTrace
from vipd.observe.live_trace.packets import Flow
from vipd.observe.live_trace.report import Interfaces, Report, rule_text, tracked_words
from vipd.observe.live_trace.rule_reader import read_rules
from vipd.observe.live_trace.sending import Sender
from vipd.observe.live_trace.table import TraceError
from vipd.observe.live_trace.watching import TraceSession

COLUMNS = (Column("CHAIN"), Column("PART", min_width=12), Column("RULE", min_width=32))
WIDE_COLUMNS = (Column("CHAIN"), Column("PART"), Column("MEANING"), Column("RULE"))
ANSWER_SECONDS = 1.0
"""How long the result of a connection from here is waited for, once its packet has passed."""
SENT_SECONDS = 5.0
"""A packet that was sent here is traced at once, if at all."""
MAX_PACKETS = 100
MALFORMED = 400

_COLOURS = {"delivered": "green", "rejected": "red", "dropped": "red", "lost": "red"}


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """The parsed command line."""

    flow: Flow
    send: bool
    count: int | None
    """None: until ctrl-C."""
    timeout: int
    form: str
    no_prediction_reason: str
    """Why the daemon has no prediction; empty if it has."""


@click.command()
@click.argument("target", metavar="TARGET", type=TARGET)
@click.option(
    "--from",
    "source",
    metavar="ADDR[:PORT]|local",
    type=Word(WORDS, (LOCAL,)),
    help="Only packets of this source; local: of a program here. Default: of any.",
)
@click.option("--send", is_flag=True, help="Send such a packet, if this host is the source.")
@click.option("--timeout", metavar="TIME", default="30s", help="How long to wait; default: 30s.")
@click.option(
    "-n", "--count", metavar="N", type=click.IntRange(1, MAX_PACKETS), help="So many packets; default: 1."
)
@click.option("-f", "--follow", is_flag=True, help="Go on with every new flow, until ctrl-C.")
@output_option("text", "wide", "json")
@socket_option
def trace(
    *, target: str, source: str | None, send: bool, timeout: str, count: int | None, follow: bool, form: str
) -> int:
    """Show what a real packet meets in the kernel: every rule that it hits, also those of others, and what
    becomes of it. Beside it stands what explain says; a difference is shouted, and ends with exit code 1.

    TARGET is ADDR:PORT/PROTOCOL or the name of a service. The first packet of a new flow to it is waited for,
    or sent with --send: a TCP connection or an empty datagram. Needs root. The rule that marks packets for
    tracing goes with this program, however it ends. Without the daemon there is no prediction. -o wide shows
    each rule itself, too, with its handle.

    \b
    vipctl trace --from local --send 10.96.0.10:80/tcp
    vipctl trace --from 10.244.1.5 dns --timeout 2m
    """
    if follow and (send or count):
        hint = "--send --count N sends N packets"
        raise CliError("--follow goes neither with --send nor with --count", hint=hint, code=USAGE)
    request = _read_request(target, source, send, None if follow else count or 1, seconds(timeout), form)
    status = _status()
    _check_variant(status, request.flow.family)
    shown = _TracePrinter(request, status)
    try:
        return _trace_sent(request, shown) if request.send else _trace_received(request, shown)
    except TraceError as error:
        code = UNREACHABLE if error.forbidden else FAILED
        raise CliError(error.what, error.why, error.hint, code=code) from None
    except KeyboardInterrupt:
        if follow:
            return INTERRUPTED
        raise


def _read_request(
    target: str, source: str | None, send: bool, count: int | None, timeout: int, form: str
) -> TraceRequest:
    """The complete parameters. Raises CliError."""
    sender = _source(source)
    frontend, no_prediction_reason = _frontend(target, source)
    if sender.address and family_of(sender.address) is not family_of(frontend.address):
        hint = f"give an {family_of(frontend.address)} address with --from"
        what = f"{sender.address} and {frontend.address} are of different families"
        raise CliError(what, hint=hint, code=USAGE)
    local = _is_local(sender, source, send)
    if send and not local:
        said = f"{sender.address} is no address of this host: the packet must be sent there; waiting for it"
        print(f"vipctl: {said}", file=sys.stderr)
    if send and local and sender.port and count != 1:
        raise CliError("a source port is good for one packet", hint="without :PORT, or -n 1", code=USAGE)
    flow = Flow(
        frontend.address, frontend.port, frontend.protocol, sender.address, sender.port or 0, from_here=local
    )
    return TraceRequest(flow, send and local, count, timeout, form, no_prediction_reason)


def _source(text: str | None) -> Source:
    try:
        return parse_source(LOCAL if text is None else text)
    except QueryError as error:
        raise CliError(error.what, error.why, error.hint, code=USAGE) from None


def _is_local(sender: Source, text: str | None, send: bool) -> bool:
    """Whether only packets of this host are traced."""
    if not sender.address:
        return send or text is not None
    # Imported on use: it brings the settings with it, which are slow to import.
    from vipd.control.host import host_addresses

    return is_own(sender.address, asyncio.run(host_addresses()))


def _frontend(target: str, source: str | None) -> tuple[Frontend, str]:
    """The frontend of TARGET, and why the daemon has no prediction, if so."""
    meant: Frontend | InvalidTextError
    try:
        meant = parse_frontend(target)
    except InvalidTextError as error:
        meant = error
    try:
        packet = _explained(source or LOCAL, target)["packet"]
    except CliError as error:
        if isinstance(meant, Frontend) and (error.code in (UNREACHABLE, FAILED) or source is None):
            return meant, _without_hint(error) if error.code in (UNREACHABLE, FAILED) else ""
        if isinstance(meant, InvalidTextError) and error.code == UNREACHABLE:
            hint = "ADDR:PORT/PROTOCOL needs no daemon"
            raise CliError(f"cannot look up {target}", _without_hint(error), hint, code=error.code) from None
        raise
    return Frontend(packet["destination"], packet["port"], Protocol(packet["protocol"])), ""


def _without_hint(error: CliError) -> str:
    return error.message.partition("; hint: ")[0]


def _explained(source: str, target: str) -> Json:
    """The daemon's explanation. Raises CliError; one of wrong usage when the daemon cannot read the words."""
    try:
        answer: Json = connect().get_query("explain", urlencode({"from": source, "target": target}))
    except CliError as error:
        if isinstance(error.__cause__, DaemonError) and error.__cause__.status == MALFORMED:
            error.code = USAGE
        raise
    found: Json = answer["explanation"]
    return found


def _status() -> Json:
    """The daemon's status; empty while it does not answer."""
    with suppress(CliError):
        status: Json = connect().get("status")
        return status
    return {}


def _check_variant(status: Json, family: Family) -> None:
    """Raises CliError if the daemon writes rules that the kernel does not trace."""
    version = str(status.get("dataplane", {}).get(str(family), ""))
    if version.endswith("(legacy)"):
        hint = "iptables_variant: nft or dataplane: nftables can be traced; vipctl explain needs neither"
        raise CliError("packets cannot be traced", f"vipd writes its rules with {version}", hint)


def _trace_sent(request: TraceRequest, shown: _TracePrinter) -> int:
    """Send packets, each after the previous one has been traced."""
    with ExitStack() as opened:
        senders = [opened.enter_context(Sender(request.flow)) for _ in range(request.count or 1)]
        flows = [replace(request.flow, source_port=sender.port) for sender in senders]
        watch = opened.enter_context(TraceSession(flows))
        shown.begin()
        for sender in senders:
            timeout = min(SENT_SECONDS if sender.send() else ANSWER_SECONDS, request.timeout)
            found = watch.traces(timeout)
            # Not the retransmission of an earlier packet.
            trace = next((each for each in found if each.start.source_port == sender.port), None)
            answer = sender.answer(ANSWER_SECONDS if trace is not None and trace.passed else 0)
            if trace is None:
                hint = f"ip route get {request.flow.destination}"
                raise CliError("the packet never came to the rules", answer, hint)
            shown.show(trace, answer)
        shown.end(watch.notes)
    return shown.code


def _trace_received(request: TraceRequest, shown: _TracePrinter) -> int:
    """Wait for packets that others send."""
    with TraceSession([request.flow]) as watch:
        shown.begin()
        for trace in watch.traces(request.timeout if request.count else None):
            shown.show(trace)
            if shown.number == request.count:
                break
        shown.end(watch.notes)
    if shown.number != request.count:
        why = f"only {shown.number} of {request.count} did" if shown.number else ""
        older = (
            f"{watch.earlier_packets} of flows that had begun before, whose way was decided then"
            if watch.earlier_packets
            else ""
        )
        hint = "is the client sending, and does its route lead here?"
        what = f"no packet of a new flow {request.flow} came within {request.timeout}s"
        raise CliError(what, "; ".join(filter(None, (why, older))), hint, code=TIMED_OUT)
    return shown.code


class _TracePrinter:
    """The output so far."""

    def __init__(self, request: TraceRequest, status: Json) -> None:
        self._request = request
        self._prefix = str(status.get("settings", {}).get("chain_prefix") or file_chain_prefix())
        self._views: list[Json] = []
        self._printed: set[str] = set()
        self.number = 0
        self.code = OK

    def begin(self) -> None:
        """Tracing has started."""
        if self._request.no_prediction_reason:
            print(f"vipctl: no prediction: {self._request.no_prediction_reason}", file=sys.stderr)
        if not self._request.send:
            print(f"vipctl: waiting for {self._request.flow}", file=sys.stderr, flush=True)

    def show(self, trace: PacketTrace, answer: str = "") -> None:
        """One packet, with its prediction."""
        listed = asyncio.run(read_rules(chains_of(trace), run, self._print_once))
        explanation, silent = self._prediction(trace)
        matched = matched_rules(trace, listed, self._prefix, (explanation or {}).get("service_port") or "")
        outcome = outcome_of(trace, matched)
        comparison = compare(outcome, matched, explanation) if explanation is not None else None
        at = datetime.now(UTC) - timedelta(seconds=time.monotonic() - trace.began)
        tracked = self._tracked(trace) if trace.passed else None
        interfaces = Interfaces(*map(_interface, (trace.inbound, trace.outbound)))
        report = Report(trace, matched, outcome, comparison, answer, at, tracked, interfaces)
        view = report.view(explanation, silent)
        self.code = self.code if report.agrees else FAILED
        if self._request.form in ("text", "wide"):
            lines = _lines(report, silent, screen(), wide=self._request.form == "wide")
            print("\n".join([*([""] if self.number else []), *lines]), flush=True)
        elif self._request.count is None:
            print(json.dumps(view), flush=True)
        else:
            self._views.append(view)
        self.number += 1

    def _tracked(self, trace: PacketTrace) -> Entry | None:
        """The packet's flow in connection tracking now."""
        start = trace.start
        source, destination = (start.source, start.source_port), (start.destination, start.port)
        try:
            with Conntrack(open_socket()) as opened:
                return opened.get(start.protocol, source, destination)
        except ConntrackError as error:
            self._print_once(str(error))
            return None

    def _print_once(self, text: str) -> None:
        """Print a note once, however many packets are traced."""
        if text not in self._printed and len(self._printed) < MAX_PACKETS:
            self._printed.add(text)
            print(f"vipctl: {text}", file=sys.stderr)

    def end(self, notes: Sequence[str]) -> None:
        """Tracing has ended."""
        for note in dict.fromkeys(notes):
            print(f"vipctl: {note}", file=sys.stderr)
        if self._request.form == "json" and self._request.count is not None:
            print(document({"traces": self._views}, "json"))

    def _prediction(self, trace: PacketTrace) -> tuple[Json | None, str]:
        """The explanation of exactly this packet; else why there is none."""
        if self._request.no_prediction_reason:
            return None, self._request.no_prediction_reason
        start = trace.start
        try:
            return _explained(start.sender, f"{start.receiver}/{start.protocol}"), ""
        except CliError as error:
            return None, _without_hint(error)


def _lines(report: Report, silent: str, terminal: Screen, *, wide: bool = False) -> Iterator[str]:
    """The report as text; `wide`: with each rule as the kernel has it, and no column cut."""
    trace, outcome = report.trace, report.outcome
    inbound, outbound = report.interfaces
    way = f"came in by {inbound}" if trace.forwarded else "sent by this host"
    way += f", leaves by {outbound}" if outbound and trace.passed else ""
    way += f", {report.at:%H:%M:%S}.{report.at.microsecond // 1000:03d}Z" if report.at else ""
    yield from (terminal.paint(line, "bold") for line in prose(f"{trace.start}, {way}", terminal))
    texts = [[rule_text(rule)] if wide else [] for rule in report.shown()]
    rows = [[*row, *text] for row, text in zip(report.rows(), texts, strict=True)]
    columns, page = (WIDE_COLUMNS, Screen(None, terminal.colour)) if wide else (COLUMNS, terminal)
    # All groups get columns of the same width, so that they read as one table.
    widths = [max((len(row[at]) for row in rows), default=0) for at in range(1, len(columns))]
    for name, group in groupby(rows, key=lambda row: row[0]):
        yield terminal.paint(f"  {name}", "bold")
        cells = [[*map(str.ljust, row[1:-1], widths), row[-1]] for row in group]
        yield from table(columns, cells, page, headers=False, indent="    ")
    if report.tracked is not None:
        yield from prose(f"tracked:  {tracked_words(report.tracked)}", terminal)
    said = f"kernel:   {outcome}"
    if outcome.source != trace.start.source:
        said += f" as {outcome.source}"
    if report.answer:
        said += f"; {report.answer}"
    yield from (terminal.paint(line, _COLOURS.get(outcome.verdict, "")) for line in prose(said, terminal))
    yield from _comparison_lines(report, silent, terminal)


def _comparison_lines(report: Report, silent: str, terminal: Screen) -> Iterator[str]:
    comparison = report.comparison
    if comparison is None:
        yield from prose(f"explain:  not known: {silent}", terminal)
        return
    if not report.agrees:
        yield from prose(f"explain:  {comparison.predicted}", terminal)
        if blamed := report.deciding_rule():
            yield from prose(f"decided:  {blamed}", terminal)
        for difference in comparison.differences:
            shouted = f"DIFFERENT: explain and the kernel do not agree: {difference}"
            yield from (terminal.paint(line, "red") for line in prose(shouted, terminal))
        return
    share = comparison.share or 0
    of = "" if share > 0.9999 else f", for {100 * share:.1f}% of such flows"
    yield from prose(f"explain:  the same{of}", terminal)


def _interface(number: int) -> str:
    """Its name; empty for none."""
    if not number:
        return ""
    try:
        return socket.if_indextoname(number)
    except OSError:
        return f"interface {number}"
