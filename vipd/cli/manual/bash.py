"""The completion script for bash, with or without bash-completion. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from vipd.cli.argument_types import DAEMON_SOURCES, DIRECTORIES, FILES, SETTINGS, WORDS
from vipd.cli.manual.verbs import Offer, Option, Verb

_HEAD = r"""# Completion of vipctl for bash. Made by python -m vipd.cli.manual of the program itself.

# Splits the line before the cursor as the shell would: COMP_WORDS is cut at every colon and equals sign, also
# within 10.96.0.10:53/udp. Sets `words`, the last of them being completed, and `kept`, that part of it which
# readline leaves alone because one of those characters ends it.
__vipctl_split() {
    local line=${COMP_LINE:0:COMP_POINT} word='' began='' quote='' char i
    words=() kept=''
    for ((i = 0; i < ${#line}; i++)); do
        char=${line:i:1}
        case $quote,$char in
            ,[\'\"]) quote=$char began=1 kept=$word ;;
            ,\\ | \",\\) i=$((i + 1)) began=1 word+=${line:i:1} ;;
            ,[[:space:]])
                [[ -n $began ]] && words+=("$word")
                word='' began='' kept=''
                ;;
            ,*)
                word+=$char began=1
                [[ $char == [:=@] && $COMP_WORDBREAKS == *"$char"* ]] && kept=$word
                ;;
            \',\' | \",\") quote='' ;;
            *) word+=$char ;;
        esac
    done
    words+=("$word")
}
"""

_TAIL = r"""
# What may stand for the value $1 of the kinds in `offer`, in `found`.
__vipctl_find() {
    local kind=${offer[0]}
    case $kind in
        @WORDS@) found=("${offer[@]:1}") ;;
        @SETTINGS@)
            found=(@NAMES@)
            compopt -o nospace 2>/dev/null
            ;;
        @FILES@) compopt -o default 2>/dev/null ;;
        @DIRECTORIES@) compopt -o dirnames 2>/dev/null ;;
        @ASKED@)
            mapfile -t found < <(
                "${words[0]}" "${socket[@]}" complete "$kind" -- "${arguments[@]:0:1}" "$1" 2>/dev/null
            )
            found=("${found[@]%%$'\t'*}")
            ;;
    esac
}

_vipctl() {
    local -a words arguments=() socket=() offer=() found=()
    local kept current prefix='' verb='' option='' ended='' word
    __vipctl_split
    current=${words[-1]}
    for word in "${words[@]:1:${#words[@]}-2}"; do
        if [[ -n $option ]]; then
            [[ $option == --socket ]] && socket=(--socket "$word")
            option=''
        elif [[ -z $ended && $word == -- ]]; then
            ended=1
        elif [[ -z $ended && $word == --*=* ]]; then
            [[ $word == --socket=* ]] && socket=("$word")
        elif [[ -z $ended && $word == -* ]]; then
            __vipctl_value "$verb" "$word" && option=$word
        elif [[ -z $verb ]]; then
            verb=$word
        else
            arguments+=("$word")
        fi
    done
    offer=()
    if [[ -n $option ]]; then
        __vipctl_value "$verb" "$option"
    elif [[ -z $ended && $current == --*=* ]]; then
        prefix=${current%%=*}=
        __vipctl_value "$verb" "${current%%=*}"
    elif [[ -z $ended && $current == -* ]]; then
        __vipctl_options "$verb"
    elif [[ -z $verb ]]; then
        offer=(@WORDS@ @VERBS@)
    else
        __vipctl_argument "$verb" "${#arguments[@]}"
    fi
    __vipctl_find "${current#"$prefix"}"
    COMPREPLY=()
    for word in "${found[@]}"; do
        [[ -n $word && $prefix$word == "$current"* ]] && COMPREPLY+=("${prefix}${word}")
    done
    COMPREPLY=("${COMPREPLY[@]#"$kept"}")
}

complete -F _vipctl vipctl
"""


def script(before_verb: Sequence[Option], verbs: Sequence[Verb], settings: Sequence[str]) -> str:
    """The whole script."""
    option_groups = {"": before_verb, **{verb.name: verb.options for verb in verbs}}
    replaced = {
        "@WORDS@": WORDS,
        "@SETTINGS@": SETTINGS,
        "@FILES@": FILES,
        "@DIRECTORIES@": DIRECTORIES,
        "@ASKED@": " | ".join(DAEMON_SOURCES),
        "@NAMES@": " ".join(f"{name}=" for name in settings),
        "@VERBS@": " ".join(verb.name for verb in verbs),
    }
    tail = _TAIL
    for mark, text in replaced.items():
        tail = tail.replace(mark, text)
    parts = (
        _function(
            "__vipctl_value",
            '"$1 $2"',
            "The kind of value that option $2 of verb $1 takes, if any.",
            _values(option_groups),
        ),
        _function(
            "__vipctl_argument", '"$1 $2"', "The kind of argument $2 of verb $1, from 0.", _arguments(verbs)
        ),
        _function("__vipctl_options", '"$1"', "The options of verb $1.", _options(option_groups)),
    )
    return "".join((_HEAD, *parts, tail))


def _function(name: str, word: str, purpose: str, cases: Iterator[tuple[str, Sequence[str]]]) -> str:
    """A function that sets `offer` by its arguments, and fails where there is nothing to offer."""
    lines = [
        f"        {pattern}) offer=({' '.join(map(shlex.quote, offer))}) ;;\n" for pattern, offer in cases
    ]
    body = "".join([*lines, "        *) return 1 ;;\n"])
    return f"\n# {purpose}\n{name}() {{\n    case {word} in\n{body}    esac\n}}\n"


def _values(option_groups: dict[str, Sequence[Option]]) -> Iterator[tuple[str, Sequence[str]]]:
    for verb, options in option_groups.items():
        for option in options:
            if option.offer is not None:
                pattern = " | ".join(f"'{verb} {name}'" for name in option.names)
                yield pattern, _words(option.offer)


def _arguments(verbs: Sequence[Verb]) -> Iterator[tuple[str, Sequence[str]]]:
    for verb in verbs:
        for index, argument in enumerate(verb.arguments):
            if argument.offer.source:
                place = "'*" if argument.repeated else f"{index}'"
                yield f"'{verb.name} {place}", _words(argument.offer)


def _options(option_groups: dict[str, Sequence[Option]]) -> Iterator[tuple[str, Sequence[str]]]:
    for verb, options in option_groups.items():
        yield f"'{verb}'", (WORDS, *(name for option in options for name in option.names))


def _words(offer: Offer) -> tuple[str, ...]:
    return (offer.source or "nothing", *offer.words)
