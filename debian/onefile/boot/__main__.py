"""Start of the one file: checks this Python, finds or makes the unpacked program, becomes vipd or vipctl.

Every start passes here, so that as little as possible is imported: no pathlib. Pythons that are too old must
be able to read this module, so that it can say what it needs: annotations that they do not know are strings.
"""

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES

import contents

PROGRAMS = {"vipd": "vipd.__main__", "vipctl": "vipd.cli.main"}

USAGE = """\
usage: {0} vipctl VERB ...     the command line
       {0} vipd [OPTION ...]   the daemon
       {0} --unpack            unpack; or check and mend what is unpacked
       {0} --version
       {0} --help

A link to this file, or the file itself, by the name vipctl or vipd needs no
first word. The program is unpacked once: to $CACHE_DIRECTORY if that is set,
else to /var/cache/vipd (root) or ~/.cache/vipd."""


def main() -> None:
    """Become what the name or the first word says."""
    if not (sys.flags.isolated and sys.flags.no_site):
        again(sys.argv)
    name, words = sys.argv[0].rpartition("/")[2], sys.argv[1:]
    if name in PROGRAMS:
        start(name, words)
    elif words and words[0] in PROGRAMS:
        start(words[0], words[1:])
    elif words == ["--version"]:
        say(f"vipd {contents.VERSION}, one file {contents.DIGEST} for {contents.SUITS}")
    elif words == ["--unpack"]:
        part = suitable_part()
        import unpacking

        say(unpacking.unpack_and_check(part))
    elif words in ([], ["-h"], ["--help"]):
        say(USAGE.format(name))
    else:
        refuse(f"unknown word {words[0]!r}; hint: {name} --help", 2)


def say(text: str) -> None:
    """Print a text."""
    sys.stdout.write(f"{text}\n")


def refuse(message: str, code: int = 1) -> None:
    """End with a message."""
    sys.stderr.write(f"vipd: {message}\n")
    sys.exit(code)


def suitable_part() -> str:
    """The part of this file that is for this interpreter; ends with a message when there is none."""
    suffix = EXTENSION_SUFFIXES[0]
    if suffix not in contents.PARTS:
        hint = "name a Python that fits, as in: python3.12 vipd.pyz vipctl list"
        if suffix.split("-")[1:2] in [known.split("-")[1:2] for known in contents.PARTS]:
            hint = f"build the file for this machine: bash debian/onefile/build.sh --platform {os.uname()[4]}"
        version = ".".join(map(str, sys.version_info[:2]))
        refuse(
            f"this file is for {contents.SUITS}\n"
            f"  but {sys.executable} is Python {version} with extension modules {suffix}\n"
            f"hint: {hint}"
        )
    return contents.PARTS[suffix]


def start(program: str, words: "list[str]") -> None:
    """Run a program out of its unpacked tree."""
    part = suitable_part()
    import places

    tree = places.find(part)
    if tree is None:
        import unpacking

        tree = unpacking.unpack(part)
    elif program == "vipd" and places.others(tree):
        import unpacking

        unpacking.remove_unused(tree)
    become(program, words, tree)


def become(program: str, words: "list[str]", tree: str) -> None:
    """Import and call a program. A tree that turns out to be damaged is unpacked anew."""
    from importlib import import_module

    file, sys.path[0] = sys.path[0], f"{tree}/lib"
    given, sys.argv = sys.argv, [program, *words]
    try:
        module = import_module(PROGRAMS[program])
    except Exception:
        if not mended(tree, file):
            raise
        again(given)
    try:
        module.main()
    except Exception:
        if not mended(tree, file):
            raise
        refuse("the unpacked program was damaged, and is mended now; hint: run the command again")


def mended(tree: str, file: str) -> bool:
    """Whether the tree was damaged, and is whole now."""
    sys.path[0] = file
    try:
        import unpacking
    except ImportError:
        # The file was replaced or deleted while it ran: there is nothing to mend from.
        return False
    return unpacking.mend(tree)


def again(argv: "list[str]") -> None:
    """Start over, deaf to PYTHON* variables and to what else is installed."""
    os.execv(sys.executable, [sys.executable, "-IS", *argv])  # noqa: S606


if __name__ == "__main__":
    main()
