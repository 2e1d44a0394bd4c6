"""The contest's files: what they mean, and one clear error for anything that is not one of them."""

from __future__ import annotations

import copy
import gzip
import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes.damaged_documents import EXAMPLE, FORBIDDEN, random_document

from formulations.instances.contest import parse_contest_problem, read_contest_problem, write_solution
from formulations.problem.checker import check
from formulations.problem.solution import SolveOptions, Status
from formulations.problem.strategy_problem import ProblemError
from formulations.solvers import SolverPool, solve, solve_in_process


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    document = copy.deepcopy(EXAMPLE)
    change(document["problem"])
    return json.dumps(document)


def contest_cost(document: dict[str, Any], choices: tuple[int, ...]) -> int | None:
    """The contest's own evaluation, written once more; None where it does not fit."""
    problem = document["problem"]
    nodes, edges = problem["nodes"], problem["edges"]
    total = sum(costs[s] for costs, s in zip(nodes["costs"], choices, strict=True))
    for members, costs in zip(edges["nodes"], edges["costs"], strict=True):
        entry = 0
        for i in members:
            entry = entry * len(nodes["costs"][i]) + choices[i]
        total += costs[entry]
    last = max((end for _, end in nodes["intervals"]), default=0)
    limit = problem.get("usage_limit")
    for t in range(last):
        alive = [i for i, (start, end) in enumerate(nodes["intervals"]) if start <= t < end]
        if limit is not None and sum(nodes["usages"][i][choices[i]] for i in alive) > limit:
            return None
    return total if total < FORBIDDEN else None


@pytest.mark.parametrize("name", ["brute_force", "highs", "cpsat", "pyomo"])
def test_the_example_costs_445(name: str, pool: SolverPool) -> None:
    result = solve(parse_contest_problem(json.dumps(EXAMPLE)), name, SolveOptions(time_limit=30), pool=pool)
    assert (result.status, result.objective, result.bound) == (Status.OPTIMAL, 445, 445)


def test_every_assignment_costs_what_the_contest_says() -> None:
    generator = random.Random(0)
    for _ in range(60):
        document = random_document(generator)
        problem = parse_contest_problem(json.dumps(document))
        problem.validate()
        for choices in itertools.product(*(range(node.size) for node in problem.nodes)):
            report = check(problem, choices)
            expected = contest_cost(document, choices)
            assert report.ok == (expected is not None), (document, choices)
            if report.ok:
                assert report.objective == expected, (document, choices)


def test_intervals_are_half_open_and_may_be_empty() -> None:
    def touch(problem: dict[str, Any]) -> None:
        problem["nodes"]["intervals"] = [[0, 5], [5, 9], [5, 5], [9, 3], [0, 0]]
        problem["usage_limit"] = 25

    problem = parse_contest_problem(changed(touch))
    assert problem.horizon == 9
    assert [len(node.usage) for node in problem.nodes] == [1, 1, 0, 0, 0]
    assert check(problem, (0, 0, 0, 0, 0)).peaks[0].usage == 25


def test_a_million_is_a_cost_and_ten_to_the_eighteen_a_flag() -> None:
    def touch(problem: dict[str, Any]) -> None:
        problem["edges"]["costs"][0] = [FORBIDDEN - 1, FORBIDDEN]
        problem["nodes"]["costs"][1] = [10**6, 10**40]

    problem = parse_contest_problem(changed(touch))
    assert problem.factors[0].forbidden.tolist() == [[False, True]]
    assert problem.factors[0].cost[0, 0] == FORBIDDEN - 1
    assert problem.nodes[1].forbidden.tolist() == [False, True]
    assert problem.nodes[0].forbidden is None


def test_plain_and_gzip_are_told_apart_by_content(tmp_path: Path) -> None:
    text = json.dumps(EXAMPLE).encode()
    for name, data in (("a.json", text), ("b.json.gz", gzip.compress(text)), ("c.json", gzip.compress(text))):
        path = tmp_path / name
        path.write_bytes(data)
        problem = read_contest_problem(path)
        assert (problem.name, len(problem.nodes), len(problem.factors), problem.resources[0].limit) == (
            "example",
            5,
            5,
            50,
        )


def test_a_missing_name_is_the_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.json.gz"
    path.write_bytes(gzip.compress(changed(lambda p: p.pop("name")).encode()))
    assert read_contest_problem(path).name == "mine"


def test_no_limit() -> None:
    problem = parse_contest_problem(changed(lambda p: p.pop("usage_limit")))
    assert problem.resources[0].limit is None


