"""vipctl(1): every verb with its options, as the command line has them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from vipd.cli import errors
from vipd.cli.manual.pages import Block, Entry, Example, Page, Paragraph, Section, Subsection, entry
from vipd.cli.manual.verbs import HELP, Option, Verb, group_options, verbs

EXIT_CODES = {
    errors.OK: "Done, or there was nothing to do.",
    errors.FAILED: "It failed or was refused; `status`: the kernel is not in sync; `check`: there are "
    "problems; `convert`: something was not converted; `diff`: something differs.",
    errors.USAGE: "The command line is wrong; `diff`: it failed.",
    errors.NOT_FOUND: "There is no such service or backend.",
    errors.UNREACHABLE: "The daemon cannot be reached, or does not let this user do that.",
    errors.TIMED_OUT: "What was waited for did not come in time.",
    errors.DEGRADED: "`status --exit-code`: the kernel is in sync, and a service does not serve as declared.",
    errors.INTERRUPTED: "Interrupted.",
}

_MANY = 6
"""Verbs that share an option before it is described once for all."""

_WORD = re.compile(r"[A-Z][A-Z_]+")
_OURS = re.compile(r"(?<![\w`-])(-{1,2}[a-z][a-z-]*|vipctl [a-z][a-z-]*)(?![\w`])")


def vipctl_page() -> Page:
    """The page."""
    return Page(
        "vipctl",
        1,
        "look at and change what vipd balances",
        (
            Section(
                "SYNOPSIS",
                (
                    Paragraph(
                        "`vipctl` [`--socket` *PATH*] [`--store` *STORE*] *VERB* [*OPTION*...] "
                        "[*ARGUMENT*...]"
                    ),
                ),
            ),
            Section("DESCRIPTION", _description()),
            Section("OPTIONS", tuple(_shared_options())),
            Section("COMMANDS", tuple(_commands())),
            Section("FILES", _files()),
            Section("ENVIRONMENT", _environment()),
            Section("EXIT STATUS", tuple(entry(f"`{code}`", text) for code, text in EXIT_CODES.items())),
            Section("EXAMPLES", _examples()),
            Section("SEE ALSO", (Paragraph("`vipd`(8), `vipd.yaml`(5), `vipd-services`(5)"),)),
        ),
    )


def _description() -> tuple[Block, ...]:
    return (
        Paragraph(
            "`vipctl` talks to the daemon `vipd`(8) over its UNIX socket. A change is on disk when `vipctl` "
            "says so, and has been put into the kernel; it survives a reboot. Services that a file declares "
            "are changed in that file: `vipctl` changes only those that it added, whose owner is `cli`."
        ),
        Paragraph(
            "Where hosts are fed by one etcd, `--store etcd` changes services for all of them: those whose "
            "owner begins with `etcd:`. The daemon writes them, and answers when this host has the change."
        ),
        Paragraph("Words that commands take:"),
        entry(
            "*TARGET*",
            "A service, by its name or by a frontend: `dns`, `10.96.0.10:53/udp`, `[fd00::10]:53/udp`; or by "
            "an address that no other service has: `10.96.0.10`.",
        ),
        entry(
            "*TARGET/BACKEND*",
            "A backend of a service: `dns/10.244.0.5`, `web/10.244.0.5:8080`. The port may be left out where "
            "no other backend has the address. Of several targets all are changed, or none if one is wrong.",
        ),
        entry("*VIP:PORT/PROTO*", "A frontend. `PROTO` is `tcp`, `udp` or `sctp`; without it: `tcp`."),
        entry(
            "*ADDR[:PORT][@WEIGHT]*",
            "A backend: `10.244.0.5`, `10.244.0.5:5353`, `[fd00::5]:5353`, each with `@3` for a weight "
            "from 0 to 65535, which else is 1.",
        ),
        entry(
            "*TYPE[:WHAT]*",
            "A health check: `tcp`, `tcp:8081`, `http:/healthz`, `http:8081/healthz`, `dns:example.com`, "
            "`udp:ping`, `exec:/usr/local/bin/check --quick`.",
        ),
        entry(
            "*{KEY: VALUE, ...}*",
            "A mapping as in a file, see `vipd-services`(5), in place of a port, an external address, a "
            "backend or a check: `'{address: 10.244.0.5, zone: east}'`. Quote it for the shell.",
        ),
        entry("*TIME*", "A duration: `90s`, `10m`, `3h`, `1d`, or a number of seconds."),
        entry(
            "*FILE*", "A declaration, see `vipd-services`(5); a directory of them; or `-`, standard input."
        ),
        entry("*KEY=VALUE*", "A setting, see `vipd.yaml`(5), as in `masquerade=always`."),
    )


def _commands() -> Iterator[Block]:
    family = ""
    for verb in verbs():
        if verb.group != family:
            family = verb.group
            yield Subsection(family)
        yield Entry(usage(verb), tuple(_verb_blocks(verb)))


def usage(verb: Verb) -> str:
    """`vipctl VERB [OPTION...] ARGUMENT...` with markup; required options are shown."""
    needed = [f"`{option.names[-1]}` *{option.metavar}*" for option in verb.options if option.required]
    arguments = [f"*{argument.metavar}*" for argument in verb.arguments]
    return " ".join([f"`vipctl {verb.name}`", *needed, "[*OPTION*...]", *arguments])


def _verb_blocks(verb: Verb) -> Iterator[Block]:
    known = _metavars(verb)
    for paragraph in verb.help:
        if paragraph.startswith("\b"):
            yield Example(paragraph.removeprefix("\b").strip("\n"))
        else:
            yield Paragraph(marked(paragraph, known))
    shared = _shared()
    own: list[Option] = []
    also: list[Option] = []
    for option in verb.options:
        told = option.names in shared and option.help == shared[option.names].help
        (also if told else own).append(option)
    yield from (_option(option, known) for option in own if option.names != HELP.names)
    if also:
        yield Paragraph(f"Also {', '.join(map(_brief, also))}.")


def _brief(option: Option) -> str:
    names = "|".join(f"`{name}`" for name in option.names)
    return f"{names} *{option.metavar}*" if option.metavar else names


def _shared_options() -> Iterator[Block]:
    above = group_options()
    yield from map(_option, above)
    yield Paragraph(
        "`--socket` may also stand behind a command. Many commands have some of these; of the forms of "
        "output, the first that is named with a command is its default."
    )
    known = {option.names for option in above}
    yield from (_option(replace(each, default="")) for each in _shared().values() if each.names not in known)


def _shared() -> dict[tuple[str, ...], Option]:
    """The options that many verbs have in the same words, by their names. Their metavars may differ."""
    found: dict[tuple[str, ...], list[Option]] = {}
    for option in (option for verb in verbs() for option in verb.options if option.names != HELP.names):
        found.setdefault(option.names, []).append(option)
    shared = {}
    for names, options in found.items():
        (text, count), *_ = Counter(option.help for option in options).most_common(1)
        if count >= _MANY:
            alike = {option.metavar: option for option in options if option.help == text}
            metavar, option = alike.popitem()
            shared[names] = replace(option, metavar="FORM" if alike else metavar)
    return shared


def _metavars(verb: Verb) -> Sequence[str]:
    texts = [argument.metavar for argument in verb.arguments] + [option.metavar for option in verb.options]
    return [word for text in texts for word in _WORD.findall(text)]


def _option(option: Option, known: Sequence[str] = ()) -> Entry:
    names = ", ".join(f"`{name}`" for name in option.names)
    value = f" *{option.metavar}*" if option.metavar else ""
    needed = " Required." if option.required else ""
    default = f" Default: `{option.default}`." if option.default else ""
    return entry(f"{names}{value}", f"{marked(option.help, known)}{needed}{default}")


def marked(text: str, metavars: Sequence[str]) -> str:
    """Help text with markup: options, vipd's own command lines, and placeholders."""
    parts = text.split("`")
    for index in range(0, len(parts), 2):  # text in backquotes stays
        plain = _OURS.sub(r"`\1`", parts[index])
        parts[index] = _WORD.sub(lambda word: f"*{word[0]}*" if word[0] in metavars else word[0], plain)
    return "`".join(parts)


