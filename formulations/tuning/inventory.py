"""All techniques and tunables of the engine, read from its source.

A *tunable* is a constant at the top level of a module whose value is a number or a tuple of numbers. A *technique* is
what can be left out: a flag, or a member of a dictionary or tuple of names. The string literal below a constant
describes it, and these beginnings of it say what it is:

===============  =======================================================================================
``Technique:``   the constant is a flag; leaving it out sets it to False
``Techniques:``  every member of the dictionary or tuple is one; leaving it out removes the member
``Not tunable:`` a number that is no tunable, with the reason: a sentinel, a width, a protocol's constant
===============  =======================================================================================
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from formulations.tuning.literals import assignments, description, evaluate, members

ENGINE = ("formulations.presolve", "formulations.solvers")
"""Packages and modules whose constants steer a solve."""

_FLAG, _MEMBERS, _FACT = "Technique:", "Techniques:", "Not tunable:"
_COMPILED = "compiled"
_ROOT = Path(__file__).resolve().parent.parent.parent


class Kind(StrEnum):
    """What a constant is."""

    TECHNIQUE = "technique"
    TUNABLE = "tunable"
    FACT = "fact"


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant of the engine.

    Parameters
    ----------
    kind
        What it is.
    module, name, line
        Where it is defined.
    value
        A flag, a number, a tuple of numbers, or a tuple of the names of its members.
    text
        What the string literal below it says, without the mark.
    is_compiled
        Whether a compiled loop may read it.
    """

    kind: Kind
    module: str
    name: str
    line: int
    value: Any
    text: str
    is_compiled: bool


def inventory(packages: Sequence[str] = ENGINE, root: Path = _ROOT) -> list[Constant]:
    """Return the constants of some packages, in order of modules and lines.

    Parameters
    ----------
    packages
        Dotted names of packages and modules.
    root
        Folder in which they are.
    """
    sources = {module: path for package in packages for module, path in _modules(root, package)}
    trees = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in sources.items()}
    compiled = {(module, name) for reader, tree in trees.items() for module, name in _read_in_loops(reader, tree)}
    return [constant for module, tree in trees.items() for constant in _constants(module, tree, compiled)]


def code_digest(root: Path = _ROOT) -> str:
    """Return a digest of the code in ``formulations``; comments and docstrings do not count."""
    digest = hashlib.sha256()
    for module, path in _modules(root, "formulations"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                body[:] = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        digest.update(f"{module}\n{ast.dump(tree)}\n".encode())
    return digest.hexdigest()[:16]


def _modules(root: Path, package: str) -> Iterator[tuple[str, Path]]:
    start = root.joinpath(*package.split("."))
    paths = sorted(start.rglob("*.py")) if start.is_dir() else [start.with_suffix(".py")]
    for path in paths:
        parts = path.relative_to(root).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _constants(module: str, tree: ast.Module, compiled: set[tuple[str, str]]) -> Iterator[Constant]:
    known: dict[str, Any] = {}
    for found in assignments(tree):
        text = description(tree, found.position)
        try:
            value = known[found.name] = evaluate(found.node, known)
        except ValueError:
            value = members(found.node)
        kind = _kind(value, text)
        if kind is not None:
            mark, _, rest = text.partition(": ")
            text = rest if f"{mark}:" in (_FLAG, _MEMBERS, _FACT) else text
            is_compiled = (module, found.name) in compiled
            yield Constant(kind, module, found.name, found.node.lineno, value, text, is_compiled)


def _kind(value: Any, text: str) -> Kind | None:
    if text.startswith(_FLAG) and isinstance(value, bool):
        return Kind.TECHNIQUE
    if text.startswith(_MEMBERS) and value and _are(value, str):
        return Kind.TECHNIQUE
    if not (_are(value, int, float) if isinstance(value, tuple) else _is(value, int, float)):
        return None
    return Kind.FACT if text.startswith(_FACT) else Kind.TUNABLE


def _is(value: Any, *types: type) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def _are(values: Any, *types: type) -> bool:
    if not isinstance(values, tuple) or not values:
        return False
    return all(_are(value, *types) if isinstance(value, tuple) else _is(value, *types) for value in values)


def _read_in_loops(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the constants that compiled loops of a module may read, each with the module that defines it."""
    loops = [node for node in tree.body if isinstance(node, ast.FunctionDef) and _is_compiled(node)]
    read = {node.id for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Name)}
    for found in reversed(list(assignments(tree))):  # what a constant is derived from comes before it
        if found.name in read:
            read |= {node.id for node in ast.walk(found.node) if isinstance(node, ast.Name)}
    homes = _imported(tree)
    for name in read:
        yield homes.get(name, (module, name))


def _imported(tree: ast.Module) -> dict[str, tuple[str, str]]:
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def _is_compiled(function: ast.FunctionDef) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == _COMPILED for mark in function.decorator_list)
