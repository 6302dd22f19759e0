"""The completion script for zsh, for its `fpath` or to be sourced. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vipd.cli.argument_types import DIRECTORIES, FILES, SETTINGS, WORDS
from vipd.cli.manual.verbs import Offer, Option, Verb

_HEAD = r"""#compdef vipctl
# Completion of vipctl for zsh. Made by python -m vipd.cli.manual of the program itself.

# Names that the daemon knows, of the kind $1.
__vipctl_ask() {
    local -a names shown
    local answer expl
    answer=$($vipctl_program $vipctl_socket complete $1 -- ${(Q)line[1]} "${(Q)PREFIX}" 2>/dev/null)
    for answer in ${(f)answer}; do
        names+=(${answer%%$'\t'*})
        shown+=(${answer/$'\t'/  })
    done
    _wanted names expl name compadd -l -d shown -a names
}

# For arguments of which nothing is known: the message of _arguments would keep options from being inserted.
__vipctl_nothing() {
    return 1
}

__vipctl_settings() {
    compadd -S '' -- @NAMES@
}
"""

_VERB = r"""
_vipctl() {
    local curcontext=$curcontext state vipctl_program=${(Q)words[1]}
    local -a line vipctl_socket verbs
    local -A opt_args
    _arguments -C -S @OPTIONS@ \
        '(-): :->verb' \
        '(-)*:: :->arguments' && return
    [[ -n ${opt_args[--socket]} ]] && vipctl_socket=(--socket ${(Q)opt_args[--socket]})
    case $state in
        verb)
            verbs=(
@VERBS@
            )
            _describe -t verbs verb verbs
            ;;
        arguments)
            # What stands before a verb was looked at above; what stands behind it wins.
            local -i place=${words[(I)--socket]}
            (( place && place < CURRENT - 1 )) && vipctl_socket=(--socket ${(Q)words[place + 1]})
            vipctl_socket+=(${(Q)${(M)words:#--socket=*}})
            curcontext=${curcontext%:*:*}:vipctl-$words[1]:
            case $words[1] in
@CASES@
            esac
            ;;
    esac
}

# Found on fpath, this file is the function; sourced, it defines it.
if [[ $funcstack[1] == _vipctl ]]; then
    _vipctl "$@"
else
    compdef _vipctl vipctl
fi
"""


def script(before_verb: Sequence[Option], verbs: Sequence[Verb], settings: Sequence[str]) -> str:
    """The whole script."""
    listed = "\n".join(
        f"                {_quoted(f'{verb.name}:{_escaped(verb.summary)}')}" for verb in verbs
    )
    replaced = {
        "@NAMES@": " ".join(f"{name}=" for name in settings),
        "@OPTIONS@": " \\\n        ".join(part for option in before_verb for part in _option(option)),
        "@VERBS@": listed,
        "@CASES@": "\n".join(map(_case, verbs)),
    }
    text = _HEAD + _VERB
    for mark, part in replaced.items():
        text = text.replace(mark, part)
    return text


def _case(verb: Verb) -> str:
    parts = [part for option in verb.options for part in _option(option)]
    for index, argument in enumerate(verb.arguments, 1):
        place = "*" if argument.repeated else str(index)
        action = _action(argument.offer) if argument.offer.source else " __vipctl_nothing"
        parts.append(_quoted(f"{place}:{_escaped(argument.metavar)}:{action}"))
    indent = " " * 16
    lines = f" \\\n{indent}        ".join(["_arguments -S", *parts])
    return f"{indent}{verb.name})\n{indent}    {lines}\n{indent}    ;;"


def _option(option: Option) -> Iterator[str]:
    """A specification for each name of an option; one of its names excludes the others, unless it repeats."""
    before = "*" if option.repeatable else f"({' '.join(option.names)})"
    for name in option.names:
        if option.offer is None:
            yield _quoted(f"{before}{name}[{_escaped(option.help)}]")
            continue
        value = f":{_escaped(option.metavar)}:{_action(option.offer)}"
        end = "=" if name.startswith("--") else "+"
        yield _quoted(f"{before}{name}{end}[{_escaped(option.help)}]{value}")


def _action(offer: Offer) -> str:
    # A space before a function keeps _arguments from adding its own arguments.
    if offer.source == WORDS:
        return f"({' '.join(offer.words)})"
    plain = {"": " ", FILES: "_files", DIRECTORIES: "_files -/", SETTINGS: " __vipctl_settings"}
    return plain.get(offer.source, f" __vipctl_ask {offer.source}")


def _escaped(text: str) -> str:
    """Text within a specification, where colons and brackets have a meaning."""
    return "".join(f"\\{character}" if character in "\\:[]" else character for character in text)


def _quoted(text: str) -> str:
    inside = text.replace("'", "'\\''")
    return f"'{inside}'"
