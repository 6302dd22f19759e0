"""vipd(8): the daemon, its options, signals and files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from vipd.cli.manual.pages import Block, Example, Page, Paragraph, Section, entry
from vipd.host.preflight import EXIT_FAILED, EXIT_NOT_PERMITTED
from vipd.host.settings.command_line import EXIT_CONFIGURATION, argument_parser

EXIT_CODES = {
    0: "Stopped as it was told to; `--once` and `--check`: all is well.",
    EXIT_FAILED: "It failed; `--once` and `--check`: also when a declaration has problems.",
    2: "Unknown options.",
    EXIT_NOT_PERMITTED: "Not permitted to do its work: a restart would not help.",
    EXIT_CONFIGURATION: "Unusable settings: a restart would not help.",
    130: "`--once` was interrupted.",
}


def vipd_page() -> Page:
    """The page."""
    return Page(
        "vipd",
        8,
        "layer-4 load balancer for plain Linux hosts",
        (
            Section("SYNOPSIS", (Paragraph(_synopsis()),)),
            Section("DESCRIPTION", _description()),
            Section("OPTIONS", tuple(_options())),
            Section("SIGNALS", _signals()),
            Section("SYSTEMD", _systemd()),
            Section("FILES", _files()),
            Section("ENVIRONMENT", _environment()),
            Section("EXIT STATUS", tuple(entry(f"`{code}`", text) for code, text in EXIT_CODES.items())),
            Section("EXAMPLES", _examples()),
            Section(
                "SEE ALSO",
                (Paragraph("`vipctl`(1), `vipd.yaml`(5), `vipd-services`(5), `iptables`(8), `nft`(8)"),),
            ),
        ),
    )


def _actions() -> list[argparse.Action]:
    return [action for action in argument_parser()._actions if action.help != argparse.SUPPRESS]


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    return (
        action.metavar
        if isinstance(action.metavar, str)
        else "|".join(action.choices or (action.dest.upper(),))
    )


def _synopsis() -> str:
    shown = []
    for action in _actions():
        value = _value(action)
        shown.append(f"[`{action.option_strings[-1]}`{f' *{value}*' if value else ''}]")
    return " ".join(["`vipd`", *shown])


def _options() -> Iterator[Block]:
    for action in _actions():
        value = _value(action)
        names = ", ".join(f"`{name}`" for name in action.option_strings)
        text = action.help or ""
        # The help texts of argparse end without a full stop, and begin with a small letter.
        yield entry(f"{names}{f' *{value}*' if value else ''}", f"{text[:1].upper()}{text[1:]}.")


def _description() -> tuple[Block, ...]:
    return (
        Paragraph(
            "`vipd` gives a host virtual IPs that exist only as kernel rules, without Kubernetes. As the "
            "setting `dataplane` says, these are the chains of kube-proxy's iptables mode, or maps in an "
            "nftables table of its own. It reads declarations, see `vipd-services`(5), and makes the kernel "
            "equal to them: at the start, at every change, and when somebody else changes the rules. No "
            "traffic passes through the program."
        ),
        Paragraph(
            "It runs in the foreground as root, or as another user with CAP_NET_ADMIN (legacy iptables: with "
            "CAP_NET_RAW and CAP_DAC_READ_SEARCH, too), and logs to standard error. Without a service it "
            "makes no rule. `vipctl`(1) looks at it and adds services. A bad declaration never changes what "
            "runs: the last good version of that file goes on serving."
        ),
        Paragraph(
            "Rules stay when the daemon stops, is upgraded or crashes: traffic flows on. `vipctl cleanup` "
            "removes every trace."
        ),
        Paragraph(
            "Each option overrides the environment, which overrides the settings file, see `vipd.yaml`(5)."
        ),
    )


def _signals() -> tuple[Block, ...]:
    return (
        entry(
            "`SIGHUP`",
            "Read all declarations and the kernel anew, as `vipctl reload` does. Settings are not read.",
        ),
        entry("`SIGTERM`, `SIGINT`", "Stop. The rules stay."),
    )


def _systemd() -> tuple[Block, ...]:
    return (
        Paragraph(
            "`vipd` tells systemd that it is ready once the kernel holds what is declared (`Type=notify`), "
            "gives signs of life to its watchdog, and says how it is doing: `systemctl status vipd`. "
            "`systemctl reload vipd` reads declarations anew. New settings need `systemctl restart vipd`, "
            "which interrupts no flow."
        ),
        Paragraph(
            "Lines of the log carry their priority and what they are about: `journalctl -u vipd -p warning` "
            "shows the grave ones, `journalctl VIPD_SERVICE=dns` those on one service."
        ),
    )


def _files() -> tuple[Block, ...]:
    return (
        entry("`/etc/vipd/vipd.yaml`", "Settings, see `vipd.yaml`(5)."),
        entry(
            "`/etc/vipd/services.d`", "Declarations: `*.yaml`, `*.yml` and `*.json`. See `vipd-services`(5)."
        ),
        entry("`/run/vipd/vipd.sock`", "The UNIX socket of the API, which `vipctl` uses."),
        entry(
            "`/var/lib/vipd/state.db`",
            "What `vipctl` added, for the next start; the history of its changes; overrides; maintenance.",
        ),
        entry(
            "`/var/lib/vipd/state.db.last-good`",
            "A copy that takes its place if it is damaged.",
        ),
        entry(
            "`/var/lib/vipd/cache.db`",
            "What the next start has at once: the last good version of each file, the state of etcd.",
        ),
        entry("`/var/lib/vipd/host-changes.json`", "What was done to this host, for `vipctl cleanup`."),
        entry("`/var/lib/vipd/lock`", "Held while a daemon runs; its pid."),
        entry(
            "`/run/vipd/netns-INODE-PREFIX.lock`",
            "Held while a daemon writes the chains of a prefix in a network namespace; its pid.",
        ),
    )


def _environment() -> tuple[Block, ...]:
    return (entry("`VIPD_`*NAME*", "Settings, see `vipd.yaml`(5)."),)


def _examples() -> tuple[Block, ...]:
    return (
        Paragraph("Look for faults, and put the declarations into the kernel without staying:"),
        Example("vipd --check\nvipd --once"),
        Paragraph("A second daemon, in a network namespace of its own:"),
        Example(
            "ip netns exec red vipd --services-dir /etc/vipd/red.d \\\n"
            "    --state-dir /var/lib/vipd-red --socket /run/vipd/red.sock"
        ),
    )
