"""Constants at the top level of a module: their names, values and places in its syntax tree."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
}


class Assignment(NamedTuple):
    """One constant of a module, in upper case.

    Attributes
    ----------
    name
        As the module calls it.
    node
        Its expression; :func:`replace_value` puts another one in its place.
    position
        Index of the statement in the module's body.
    element
        Index within a joint assignment such as ``A, B = 1, 2``; None where it stands alone.
    """

    name: str
    node: ast.expr
    position: int
    element: int | None


def assignments(tree: ast.Module) -> Iterator[Assignment]:
    """Yield the constants of a module in order."""
    for position, statement in enumerate(tree.body):
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            target, value = statement.target, statement.value
        else:
            continue
        if isinstance(target, ast.Name) and _is_constant(target.id):
            yield Assignment(target.id, value, position, None)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for element, (name, part) in enumerate(zip(target.elts, value.elts, strict=True)):
                if isinstance(name, ast.Name) and _is_constant(name.id):
                    yield Assignment(name.id, part, position, element)


def _is_constant(name: str) -> bool:
    return name.upper() == name and any(letter.isalpha() for letter in name)


def description(tree: ast.Module, position: int) -> str:
    """Return the string literal below a statement, its lines joined; empty where there is none."""
    if position + 1 < len(tree.body):
        following = tree.body[position + 1]
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            value = following.value.value
            return " ".join(value.split()) if isinstance(value, str) else ""
    return ""


def replace_value(tree: ast.Module, found: Assignment, value: ast.expr) -> None:
    """Put another expression in the place of a constant's."""
    statement = tree.body[found.position]
    assert isinstance(statement, ast.Assign | ast.AnnAssign), "constants are assigned"
    ast.copy_location(value, found.node)
    if found.element is None:
        statement.value = value
    else:
        assert isinstance(statement.value, ast.Tuple), "an element is one of a tuple"
        statement.value.elts[found.element] = value
    ast.fix_missing_locations(tree)


def evaluate(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Return the value of arithmetic over literals, tuples and constants that are ``known``.

    Raises
    ------
    ValueError
        The expression is of another kind.
    """
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -evaluate(node.operand, known)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](evaluate(node.left, known), evaluate(node.right, known))
    if isinstance(node, ast.Tuple):
        return tuple(evaluate(element, known) for element in node.elts)
    raise ValueError(f"no constant of numbers: {ast.unparse(node):.60}")


def members(node: ast.expr) -> tuple[str, ...]:
    """Return the names in a display: keys of a dictionary, or elements of a tuple or list, that are string literals."""
    parts = node.keys if isinstance(node, ast.Dict) else node.elts if isinstance(node, ast.Tuple | ast.List) else []
    return tuple(part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))


def without_member(node: ast.expr, name: str) -> ast.expr:
    """Return a display without one of its :func:`members`."""
    if isinstance(node, ast.Dict):
        kept = [(k, v) for k, v in zip(node.keys, node.values, strict=True) if not _is_string(k, name)]
        return ast.Dict([key for key, _ in kept], [value for _, value in kept])
    assert isinstance(node, ast.Tuple | ast.List), "members are those of a display"
    return type(node)([element for element in node.elts if not _is_string(element, name)], ast.Load())


def _is_string(node: ast.expr | None, text: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == text