Change = Callable[[dict[str, Any]], object]
MALFORMED: list[tuple[str, Change]] = [
    ("unknown keys 'usage_limits'", lambda p: p.update(usage_limits=p.pop("usage_limit"))),
    ("usage_limit must be a non-negative integer, got -1", lambda p: p.update(usage_limit=-1)),
    ("usage_limit must be a non-negative integer, got 5.0", lambda p: p.update(usage_limit=5.0)),
    ("usage_limit must be a non-negative integer, got True", lambda p: p.update(usage_limit=True)),
    ("usage_limit must be a non-negative integer, got '50'", lambda p: p.update(usage_limit="50")),
    ("name must be a string", lambda p: p.update(name=5)),
    ("problem lacks nodes", lambda p: p.pop("nodes")),
    ("problem.nodes lacks intervals", lambda p: p["nodes"].pop("intervals")),
    ("problem.nodes must be an object", lambda p: p.update(nodes=[])),
    ("problem.edges.nodes must be a list, got {}", lambda p: p["edges"].update(nodes={})),
    (r"intervals\[2\] must be a list, got 7", lambda p: p["nodes"]["intervals"].__setitem__(2, 7)),
    (r"intervals\[1\] has 3 numbers", lambda p: p["nodes"]["intervals"][1].append(3)),
    (
        r"intervals\[0\] must hold non-negative integers, got -3",
        lambda p: p["nodes"]["intervals"][0].__setitem__(0, -3),
    ),
    ("renumber times", lambda p: p["nodes"]["intervals"][0].__setitem__(1, 10**12)),
    ("5 intervals, 4 costs and 5 usages", lambda p: p["nodes"]["costs"].pop()),
    ("node 1 has 2 costs and 3 usages", lambda p: p["nodes"]["usages"][1].append(1)),
    (r"costs\[0\] is empty", lambda p: (p["nodes"]["costs"][0].clear(), p["nodes"]["usages"][0].clear())),
    (
        r"nodes.costs\[1\] must hold non-negative integers, got True",
        lambda p: p["nodes"]["costs"][1].__setitem__(0, True),
    ),
    (
        r"nodes.costs\[1\] must hold non-negative integers, got 5.5",
        lambda p: p["nodes"]["costs"][1].__setitem__(0, 5.5),
    ),
    (
        r"nodes.costs\[1\] must hold non-negative integers, got None",
        lambda p: p["nodes"]["costs"][1].__setitem__(0, None),
    ),
    (
        r"nodes.costs\[1\] must hold non-negative integers, got \[5\]",
        lambda p: p["nodes"]["costs"][1].__setitem__(0, [5]),
    ),
    (r"edges.costs\[2\] must hold non-negative integers, got -1", lambda p: p["edges"]["costs"][2].__setitem__(0, -1)),
    ("does not fit into 63 bits", lambda p: p["nodes"]["usages"][0].__setitem__(0, 2**63)),
    ("NaN is not a number", lambda p: p["nodes"]["costs"][0].__setitem__(0, float("nan"))),
    ("Infinity is not a number", lambda p: p["nodes"]["costs"][0].__setitem__(0, float("inf"))),
    (r"edges.nodes\[0\] names node 5; there are 5 nodes", lambda p: p["edges"]["nodes"].__setitem__(0, [0, 5])),
    (r"edges.nodes\[0\] is \[\]", lambda p: p["edges"]["nodes"].__setitem__(0, [])),
    (r"edges.nodes\[0\] is \[0, 1, 2, 3\]", lambda p: p["edges"]["nodes"].__setitem__(0, [0, 1, 2, 3])),
    (r"edges.costs\[0\] has 3 entries; nodes \[0, 1\] have 2", lambda p: p["edges"]["costs"][0].append(1)),
    ("5 nodes and 4 costs", lambda p: p["edges"]["costs"].pop()),
]


@pytest.mark.parametrize(("message", "change"), MALFORMED, ids=[message for message, _ in MALFORMED])
def test_malformed_problems_name_field_and_value(message: str, change: Change) -> None:
    with pytest.raises(ProblemError, match=message):
        parse_contest_problem(changed(change))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1, 2]", 'key "problem"'),
        (b"null", 'key "problem"'),
        (b'{"problem": 5}', "problem must be an object, got 5"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"problem": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b'{"problem": {"name": "a", "name": "b"}}', "'name' appears twice"),
    ],
)
def test_what_is_no_problem_at_all(text: bytes, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        parse_contest_problem(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps(EXAMPLE).encode())
    broken = bytearray(whole)
    broken[len(broken) // 2] ^= 0xFF
    for name, data in (("cut.json.gz", whole[:-20]), ("head.json.gz", whole[:5]), ("flipped.json.gz", bytes(broken))):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(ProblemError, match=name):
            read_contest_problem(path)
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(ProblemError, match="cannot read"):
            read_contest_problem(path)


def test_large_files_are_read_in_seconds(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    count, size = 65_000, 5
    edges = np.stack([np.arange(1, count), (np.arange(1, count) * generator.random(count - 1)).astype(int)], axis=1)
    starts = generator.integers(0, 30_000, count)
    document = {
        "problem": {
            "nodes": {
                "intervals": np.stack([starts, starts + 50], axis=1).tolist(),
                "costs": generator.integers(0, 10**9, (count, size)).tolist(),
                "usages": generator.integers(0, 10**6, (count, size)).tolist(),
            },
            "edges": {
                "nodes": edges.tolist(),
                "costs": generator.integers(0, 10**6, (count - 1, size * size)).tolist(),
            },
            "usage_limit": 10**12,
        }
    }
    path = tmp_path / "large.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document).encode(), 1))
    started = time.process_time()
    problem = read_contest_problem(path)
    assert time.process_time() - started < 10
    assert (len(problem.nodes), len(problem.factors), problem.horizon) == (count, count - 1, int(starts.max()) + 50)


def test_solutions_are_written_whole(tmp_path: Path) -> None:
    problem = parse_contest_problem(json.dumps(EXAMPLE))
    result = solve_in_process(problem, "brute_force")
    path = tmp_path / "out" / "solution.json"
    write_solution(path, result)
    written = json.loads(path.read_text())
    assert written["status"] == "optimal"
    assert (written["objective"], written["bound"], written["gap"]) == (445, 445, 0.0)
    assert written["solver"] == "brute_force"
    assert written["seconds"] == result.seconds
    assert written["peak_usage"] == check(problem, written["choices"]).peaks[0].usage
    assert contest_cost(EXAMPLE, tuple(written["choices"])) == 445
    write_solution(
        path, solve_in_process(parse_contest_problem(changed(lambda p: p.update(usage_limit=1))), "brute_force")
    )
    assert json.loads(path.read_text())["choices"] is None
    assert [p.name for p in path.parent.iterdir()] == ["solution.json"]