def _files() -> tuple[Block, ...]:
    return (
        entry("`/run/vipd/vipd.sock`", "The daemon's socket."),
        entry("`/etc/vipd/services.d`", "Declarations, which `vipctl check` reads when no file is named."),
        entry(
            "`/etc/vipd/vipd.yaml`",
            "Settings, for `check`, `render`, `explain -f`, `cleanup` and `register`.",
        ),
        entry(
            "`/tmp/vipctl-edit-*`",
            "Texts of `vipctl edit` that were not applied; in `$TMPDIR` if that is set.",
        ),
        entry(
            "`/var/lib/vipd/state.db`",
            "What `vipctl` added; its changes, for `history`, `rollback`, `confirm`; overrides; maintenance.",
        ),
        entry("`/var/lib/vipd/host-changes.json`", "What the daemon did to this host, for `cleanup`."),
    )


def _environment() -> tuple[Block, ...]:
    return (
        entry("`VIPD_SOCKET`", "The daemon's socket, unless `--socket` names one."),
        entry(
            "`VISUAL`, `EDITOR`",
            "The editor of `vipctl edit`, the first of them that is set. No shell runs it.",
        ),
        entry("`NO_COLOR`", "If set, nothing is coloured. Colours are for terminals only."),
        entry("`COLUMNS`", "The width for tables, instead of the terminal's."),
    )


def _examples() -> tuple[Block, ...]:
    return (
        Paragraph("A virtual DNS server with two backends, one of them with twice the share:"),
        Example("vipctl add 10.96.0.10:53/udp 10.244.0.5 10.244.2.21@2 --name dns"),
        Paragraph("A web site of two addresses and two ports, with a health check and a backup:"),
        Example(
            "vipctl add 10.96.0.20,fd00:96::20 -p 80/tcp -p 443/tcp \\\n"
            "    10.244.0.5 fd00:244::5 --backup 10.244.0.9 \\\n"
            "    --check http:/healthz --name shop"
        ),
        Paragraph("Change anything about it in an editor:"),
        Example("vipctl edit shop"),
        Paragraph("Look at it, and at what would become of a client's packet:"),
        Example("vipctl describe dns\nvipctl explain --from 10.10.0.9 dns"),
        Paragraph("Take a backend out of service, and remove it later:"),
        Example("vipctl set dns/10.244.0.5 --weight 0\nvipctl remove-backend dns 10.244.0.5"),
        Paragraph("Try a file before it is put to use:"),
        Example("vipctl check web.yaml\nvipctl diff web.yaml\nvipctl apply web.yaml"),
        Paragraph("Apply it so that it is taken back if you cannot confirm it any more:"),
        Example("vipctl apply web.yaml --confirm 60s\nvipctl confirm"),
        Paragraph("See who changed what, and go back to the state before the last change:"),
        Example("vipctl history\nvipctl rollback"),
        Paragraph("Ready backends of every service, for a script:"),
        Example("vipctl list --json"),
    )
