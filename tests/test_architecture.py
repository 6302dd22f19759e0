"""What may import what, and what no module may do. The last test shows that each check can fail."""

from __future__ import annotations

import ast
import copy
import gc
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

EFFECTS = frozenset({"asyncio", "subprocess", "socket", "os", "time", "random", "logging"})
WITHOUT_EFFECTS = frozenset({"socket.AF_INET", "socket.AF_INET6", "socket.inet_pton", "socket.inet_ntop"})
"""What the pure core may import of these modules: it only computes."""
ORDER = (
    "model",
    "declaration",
    "host",
    "sources",
    "health",
    "resolver",
    "dataplane",
    "control",
    "observe",
    "api",
    "cli",
    "daemon",
    "__main__",
)
"""What stands in `vipd/`. A package imports only those before it."""
CORE = (
    "vipd.model",
    "vipd.declaration",
    "vipd.host.dns_message",
    "vipd.health.state",
    "vipd.health.flapping",
    "vipd.health.weights",
    "vipd.health.result",
    "vipd.resolver.answers",
    "vipd.sources.removal_guard",
    "vipd.sources.etcd.values",
    "vipd.dataplane.engine",
    "vipd.dataplane.options",
    "vipd.dataplane.slots",
    "vipd.dataplane.iptables",
    "vipd.dataplane.nftables",
    "vipd.control.address_policy",
    "vipd.control.admission",
    "vipd.control.catalog",
    "vipd.control.claim_conflicts",
    "vipd.control.named_backends",
    "vipd.control.override_requests",
    "vipd.control.progress",
    "vipd.control.registrations",
    "vipd.control.selection",
    "vipd.control.write_order",
    "vipd.observe.simulator",
    "vipd.observe.live_trace",
    "vipd.observe.rule_tree",
)
"""Modules and packages whose results follow from their arguments alone."""
SHELL_OF_CORE = (
    tuple(
        f"vipd.dataplane.iptables.{name}"
        for name in (
            "tools",
            "probe",
            "family",
            "driver",
            "removal",
            "other_variant",
            "reading",
            "watch",
            "counters.counter",
            "counters.reading",
        )
    )
    + tuple(
        f"vipd.dataplane.nftables.{name}"
        for name in (
            "tools",
            "probe",
            "family",
            "driver",
            "removal",
            "reader",
            "watch",
            "foreign_chains",
            "flow_counter",
            "writer",
        )
    )
    + tuple(f"vipd.observe.live_trace.{name}" for name in ("table", "rule_reader", "watching", "sending"))
    + tuple(f"vipd.observe.rule_tree.{name}" for name in ("resolve_target", "read_iptables", "read_nftables"))
)
"""Modules within those packages that do run programs."""

DAEMON_SIDE = (
    "vipd.daemon.daemon",
    "vipd.control.reconciler",
    "vipd.sources",
    "vipd.host.settings.settings",
    "vipd.dataplane",
)
LOCAL_VERBS = frozenset(
    f"vipd.cli.{name}"
    for name in ("render", "cleanup", "explain", "offline", "doctor", "register", "rules", "trace")
)
"""Verbs that work without a daemon, so need its parts; the others must start fast and touch nothing here."""
MANUAL = ("vipd.cli.manual",)
"""Writes man pages and completion of all verbs and settings."""

FORBIDDEN_IMPORTS = frozenset({"pickle", "marshal", "shelve"})
FORBIDDEN_CALLS = frozenset(
    {
        "eval",
        "exec",
        "yaml.load",
        "yaml.full_load",
        "yaml.unsafe_load",
        "os.system",
        "os.popen",
        "subprocess.getoutput",
        "subprocess.getstatusoutput",
        "asyncio.create_subprocess_shell",
    }
)
DRAWERS = frozenset({"utils", "util", "helpers", "helper", "common", "misc"})


