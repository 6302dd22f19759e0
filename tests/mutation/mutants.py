"""Makes mutants of a module: each is its source with one small bug; and reads the lists beside this file.

Sentences (strings with a space), annotations, decorators and docstrings are left alone: their wording is no
behaviour.
"""

from __future__ import annotations

import ast
import hashlib
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CONTEXT = 45
"""Characters of the statement that a name shows on each side of the change."""

_COMPARE: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
}
_ARITHMETIC: dict[type[ast.operator], ast.operator] = {
    ast.Mult: ast.FloorDiv(),
    ast.Div: ast.Mult(),
    ast.FloorDiv: ast.Mult(),
    ast.Mod: ast.FloorDiv(),
    ast.BitOr: ast.BitAnd(),
    ast.BitAnd: ast.BitOr(),
    ast.BitXor: ast.BitOr(),
    ast.LShift: ast.RShift(),
    ast.RShift: ast.LShift(),
}
_CALLS = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "sorted": "list",
    "startswith": "endswith",
    "endswith": "startswith",
    "union": "intersection",
    "intersection": "union",
}
_LEFT_ALONE = frozenset({"annotation", "returns", "decorator_list", "type_params"})
"""Fields of a node that say nothing of behaviour."""


@dataclass(frozen=True)
class Mutant:
    path: str
    """From the root of the project."""
    name: str
    """The function, and the change within its statement: `Class.method: if a {< -> <=} b:`. Without line
    numbers, so that it stays the same while other lines change."""

    @property
    def lot(self) -> int:
        """A number that depends on path and name alone: it decides whether a sample has this mutant."""
        return int.from_bytes(hashlib.sha256(f"{self.path} {self.name}".encode()).digest()[:4])

    def changed(self, source: str) -> str:
        """The source with the bug. Raises KeyError when it has no such mutant."""
        return mutate(source, self.name)


@dataclass(frozen=True)
class _Slot:
    parent: ast.AST
    field: str
    index: int | None

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


@dataclass(frozen=True)
class Seam:
    """A fault between packages, which `seams.toml` lists."""

    path: str
    name: str
    before: str
    after: str
    tests: tuple[str, ...]
    """Arguments for pytest: who is to notice."""

    def changed(self, source: str) -> str:
        """The source with the fault. Raises ValueError unless it has the place once."""
        if source.count(self.before) != 1:
            raise ValueError(f"{self.path} has no longer one place for: {self.name}")
        return source.replace(self.before, self.after)


def read_seams() -> list[Seam]:
    rows = tomllib.loads(Path(__file__).with_name("seams.toml").read_text())["seam"]
    return [Seam(r["file"], r["fault"], r["before"], r["after"], tuple(r["tests"])) for r in rows]


def read_accepted() -> dict[Mutant, str]:
    """The survivors that are accepted, each with the reason."""
    tables = tomllib.loads(Path(__file__).with_name("accepted.toml").read_text())
    return {Mutant(path, name): reason for path, names in tables.items() for name, reason in names.items()}


def mutants_of(path: str, source: str) -> list[Mutant]:
    return [Mutant(path, name) for name, _, _, _ in _named(ast.parse(source))]


def mutate(source: str, name: str) -> str:
    """The source of a module with the bug of that name. Raises KeyError when it has no such mutant."""
    tree = ast.parse(source)
    for each, slot, _, after in _named(tree):
        if each == name:
            slot.put(after)
            return ast.unparse(ast.fix_missing_locations(tree))
    raise KeyError(name)


def _named(tree: ast.Module) -> Iterator[tuple[str, _Slot, ast.AST, ast.AST]]:
    """Name, where, what stands there, and what is put there instead."""
    seen = Counter[str]()
    made = set[tuple[int, str]]()
    for scope, statement, slot, before, after in _places(tree):
        old = _header(statement)
        slot.put(after)
        new = _header(after if isinstance(after, ast.stmt) else statement)
        slot.put(before)
        if new != old and (id(statement), new) not in made:
            made.add((id(statement), new))
            name = f"{scope}: {_change(old, new)}"
            seen[name] += 1
            yield name + (f" #{seen[name]}" if seen[name] > 1 else ""), slot, before, after


_Place = tuple[str, ast.stmt, _Slot, ast.AST, ast.AST]


def _places(tree: ast.Module) -> Iterator[_Place]:
    """Scope, statement, where, what stands there, and what is put there instead."""

    def walk(node: ast.AST, scope: tuple[str, ...], statement: ast.stmt | None) -> Iterator[_Place]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope = (*scope, node.name)
        for slot, child in _children(node):
            of = child if isinstance(child, ast.stmt) else statement
            if of is not None:
                for other in _alternatives(child):
                    yield ".".join(scope) or "module", of, slot, child, other
            yield from walk(child, scope, of)

    return walk(tree, (), None)


def _children(node: ast.AST) -> Iterator[tuple[_Slot, ast.AST]]:
    sentence = isinstance(node, ast.JoinedStr) and any(map(_has_space, node.values))
    for field, value in ast.iter_fields(node):
        if field in _LEFT_ALONE:
            continue
        if isinstance(value, ast.AST):
            yield _Slot(node, field, None), value
        elif isinstance(value, list):
            for index, each in enumerate(value):
                words = _is_docstring(each) or (sentence and isinstance(each, ast.Constant))
                if isinstance(each, ast.AST) and not words:
                    yield _Slot(node, field, index), each


