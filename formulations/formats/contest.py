"""The ASPLOS / EuroSys 2025 contest on intra-operator parallelism (google/iopddl): problems in, solutions out.

A problem file is JSON, plain or gzipped::

    {"problem": {"name": str,
                 "nodes": {"intervals": [[start, end]], "costs": [[int]], "usages": [[int]]},
                 "edges": {"nodes": [[i, j]], "costs": [[int]]},
                 "usage_limit": int}}

Intervals are half open (``start >= end`` uses nothing), edge costs are row-major over the edge's nodes,
a cost of 10^18 or more means forbidden. Parallel edges, both orientations, hyperedges of up to
three nodes and edges that name a node twice are accepted. The resource is called ``memory``.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from formulations.files import write_text_atomically
from formulations.problem import BoolArray, Factor, IntArray, Node, ProblemError, Resource, StrategyProblem, UsageTerm
from formulations.solution import SolveResult

FORBIDDEN_COST = 10**18
LATEST_TIME = 10_000_000
"""Times beyond this are refused: a replay keeps one number per time."""

_GZIP_MAGIC = b"\x1f\x8b"
_LARGEST_AMOUNT = (1 << 63) - 1
_LARGEST_ARITY = 3
_KEYS = {
    "problem": ({"nodes", "edges"}, {"name", "usage_limit"}),
    "problem.nodes": ({"intervals", "costs", "usages"}, set[str]()),
    "problem.edges": ({"nodes", "costs"}, set[str]()),
}


def read_contest_problem(path: str | Path) -> StrategyProblem:
    """Read a contest problem.

    Parameters
    ----------
    path
        A ``.json`` or ``.json.gz`` file; gzip is recognised by content.

    Returns
    -------
    StrategyProblem
        Nodes are called ``node0, node1, ...``; choices are in file order.

    Raises
    ------
    ProblemError
        If the file cannot be read or is malformed in any way; the message names path, field and value.
    """
    source = Path(path)
    try:
        data = source.read_bytes()
        if data.startswith(_GZIP_MAGIC):
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise ProblemError(f"cannot read {source}: {error}") from error
    try:
        return parse_contest_problem(data, source.name.partition(".")[0])
    except ProblemError as error:
        raise ProblemError(f"{source}: {error}") from None


def parse_contest_problem(text: str | bytes, default_name: str = "contest") -> StrategyProblem:
    """Parse the text of a contest problem; see :func:`read_contest_problem`."""
    try:
        document = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except ProblemError:
        raise
    except (ValueError, RecursionError) as error:
        raise ProblemError(f"not valid JSON: {error}") from None
    if not isinstance(document, dict) or "problem" not in document:
        raise ProblemError('the document must be an object with the key "problem"')
    problem = _object(document["problem"], "problem")
    name = problem.get("name", default_name)
    if not isinstance(name, str):
        raise ProblemError(f"problem.name must be a string, got {_show(name)}")
    limit = problem.get("usage_limit")
    if limit is not None and (type(limit) is not int or limit < 0):
        raise ProblemError(f"problem.usage_limit must be a non-negative integer, got {_show(limit)}")
    nodes = _nodes(_object(problem["nodes"], "problem.nodes"))
    factors = _factors(_object(problem["edges"], "problem.edges"), [node.size for node in nodes])
    horizon = max((term.end for node in nodes for term in node.usage), default=1)
    return StrategyProblem(name, nodes, factors, (Resource("memory", limit),), horizon)


def write_solution(path: str | Path, result: SolveResult) -> None:
    """Write a result as JSON, atomically: choices are strategy indices in file order."""
    document = {
        "status": str(result.status),
        "objective": result.objective,
        "bound": result.bound,
        "gap": result.gap,
        "seconds": result.seconds,
        "solver": result.solver,
        "peak_usage": result.peak_usage[0] if result.peak_usage else None,
        "choices": None if result.choices is None else list(result.choices),
    }
    write_text_atomically(path, json.dumps(document, indent=1) + "\n")


def _nodes(table: dict[str, Any]) -> tuple[Node, ...]:
    intervals, sizes = _integers(table["intervals"], "problem.nodes.intervals")
    costs, cost_sizes = _integers(table["costs"], "problem.nodes.costs")
    usages, usage_sizes = _integers(table["usages"], "problem.nodes.usages")
    if not len(sizes) == len(cost_sizes) == len(usage_sizes):
        raise ProblemError(
            f"problem.nodes has {len(sizes)} intervals, {len(cost_sizes)} costs and {len(usage_sizes)} usages; "
            "there must be one of each per node"
        )
    for i, (size, cost_size, usage_size) in enumerate(zip(sizes, cost_sizes, usage_sizes, strict=True)):
        if size != 2:
            raise ProblemError(f"problem.nodes.intervals[{i}] has {size} numbers; it must be [start, end]")
        if not cost_size:
            raise ProblemError(f"problem.nodes.costs[{i}] is empty; a node needs at least one strategy")
        if cost_size != usage_size:
            raise ProblemError(f"node {i} has {cost_size} costs and {usage_size} usages; give one of each per strategy")
    late = max(intervals, default=0)
    if late > LATEST_TIME:
        raise ProblemError(f"problem.nodes.intervals reaches time {late}; renumber times to at most {LATEST_TIME}")
    large = max(usages, default=0)
    if large > _LARGEST_AMOUNT:
        raise ProblemError(f"problem.nodes.usages has {large}, which does not fit into 63 bits; use a coarser unit")
    cost, forbidden = _costs(costs)
    amount = np.array(usages, dtype=np.int64)
    nodes = []
    first = 0
    for i, size in enumerate(cost_sizes):
        own = slice(first, first + size)
        first += size
        start, end = intervals[2 * i], intervals[2 * i + 1]
        usage = (UsageTerm(0, start, end, amount[own]),) if start < end else ()
        flags = forbidden[own]
        nodes.append(Node(f"node{i}", cost[own], flags if flags.any() else None, usage))
    return tuple(nodes)


def _factors(table: dict[str, Any], sizes: list[int]) -> tuple[Factor, ...]:
    members, arities = _integers(table["nodes"], "problem.edges.nodes")
    costs, cost_sizes = _integers(table["costs"], "problem.edges.costs")
    if len(arities) != len(cost_sizes):
        raise ProblemError(f"problem.edges has {len(arities)} nodes and {len(cost_sizes)} costs; give one per edge")
    cost, forbidden = _costs(costs)
    factors = []
    first_member = first_cost = 0
    for e, (arity, cost_size) in enumerate(zip(arities, cost_sizes, strict=True)):
        listed = members[first_member : first_member + arity]
        own = slice(first_cost, first_cost + cost_size)
        first_member += arity
        first_cost += cost_size
        if not 1 <= len(set(listed)) <= _LARGEST_ARITY:
            raise ProblemError(
                f"problem.edges.nodes[{e}] is {_show(listed)}; an edge has one to {_LARGEST_ARITY} different nodes"
            )
        if max(listed) >= len(sizes):
            raise ProblemError(f"problem.edges.nodes[{e}] names node {max(listed)}; there are {len(sizes)} nodes")
        shape = tuple(sizes[i] for i in listed)
        if math.prod(shape) != cost_size:
            raise ProblemError(
                f"problem.edges.costs[{e}] has {cost_size} entries; nodes {listed} have {math.prod(shape)} combinations"
            )
        flags = forbidden[own] if forbidden[own].any() else None
        factors.append(_factor(listed, cost[own].reshape(shape), None if flags is None else flags.reshape(shape)))
    return tuple(factors)


def _factor(listed: list[int], cost: IntArray, flags: BoolArray | None) -> Factor:
    """Make a factor; a node that is listed twice has one strategy, so only the diagonal counts."""
    scope = tuple(dict.fromkeys(listed))
    if len(scope) < len(listed):
        shape = tuple(cost.shape[listed.index(i)] for i in scope)
        grid = np.indices(shape)
        diagonal = tuple(grid[scope.index(i)] for i in listed)
        cost, flags = cost[diagonal], None if flags is None else flags[diagonal]
    return Factor(scope, cost, flags)


def _costs(values: list[int]) -> tuple[IntArray, BoolArray]:
    """Costs and flags of all tables; a forbidden entry costs zero, because nothing may add it up."""
    if max(values, default=0) > _LARGEST_AMOUNT:
        values = [min(value, FORBIDDEN_COST) for value in values]
    cost = np.array(values, dtype=np.int64)
    forbidden = cost >= FORBIDDEN_COST
    cost[forbidden] = 0
    return cost, forbidden


def _integers(rows: Any, where: str) -> tuple[list[int], list[int]]:
    """Flatten a list of lists of non-negative integers; also return the length of every row."""
    if not isinstance(rows, list):
        raise ProblemError(f"{where} must be a list, got {_show(rows)}")
    for i, row in enumerate(rows):
        if type(row) is not list:
            raise ProblemError(f"{where}[{i}] must be a list, got {_show(row)}")
    flat: list[int] = list(itertools.chain.from_iterable(rows))
    # bool is a subclass of int, and JSON's 1.0 is a float: compare exact types.
    if set(map(type, flat)) <= {int} and min(flat, default=0) >= 0:
        return flat, [len(row) for row in rows]
    i, value = next((i, v) for i, row in enumerate(rows) for v in row if type(v) is not int or v < 0)
    raise ProblemError(f"{where}[{i}] must hold non-negative integers, got {_show(value)}")


def _object(value: Any, where: str) -> dict[str, Any]:
    required, optional = _KEYS[where]
    if not isinstance(value, dict):
        raise ProblemError(f"{where} must be an object, got {_show(value)}")
    missing = sorted(required - value.keys())
    if missing:
        raise ProblemError(f"{where} lacks {', '.join(missing)}")
    unknown = sorted(value.keys() - required - optional)
    if unknown:
        known = ", ".join(sorted(required | optional))
        raise ProblemError(f"{where} has unknown keys {', '.join(map(_show, unknown))}; known are {known}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ProblemError(f"the key {_show(twice)} appears twice in one object")
    return found


def _no_constant(name: str) -> Any:
    raise ProblemError(f"{name} is not a number that JSON knows; use integers")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
