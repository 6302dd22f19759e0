"""The completion script for fish. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vipd.cli.argument_types import DIRECTORIES, FILES, SETTINGS, WORDS
from vipd.cli.manual.verbs import Offer, Option, Verb

_HEAD = r"""# Completion of vipctl for fish. Made by python -m vipd.cli.manual of the program itself.

# The words before the cursor that are neither options nor their values: the verb and its arguments.
function __vipctl_words
    set -l skip no
    set -l verb ''
    for word in (commandline -opc)[2..-1]
        if test $skip = yes
            set skip no
            continue
        end
        switch "$verb $word"
            case @VALUED@
                set skip yes
            case '* -*'
            case '*'
                test -z "$verb"; and set verb $word
                echo -- $word
        end
    end
end

# Whether the verb is one of $argv; "" for none yet.
function __vipctl_verb
    set -l words (__vipctl_words)
    contains -- "$words[1]" $argv
end

# Whether the verb is $argv[1], and its argument number $argv[2], from 1, is being written.
function __vipctl_argument
    set -l words (__vipctl_words)
    test "$words[1]" = $argv[1]; and test (count $words) -eq $argv[2]
end

# Names that the daemon knows, of the kind $argv[1].
function __vipctl_ask
    set -l words (__vipctl_words)
    set -l line (commandline -opc)
    set -l socket (string match -- '--socket=*' $line)
    set -l place (contains -i -- --socket $line)
    and set socket --socket $line[(math $place + 1)]
    set -l current (string unescape -- (commandline -ct))
    command $line[1] $socket complete $argv[1] -- $words[2] $current 2>/dev/null
end

complete -c vipctl -f
"""


def script(before_verb: Sequence[Option], verbs: Sequence[Verb], settings: Sequence[str]) -> str:
    """The whole script."""
    option_groups = {"": before_verb, **{verb.name: verb.options for verb in verbs}}
    head = _HEAD.replace("@VALUED@", " ".join(_valued(option_groups)))
    return "".join([head, *(f"{line}\n" for line in _lines(before_verb, verbs, settings))])


def _valued(option_groups: Mapping[str, Sequence[Option]]) -> Iterator[str]:
    """Each verb with each of its options that take a value: the same letter may be a flag elsewhere."""
    for verb, options in option_groups.items():
        for option in options:
            if option.offer is not None:
                yield from (f"'{verb} {name}'" for name in option.names)


def _lines(before_verb: Sequence[Option], verbs: Sequence[Verb], settings: Sequence[str]) -> Iterator[str]:
    for option in before_verb:
        yield _option('__vipctl_verb ""', option, settings)
    for verb in verbs:
        yield f"complete -c vipctl -n '__vipctl_verb \"\"' -a {verb.name} -d {_quoted(verb.summary)}"
    for verb in verbs:
        yield ""
        for option in verb.options:
            yield _option(f"__vipctl_verb {verb.name}", option, settings)
        for place, argument in enumerate(verb.arguments, 1):
            here = (
                f"__vipctl_verb {verb.name}"
                if argument.repeated
                else f"__vipctl_argument {verb.name} {place}"
            )
            if argument.repeated and place > 1:
                here += f"; and not __vipctl_argument {verb.name} {place - 1}"
            if argument.offer.source:
                yield f"complete -c vipctl -n {_quoted(here)} {_offered(argument.offer, settings)}"


def _option(here: str, option: Option, settings: Sequence[str]) -> str:
    names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
    value = "" if option.offer is None else f" -r {_offered(option.offer, settings)}"
    return f"complete -c vipctl -n {_quoted(here)} {names}{value} -d {_quoted(option.help)}"


def _offered(offer: Offer, settings: Sequence[str]) -> str:
    """The options of `complete` for these words; each but files shuts out the names of files."""
    words = {
        WORDS: " ".join(offer.words),
        SETTINGS: " ".join(f"{name}=" for name in settings),
        DIRECTORIES: "(__fish_complete_directories (commandline -ct))",
    }
    if offer.source == FILES:
        return "-F"
    if not offer.source:
        return "-f"
    return f"-f -a {_quoted(words.get(offer.source, f'(__vipctl_ask {offer.source})'))}"


def _quoted(text: str) -> str:
    inside = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{inside}'"
