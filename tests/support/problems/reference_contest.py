"""The contest's format read slowly and plainly: what the fast parser must accept, refuse and return.

Follows the format's description and shares nothing with :mod:`formulations.instances.contest` but the types of a
problem.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import numpy as np

from formulations.problem.strategy_problem import Factor, Node, Resource, StrategyProblem, UsageTerm

FORBIDDEN = 10**18
LATEST_TIME = 10_000_000
LARGEST_AMOUNT = 2**63 - 1
MOST_DIGITS, MOST_LEVELS = 4000, 200


class Refused(ValueError):
    """The text is no problem."""


def reference_problem(data: bytes, default_name: str = "contest") -> StrategyProblem:
    """Parse a problem.

    Raises
    ------
    Refused
        Where the text is malformed in any way.
    """
    try:
        document = json.loads(data, object_pairs_hook=_object, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Refused(str(error)) from None
    demand(isinstance(document, dict) and "problem" in document)
    problem = document["problem"]
    demand(isinstance(problem, dict) and {"nodes", "edges"} <= problem.keys())
    demand(problem.keys() <= {"nodes", "edges", "name", "usage_limit"})
    name, limit = problem.get("name", default_name), problem.get("usage_limit")
    demand(isinstance(name, str) and (limit is None or _is_natural(limit)))
    nodes = _nodes(problem["nodes"])
    factors = _factors(problem["edges"], [node.size for node in nodes])
    horizon = max((node.usage[0].end for node in nodes if node.usage), default=1)
    return StrategyProblem(name, nodes, factors, (Resource("memory", limit),), horizon)


def is_undecided(data: bytes) -> bool:
    """Whether a parser may accept or refuse a text: byte-order marks, lone surrogates, endless numbers and nesting."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return b"\0" in data or b"\xed" in data
    nesting = itertools.accumulate((c in "[{") - (c in "]}") for c in text)
    return (
        "\0" in text
        or text.startswith("\ufeff")
        or max(nesting, default=0) > MOST_LEVELS
        or re.search(rf"\d{{{MOST_DIGITS}}}", text) is not None
    )


def demand(condition: bool) -> None:
    """Refuse the text unless something holds."""
    if not condition:
        raise Refused


def _nodes(table: Any) -> tuple[Node, ...]:
    demand(isinstance(table, dict) and table.keys() == {"intervals", "costs", "usages"})
    intervals, costs, usages = (_rows(table[key]) for key in ("intervals", "costs", "usages"))
    demand(len(intervals) == len(costs) == len(usages))
    nodes = []
    for i, (interval, cost, amounts) in enumerate(zip(intervals, costs, usages, strict=True)):
        demand(len(interval) == 2 and max(interval) <= LATEST_TIME)
        demand(len(cost) == len(amounts) >= 1 and max(amounts) <= LARGEST_AMOUNT)
        start, end = interval
        term = UsageTerm(0, start, end, np.array(amounts, dtype=np.int64))
        nodes.append(Node(f"node{i}", *_costs(np.array(cost, dtype=object)), (term,) if start < end else ()))
    return tuple(nodes)


def _factors(table: Any, sizes: list[int]) -> tuple[Factor, ...]:
    demand(isinstance(table, dict) and table.keys() == {"nodes", "costs"})
    members, costs = _rows(table["nodes"]), _rows(table["costs"])
    demand(len(members) == len(costs))
    factors = []
    for listed, cost in zip(members, costs, strict=True):
        scope = tuple(dict.fromkeys(listed))
        demand(1 <= len(scope) <= 3 and all(i < len(sizes) for i in listed))
        place = list(itertools.product(*(range(sizes[i]) for i in listed)))
        demand(len(cost) == len(place))
        value = dict(zip(place, cost, strict=True))
        entries = np.empty([sizes[i] for i in scope], dtype=object)
        for entry in np.ndindex(*entries.shape):
            entries[entry] = value[tuple(entry[scope.index(i)] for i in listed)]
        factors.append(Factor(scope, *_costs(entries)))
    return tuple(factors)


def _costs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    flags = np.array(values >= FORBIDDEN, dtype=np.bool_)
    cost = np.where(flags, 0, values).astype(np.int64)
    return cost, flags if flags.any() else None


def _rows(rows: Any) -> list[list[int]]:
    demand(isinstance(rows, list) and all(isinstance(row, list) for row in rows))
    demand(all(_is_natural(value) for row in rows for value in row))
    return rows


def _is_natural(value: Any) -> bool:
    return type(value) is int and value >= 0


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    demand(len(dict(pairs)) == len(pairs))
    return dict(pairs)


def _refuse(_: str) -> None:
    raise Refused


def same_problem(one: StrategyProblem, other: StrategyProblem) -> bool:
    """Whether two problems are equal in every field, types of arrays included; no flag at all is as good as None."""
    return _fields(one) == _fields(other)


def _fields(problem: StrategyProblem) -> tuple[Any, ...]:
    return (
        (problem.name, problem.horizon, problem.resources, problem.seconds_per_cost, problem.time_names),
        [(node.name, *_table(node)) for node in problem.nodes],
        [(factor.scope, *_table(factor)) for factor in problem.factors],
    )


def _table(table: Node | Factor) -> tuple[Any, ...]:
    usage = [(t.resource, t.start, t.end, _array(t.amount)) for t in table.usage]
    flagged = table.forbidden is not None and table.forbidden.any()
    return _array(table.cost), _array(table.forbidden) if flagged else None, usage


def _array(values: np.ndarray) -> tuple[str, tuple[int, ...], list[Any]]:
    return str(values.dtype), values.shape, values.tolist()
