"""Canonical problems as JSON, so that one that failed once stays among the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from formulations.problem.strategy_problem import Factor, Node, Resource, StrategyProblem, UsageTerm


def write_problem(path: Path, problem: StrategyProblem) -> None:
    """Write a problem, one node or factor a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "name": problem.name,
        "horizon": problem.horizon,
        "resources": [{"name": r.name, "limit": r.limit} for r in problem.resources],
        "nodes": [{"name": node.name, **_table(node)} for node in problem.nodes],
        "factors": [{"scope": list(factor.scope), **_table(factor)} for factor in problem.factors],
    }
    lines = ",\n ".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in document.items())
    path.write_text("{" + lines + "}\n", encoding="utf-8")


def read_problem(path: Path) -> StrategyProblem:
    """Read what :func:`write_problem` wrote."""
    document = json.loads(path.read_text(encoding="utf-8"))
    problem = StrategyProblem(
        document["name"],
        tuple(Node(entry["name"], *_arrays(entry)) for entry in document["nodes"]),
        tuple(Factor(tuple(entry["scope"]), *_arrays(entry)) for entry in document["factors"]),
        tuple(Resource(entry["name"], entry["limit"]) for entry in document["resources"]),
        document["horizon"],
    )
    problem.validate()
    return problem


def _lines(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n  " + ",\n  ".join(json.dumps(entry) for entry in value) + "]"
    return json.dumps(value)


def _table(table: Node | Factor) -> dict[str, Any]:
    return {
        "cost": table.cost.tolist(),
        "forbidden": None if table.forbidden is None else table.forbidden.tolist(),
        "usage": [[t.resource, t.start, t.end, t.amount.tolist()] for t in table.usage],
    }


def _arrays(entry: dict[str, Any]) -> tuple[np.ndarray, np.ndarray | None, tuple[UsageTerm, ...]]:
    flags = None if entry["forbidden"] is None else np.array(entry["forbidden"], dtype=np.bool_)
    usage = tuple(
        UsageTerm(r, start, end, np.array(amount, dtype=np.int64)) for r, start, end, amount in entry["usage"]
    )
    return np.array(entry["cost"], dtype=np.int64), flags, usage
