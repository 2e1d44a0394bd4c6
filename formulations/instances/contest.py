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

import contextlib
import gc
import gzip
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from formulations.instances.contest_scan import TOO_LARGE, Rows, cut_out_rows
from formulations.problem.files import write_text_atomically
from formulations.problem.solution import SolveResult
from formulations.problem.strategy_problem import (
    BoolArray,
    Factor,
    IntArray,
    Node,
    ProblemError,
    Resource,
    StrategyProblem,
    UsageTerm,
)

FORBIDDEN_COST = 10**18
LATEST_TIME = 10_000_000
"""Times beyond this are refused: a replay keeps one number per time."""

_GZIP_MAGIC = b"\x1f\x8b"
_LARGEST_AMOUNT = (1 << 63) - 1
_LARGEST_ARITY = 3
_LATE = "reaches time {value}; renumber times to at most {most}"
_LARGE = "has {value}, which does not fit into 63 bits; use a coarser unit"
_KEYS = {
    "problem": ({"nodes", "edges"}, {"name", "usage_limit"}),
    "problem.nodes": ({"intervals", "costs", "usages"}, set[str]()),
    "problem.edges": ({"nodes", "costs"}, set[str]()),
}


@dataclass(frozen=True, slots=True)
class _Field:
    """A list of lists: its name, the largest number that it may hold, and the error message for a larger one."""

    where: str
    most: int | None = None
    complaint: str = ""


_Reader = Callable[[Any, _Field], Rows]


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
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    with _without_collection():
        return _parsed(data, default_name)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Pause garbage collection: nothing here forms cycles, and each collection would visit all nodes and factors."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _parsed(data: bytes, default_name: str) -> StrategyProblem:
    cut = cut_out_rows(data)
    if cut is not None:
        skeleton, tables = cut
        # Errors are raised below, by positions in the whole text.
        with contextlib.suppress(ProblemError):
            return _problem(_document(skeleton), lambda value, field: _cut_out(value, tables, field), default_name)
    return _problem(_document(data), _listed, default_name)


def _document(text: bytes) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except ProblemError:
        raise
    except (ValueError, RecursionError) as error:
        raise ProblemError(f"not valid JSON: {error}") from None


def _problem(document: Any, read: _Reader, default_name: str) -> StrategyProblem:
    if not isinstance(document, dict) or "problem" not in document:
        raise ProblemError('the document must be an object with the key "problem"')
    problem = _object(document["problem"], "problem")
    name = problem.get("name", default_name)
    if not isinstance(name, str):
        raise ProblemError(f"problem.name must be a string, got {_show(name)}")
    limit = problem.get("usage_limit")
    if limit is not None and (type(limit) is not int or limit < 0):
        raise ProblemError(f"problem.usage_limit must be a non-negative integer, got {_show(limit)}")
    nodes, horizon = _nodes(_object(problem["nodes"], "problem.nodes"), read)
    sizes = np.array([node.size for node in nodes], dtype=np.int64)
    factors = _factors(_object(problem["edges"], "problem.edges"), sizes, read)
    return StrategyProblem(name, nodes, factors, (Resource("memory", limit),), horizon)


def write_solution(path: str | Path, result: SolveResult) -> None:
    """Write a result as JSON, atomically: choices are strategy indices in file order."""
    document = {
        "status": str(result.status),
        "objective": result.objective,
        "bound": result.bound,
        "gap": result.gap,
        "proof": None if result.proof is None else str(result.proof),
        "claimed": result.claimed,
        "seconds": result.seconds,
        "solver": result.solver,
        "peak_usage": result.peak_usage[0] if result.peak_usage else None,
        "choices": None if result.choices is None else list(result.choices),
    }
    write_text_atomically(path, json.dumps(document, indent=1) + "\n")


def _nodes(table: dict[str, Any], read: _Reader) -> tuple[tuple[Node, ...], int]:
    """Return the nodes and the horizon."""
    intervals = read(table["intervals"], _Field("problem.nodes.intervals", LATEST_TIME, _LATE))
    costs = read(table["costs"], _Field("problem.nodes.costs"))
    usages = read(table["usages"], _Field("problem.nodes.usages", _LARGEST_AMOUNT, _LARGE))
    if not len(intervals.sizes) == len(costs.sizes) == len(usages.sizes):
        raise ProblemError(
            f"problem.nodes has {len(intervals.sizes)} intervals, {len(costs.sizes)} costs and {len(usages.sizes)} "
            "usages; there must be one of each per node"
        )
    for i in np.flatnonzero(intervals.sizes != 2).tolist():
        raise ProblemError(f"problem.nodes.intervals[{i}] has {intervals.sizes[i]} numbers; it must be [start, end]")
    for i in np.flatnonzero(costs.sizes == 0).tolist():
        raise ProblemError(f"problem.nodes.costs[{i}] is empty; a node needs at least one strategy")
    for i in np.flatnonzero(costs.sizes != usages.sizes).tolist():
        raise ProblemError(
            f"node {i} has {costs.sizes[i]} costs and {usages.sizes[i]} usages; give one of each per strategy"
        )
    cost, forbidden = _costs(costs.values)
    bounds = _bounds(costs.sizes)
    any_forbidden = np.logical_or.reduceat(forbidden, bounds[:-1]) if len(costs.sizes) else forbidden
    starts, ends = intervals.values[::2], intervals.values[1::2]
    nodes = []
    amount = usages.values
    for i, ((first, last), flagged, start, end) in enumerate(
        zip(itertools.pairwise(bounds.tolist()), any_forbidden.tolist(), starts.tolist(), ends.tolist(), strict=True)
    ):
        usage = (UsageTerm(0, start, end, amount[first:last]),) if start < end else ()
        nodes.append(Node(f"node{i}", cost[first:last], forbidden[first:last] if flagged else None, usage))
    return tuple(nodes), int(ends[starts < ends].max(initial=0)) or 1