class Tree:
    """The parsed modules of a `vipd` package below `root`."""

    def __init__(self, root: Path) -> None:
        gc.disable()  # it would take two thirds of the time, and nothing becomes garbage
        self.modules = {
            _module_name(path.relative_to(root)): ast.parse(path.read_text(encoding="utf-8"), str(path))
            for path in sorted((root / "vipd").rglob("*.py"))
        }
        gc.enable()
        self._imports = {name: frozenset(self._of(name, tree)) for name, tree in self.modules.items()}

    def with_module(self, file: str, code: str, *, alone: bool = False) -> Tree:
        """This tree with another text of one file, or that file alone."""
        changed, name = copy.copy(self), _module_name(Path("vipd", file))
        changed.modules = {**({} if alone else self.modules), name: ast.parse(code)}
        changed._imports = {**self._imports, name: frozenset(changed._of(name, changed.modules[name]))}
        return changed

    def within(self, *names: str) -> list[str]:
        """The modules that have one of these names or lie below it."""
        return [module for module in self.modules if _below(module, names)]

    def imports_of(self, module: str) -> frozenset[str]:
        """The modules of vipd that a module imports itself."""
        return self._imports[module] & self.modules.keys()

    def reached(self, start: str, past: frozenset[str] = frozenset()) -> Iterator[tuple[str, str]]:
        """Every import made by importing `start`: (importing module, imported); not those made by `past`."""
        todo, seen = [start], {start}
        while todo:
            module = todo.pop()
            for imported in sorted(self._imports[module]):
                yield module, imported
                if imported in self.modules and imported not in seen | past:
                    seen.add(imported)
                    todo.append(imported)

    def _of(self, module: str, tree: ast.Module) -> Iterator[str]:
        yield from _parents(module)
        for node in _running(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                names = [f"{base}.{alias.name}" for alias in node.names]
                names = [] if WITHOUT_EFFECTS.issuperset(names) else [base, *names]
            else:
                continue
            for name in names:
                if not name.startswith("vipd") or name in self.modules:
                    yield name
                    yield from _parents(name)


def impure_core(tree: Tree) -> list[str]:
    """Effects that the pure core can reach."""
    return [
        f"{start}: {module} imports {imported}"
        for start in tree.within(*CORE)
        if not _below(start, SHELL_OF_CORE)
        for module, imported in tree.reached(start)
        if _below(imported, EFFECTS)
    ]


def heavy_cli(tree: Tree) -> list[str]:
    """Parts of the daemon that a verb which only talks to it can reach."""
    return [
        f"{start}: {module} imports {imported}"
        for start in tree.within("vipd.cli")
        if start not in LOCAL_VERBS and not _below(start, MANUAL)
        for module, imported in tree.reached(start, past=LOCAL_VERBS)
        if _below(imported, DAEMON_SIDE)
    ]


def dangerous(tree: Tree) -> list[str]:
    """Ways to run text from outside as a program."""
    found = []
    for name, module in tree.modules.items():
        for node in ast.walk(module):
            found += [f"{name}:{node.lineno}: {what}" for what in _dangers(node) if hasattr(node, "lineno")]
    return found


def undocumented(tree: Tree) -> list[str]:
    """Modules that do not say what they are for."""
    return [name for name, module in tree.modules.items() if not ast.get_docstring(module)]


def drawers(tree: Tree) -> list[str]:
    """Modules named after nothing."""
    return [name for name in tree.modules if DRAWERS.intersection(name.split("."))]


def against_the_order(tree: Tree) -> list[str]:
    """Imports of a package that stands below."""
    place = {name: number for number, name in enumerate(ORDER)}
    return [
        f"{module} imports {imported}"
        for module in tree.modules
        for imported in tree.imports_of(module)
        if (above := _package(imported)) in place and place[above] > place.get(_package(module), len(ORDER))
    ]


def circles(tree: Tree) -> list[str]:
    """Modules that import each other, on whatever way."""
    graph = {module: tree.imports_of(module) - {module, *_parents(module)} for module in tree.modules}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def strays(tree: Tree) -> list[str]:
    """Modules that stand in no package of the order."""
    return [module for module in tree.modules if _package(module) not in ("", *ORDER)]


OF_EACH_MODULE = (dangerous, undocumented, drawers, strays)
CHECKS = [impure_core, heavy_cli, dangerous, undocumented, drawers, against_the_order, circles, strays]

Check = Callable[[Tree], list[str]]


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(ROOT)


@pytest.mark.parametrize("check", CHECKS)
def test_vipd_keeps_to_its_architecture(check: Check, tree: Tree) -> None:
    assert check(tree) == []


def test_every_named_module_exists(tree: Tree) -> None:
    """A check of a module that was renamed would pass for ever."""
    for name in (*CORE, *SHELL_OF_CORE, *LOCAL_VERBS, *DAEMON_SIDE):
        assert name in tree.modules


FAULTS: list[tuple[Check, str, str]] = [
    (impure_core, "model/service.py", "import os"),
    (impure_core, "control/catalog.py", "from time import monotonic"),
    (impure_core, "model/service.py", "from socket import inet_pton, socket"),
    (impure_core, "control/selection.py", "import os.path"),
    (impure_core, "declaration/operations.py", "def f():\n    import random"),
    (impure_core, "dataplane/iptables/plan.py", "from vipd.host.process import run"),
    (impure_core, "dataplane/iptables/new_file.py", "import logging"),
    (impure_core, "observe/simulator/walk.py", "from vipd.host import process"),
    (impure_core, "declaration/deep/er.py", "try:\n    import socket\nexcept ImportError:\n    pass"),
    (impure_core, "dataplane/__init__.py", "import asyncio"),
    (heavy_cli, "cli/status.py", "import vipd.host.settings.settings"),
    (heavy_cli, "cli/main.py", "def f():\n    from vipd.dataplane.iptables import plan"),
    (heavy_cli, "cli/list.py", "from vipd.control.programming import x"),
    (dangerous, "daemon/daemon.py", "import subprocess\nsubprocess.run('ls', shell=True)"),
    (dangerous, "daemon/daemon.py", "import pickle"),
    (dangerous, "daemon/daemon.py", "from pickle import loads"),
    (dangerous, "daemon/daemon.py", "import yaml\nyaml.load('x')"),
    (dangerous, "daemon/daemon.py", "eval('1')"),
    (dangerous, "daemon/daemon.py", "exec('1')"),
    (dangerous, "daemon/daemon.py", "import os\nos.system('ls')"),
    (undocumented, "daemon/daemon.py", ""),
    (drawers, "api/utils.py", ""),
    (drawers, "common/__init__.py", ""),
    (against_the_order, "host/process.py", "def f():\n    from vipd.cli import main"),
    (circles, "host/settings/layers.py", "from vipd.host.settings import settings"),
    (strays, "process.py", ""),
]


def test_each_check_can_fail(tree: Tree) -> None:
    for check, file, code in FAULTS:
        text = code if check is undocumented else f'"""X."""\n{code}\n'
        faulty = tree.with_module(file, text, alone=check in OF_EACH_MODULE)
        assert check(faulty) != [], f"{file}: {code}"


def test_what_the_core_may_import(tree: Tree) -> None:
    for code in (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import asyncio",
        "import typing\nif typing.TYPE_CHECKING:\n    from vipd.host.process import run",
        "from vipd import model",
        "from socket import AF_INET, inet_pton",
        "import re",
    ):
        assert impure_core(tree.with_module("control/catalog.py", code)) == [], code


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _parents(module: str) -> Iterator[str]:
    """The packages that Python imports before a module of vipd."""
    while module.startswith("vipd.") and "." in module:
        module = module.rpartition(".")[0]
        yield module


def _package(module: str) -> str:
    """The part of `vipd` in which a module stands."""
    return f"{module}.".split(".")[1]


def _below(module: str, names: frozenset[str] | tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that only a type checker sees."""
    yield node
    skipped: list[ast.stmt] = []
    if isinstance(node, ast.If) and _dotted(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        skipped = node.body
    for child in ast.iter_child_nodes(node):
        if child not in skipped:
            yield from _running(child)


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or attribute; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def _dangers(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (f"import {a.name}" for a in node.names if a.name in FORBIDDEN_IMPORTS)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from [f"import {node.module}"] if node.module in FORBIDDEN_IMPORTS else []
        yield from (
            f"import {node.module}.{a.name}"
            for a in node.names
            if f"{node.module}.{a.name}" in FORBIDDEN_CALLS
        )
    elif isinstance(node, ast.Call):
        yield from [_dotted(node.func)] if _dotted(node.func) in FORBIDDEN_CALLS else []
        yield from (
            "shell=" for keyword in node.keywords if keyword.arg == "shell" and not _is_false(keyword)
        )


def _is_false(keyword: ast.keyword) -> bool:
    return isinstance(keyword.value, ast.Constant) and keyword.value.value is False