def _is_docstring(node: ast.AST) -> bool:
    """Also of an attribute: a string that is a statement."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _alternatives(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Constant():
            yield from _other_constants(node)
        case ast.Call():
            yield from _other_calls(node)
        case ast.Compare() | ast.BoolOp() | ast.IfExp() | ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield from _other_conditions(node)
        case ast.BinOp():
            yield _other_operation(node)
        case ast.comprehension():
            for ifs in _without_one(node.ifs):
                yield ast.comprehension(node.target, node.iter, ifs, node.is_async)
        case ast.stmt():
            yield from _other_statements(node)


def _other_conditions(node: ast.Compare | ast.BoolOp | ast.IfExp | ast.UnaryOp) -> Iterator[ast.AST]:
    match node:
        case ast.Compare():
            for index, op in enumerate(node.ops):
                ops = [*node.ops[:index], _COMPARE[type(op)], *node.ops[index + 1 :]]
                yield ast.Compare(node.left, ops, node.comparators)
        case ast.BoolOp():
            yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
            for kept in _without_one(node.values):
                yield kept[0] if len(kept) == 1 else ast.BoolOp(node.op, kept)
        case ast.IfExp():
            yield node.body
            yield node.orelse
        case ast.UnaryOp():
            yield node.operand


def _without_one(nodes: list[ast.expr]) -> Iterator[list[ast.expr]]:
    for index in range(len(nodes)):
        yield [*nodes[:index], *nodes[index + 1 :]]


def _other_calls(node: ast.Call) -> Iterator[ast.AST]:
    match node.func:
        case ast.Name(id=called) if called in _CALLS:
            # `list`, in place of `sorted`, takes no key.
            keywords = [] if called == "sorted" else node.keywords
            yield ast.Call(ast.Name(_CALLS[called]), node.args, keywords)
        case ast.Attribute(attr=called) as method if called in _CALLS:
            yield ast.Call(ast.Attribute(method.value, _CALLS[called]), node.args, node.keywords)


def _other_constants(node: ast.Constant) -> Iterator[ast.AST]:
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int | float):
        yield ast.Constant(value + 1)
    elif isinstance(value, str) and value and not _has_space(node):
        yield ast.Constant(value + "X")


def _has_space(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip("\n")


def _other_operation(node: ast.BinOp) -> ast.AST:
    """Plus and minus mean sums, texts and sets: of what is no number, the right side is left out."""
    sides = (node.left, node.right)
    numeric = any(isinstance(side, ast.Constant) and isinstance(side.value, int) for side in sides)
    match node.op:
        case ast.Add() if numeric:
            return ast.BinOp(node.left, ast.Sub(), node.right)
        case ast.Sub() if numeric:
            return ast.BinOp(node.left, ast.Add(), node.right)
        case op if type(op) in _ARITHMETIC:
            return ast.BinOp(node.left, _ARITHMETIC[type(op)], node.right)
    return node.left


def _other_statements(node: ast.stmt) -> Iterator[ast.AST]:
    match node:
        case ast.If() | ast.While():
            if not _is_negated_elsewhere(node.test):
                yield type(node)(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
        case ast.Return(value=ast.Constant(value=None)):
            return
        case ast.Return(value=ast.expr()):
            yield ast.Return(ast.Constant(None))
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign() | ast.Expr():
            yield ast.Pass()
        case ast.Raise() | ast.Continue() | ast.Break() | ast.Delete():
            yield ast.Pass()


def _is_negated_elsewhere(test: ast.expr) -> bool:
    """Whether the mutant of its operator is its negation already."""
    match test:
        case ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Compare(ops=[ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot() | ast.In() | ast.NotIn()]):
            return True
    return False


def _header(statement: ast.stmt) -> str:
    """A statement's text without those within it and without decorators, in one line."""
    bodies = {
        field: getattr(statement, field)
        for field in ("body", "orelse", "finalbody", "handlers", "cases", "decorator_list")
        if isinstance(getattr(statement, field, None), list)
    }
    try:
        for field in bodies:
            setattr(statement, field, [])
        return " ".join(ast.unparse(statement).split())
    finally:
        for field, value in bodies.items():
            setattr(statement, field, value)


def _common(one: str, other: str) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _cut(text: str) -> str:
    return text if len(text) <= 2 * CONTEXT else f"{text[:CONTEXT]} … {text[-CONTEXT:]}"


def _change(old: str, new: str) -> str:
    """`if a {< -> <=} b:`"""
    start = _common(old, new)
    end = _common(old[start:][::-1], new[start:][::-1])
    while start and (old[start - 1].isalnum() or old[start - 1] in "_<>=!"):
        start -= 1
    while end and (old[-end].isalnum() or old[-end] in "_<>=!"):
        end -= 1
    changed = f"{{{_cut(old[start : len(old) - end])} -> {_cut(new[start : len(new) - end])}}}"
    before, after = old[:start], old[len(old) - end :]
    if len(before) > CONTEXT:
        before = "…" + before[-CONTEXT:]
    if len(after) > CONTEXT:
        after = after[:CONTEXT] + "…"
    return before + changed + after