def _factors(table: dict[str, Any], sizes: IntArray, read: _Reader) -> tuple[Factor, ...]:
    absent = f"names node {{value}}; there are {len(sizes)} nodes"
    members = read(table["nodes"], _Field("problem.edges.nodes", len(sizes) - 1, absent))
    costs = read(table["costs"], _Field("problem.edges.costs"))
    if len(members.sizes) != len(costs.sizes):
        raise ProblemError(
            f"problem.edges has {len(members.sizes)} nodes and {len(costs.sizes)} costs; give one per edge"
        )
    if not len(costs.sizes):
        return ()
    member_bounds, bounds = _bounds(members.sizes), _bounds(costs.sizes)
    scopes = [members.values[a:b].tolist() for a, b in itertools.pairwise(member_bounds.tolist())]
    for e, scope in enumerate(scopes):
        if not 1 <= len(set(scope)) <= _LARGEST_ARITY:
            raise ProblemError(
                f"problem.edges.nodes[{e}] is {_show(scope)}; an edge has one to {_LARGEST_ARITY} different nodes"
            )
    # Products that int64 could not hold are too large in any case.
    combinations = np.multiply.reduceat(sizes[members.values].astype(np.float64), member_bounds[:-1])
    for e in np.flatnonzero(combinations != costs.sizes).tolist():
        product = math.prod(int(sizes[i]) for i in scopes[e])
        raise ProblemError(
            f"problem.edges.costs[{e}] has {costs.sizes[e]} entries; nodes {scopes[e]} have {product} combinations"
        )
    cost, forbidden = _costs(costs.values)
    any_forbidden = np.logical_or.reduceat(forbidden, bounds[:-1])
    size = sizes.tolist()
    return tuple(
        _factor(
            scope,
            cost[first:last].reshape([size[i] for i in scope]),
            forbidden[first:last].reshape([size[i] for i in scope]) if flagged else None,
        )
        for scope, (first, last), flagged in zip(
            scopes, itertools.pairwise(bounds.tolist()), any_forbidden.tolist(), strict=True
        )
    )


def _bounds(sizes: IntArray) -> IntArray:
    """Return where rows of these sizes begin, and where the last one ends."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)])


def _factor(listed: list[int], cost: IntArray, flags: BoolArray | None) -> Factor:
    """Make a factor; a node that is listed twice has one strategy, so only the diagonal counts."""
    scope = tuple(listed)
    if len(set(scope)) < len(listed):
        scope = tuple(dict.fromkeys(listed))
        shape = tuple(cost.shape[listed.index(i)] for i in scope)
        grid = np.indices(shape)
        diagonal = tuple(grid[scope.index(i)] for i in listed)
        cost, flags = cost[diagonal], None if flags is None else flags[diagonal]
    return Factor(scope, cost, flags)


def _costs(values: IntArray) -> tuple[IntArray, BoolArray]:
    """Costs and flags of all tables; a forbidden entry costs zero, because its cost must not enter a sum."""
    forbidden = (values >= FORBIDDEN_COST) | (values == TOO_LARGE)
    return np.where(forbidden, 0, values), forbidden


def _cut_out(value: Any, tables: list[Rows], field: _Field) -> Rows:
    """Return the rows that a list in the shortened text stands for, after checking their range."""
    if not isinstance(value, list):
        raise ProblemError(f"{field.where} must be a list, got {_show(value)}")
    rows = tables[value[0]]
    if field.most is not None and len(rows.values) and not 0 <= rows.values.min() <= rows.values.max() <= field.most:
        raise ProblemError(f"{field.where} has a number beyond {field.most}")
    return rows


def _listed(rows: Any, field: _Field) -> Rows:
    """Read a list of lists of non-negative integers; raise ProblemError for anything else."""
    if not isinstance(rows, list):
        raise ProblemError(f"{field.where} must be a list, got {_show(rows)}")
    for i, row in enumerate(rows):
        if type(row) is not list:
            raise ProblemError(f"{field.where}[{i}] must be a list, got {_show(row)}")
        for value in row:
            # bool is a subclass of int, and JSON's 1.0 is a float: compare exact types.
            if type(value) is not int or value < 0:
                raise ProblemError(f"{field.where}[{i}] must hold non-negative integers, got {_show(value)}")
            if field.most is not None and value > field.most:
                raise ProblemError(f"{field.where}[{i}] " + field.complaint.format(value=_show(value), most=field.most))
    values = [value if value <= _LARGEST_AMOUNT else TOO_LARGE for value in itertools.chain.from_iterable(rows)]
    return Rows(np.array(values, dtype=np.int64), np.array([len(row) for row in rows], dtype=np.int64))


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
    raise ProblemError(f"{name} is not a number of JSON; use integers")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
