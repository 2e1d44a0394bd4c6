"""Thousands of damaged contest files: one error line, or exactly the problem that a slow and plain parser reads."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from support.problems.reference_contest import Refused, is_undecided, reference_problem, same_problem
from support.processes.damaged_documents import EXAMPLE, damaged_bytes, damaged_gzip, damaged_tree

from formulations.instances.contest import parse_contest_problem, read_contest_problem
from formulations.problem.checker import check
from formulations.problem.solution import SolveOptions, Status
from formulations.problem.strategy_problem import ProblemError, StrategyProblem
from formulations.solvers import SolverPool, solve

DAMAGE = {"tree": damaged_tree, "bytes": damaged_bytes}
SAMPLE, SAMPLE_OF_FILES = 3000, 500
ALL, ALL_FILES = 100_000, 10_000
BARELY = 10**18 - 1
LEAST_ACCEPTED = 0.05
LONGEST_MESSAGE = 500


def outcome(parse: Callable[[], StrategyProblem]) -> StrategyProblem | None:
    """The problem, or None where the parser refuses it in one line; anything else that it raises is a bug."""
    message = ""
    try:
        problem = parse()
    except ProblemError as error:
        message = str(error)
        problem = None
    if problem is None:
        assert message.strip()
        assert "\n" not in message
        assert len(message) < LONGEST_MESSAGE
        return None
    problem.validate()
    check(problem, [0] * len(problem.nodes))
    return problem


def expected(data: bytes, name: str = "contest") -> StrategyProblem | None:
    try:
        return reference_problem(data, name)
    except Refused:
        return None


def agree(data: bytes, found: StrategyProblem | None, name: str = "contest") -> bool:
    """Whether the outcome is the reference's; where the format leaves a choice, a problem must still be the same."""
    reference = expected(data, name)
    if found is None or reference is None:
        return found is reference or is_undecided(data)
    return same_problem(found, reference)


def test_the_reference_reads_the_example() -> None:
    problem = reference_problem(json.dumps(EXAMPLE).encode())
    assert [node.size for node in problem.nodes] == [1, 2, 3, 2, 1]
    assert problem.factors[2].cost.tolist() == [[90, 10], [20, 80]]
    assert (problem.name, problem.horizon, problem.resources[0].limit) == ("example", 150, 50)


def compare(kind: str, seeds: range) -> None:
    accepted = 0
    for seed in seeds:
        data = DAMAGE[kind](seed)
        found = outcome(lambda data=data: parse_contest_problem(data))
        assert agree(data, found), f"{kind}, seed {seed}: {data[:2000]!r}"
        accepted += found is not None
    assert LEAST_ACCEPTED * len(seeds) < accepted < (1 - LEAST_ACCEPTED) * len(seeds)


@pytest.mark.slow_cases("tree")
@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_texts_are_read_as_the_reference_reads_them(kind: str) -> None:
    compare(kind, range(SAMPLE))


@pytest.mark.fuzz
def test_damaged_texts_at_length() -> None:
    """All in one process: nothing that one file leaves behind may change how the next is read."""
    for kind in DAMAGE:
        compare(kind, range(SAMPLE, SAMPLE + ALL))


def decompressed(data: bytes) -> bytes | None:
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error):
        return None


def compare_files(path: Path, seeds: range) -> None:
    accepted = refused = 0
    for seed in seeds:
        data = damaged_gzip(seed)
        path.write_bytes(data)
        found = outcome(lambda: read_contest_problem(path))
        text = decompressed(data)
        if text is None:
            assert found is None, f"seed {seed}"
            refused += 1
        else:
            assert agree(text, found, path.name), f"seed {seed}: {text[:2000]!r}"
            accepted += found is not None
    assert min(accepted, refused) > LEAST_ACCEPTED * len(seeds)


def test_damaged_files_are_read_as_the_reference_reads_them(tmp_path: Path) -> None:
    compare_files(tmp_path / "file", range(SAMPLE_OF_FILES))


@pytest.mark.fuzz
def test_damaged_files_at_length(tmp_path: Path) -> None:
    compare_files(tmp_path / "file", range(SAMPLE_OF_FILES, SAMPLE_OF_FILES + ALL_FILES))


def document(costs: list[list[int]], edges: list[list[int]], usages: list[list[int]], limit: int) -> bytes:
    """A chain of nodes that are all alive at once."""
    nodes = {"intervals": [[0, 1]] * len(costs), "costs": costs, "usages": usages}
    pairs = {"nodes": [[i, i + 1] for i in range(len(costs) - 1)], "costs": edges}
    return json.dumps({"problem": {"nodes": nodes, "edges": pairs, "usage_limit": limit}}).encode()


@pytest.mark.parametrize("name", ["tree_dp", "highs", "cpsat", "portfolio"])
def test_sums_of_costs_beyond_int64_are_exact(name: str, pool: SolverPool) -> None:
    """Forty nodes at 10^18 - 1 each: the sum is beyond int64, one unit less on a node is seen."""
    edges = [[0, 0, 0, BARELY]] * 39
    problem = parse_contest_problem(document([[BARELY, BARELY - 1]] * 40, edges, [[1, 1]] * 40, 40))
    best = 40 * BARELY - 20
    assert check(problem, [k % 2 for k in range(40)], best, best).ok
    result = solve(problem, name, SolveOptions(time_limit=30), pool=pool)
    assert check(problem, result.choices or (), result.objective, result.bound).ok
    assert result.bound is not None
    assert result.bound <= best
    assert result.objective is not None
    assert best <= result.objective <= best + 40
    assert name not in ("tree_dp", "portfolio") or (result.status, result.objective) == (Status.OPTIMAL, best)


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False)])
def test_sums_of_usages_beyond_int64_are_exact(spare: int, fits: bool, pool: SolverPool) -> None:
    """Three nodes of 2^63 - 1 bytes each fill a limit beyond int64 to the last byte."""
    most = 2**63 - 1
    problem = parse_contest_problem(document([[0, 5]] * 3, [[0] * 4] * 2, [[most, most - 1]] * 3, 3 * most + spare))
    assert check(problem, (0, 0, 0)).ok == fits
    result = solve(problem, "portfolio", SolveOptions(time_limit=30), pool=pool)
    assert (result.status, result.objective) == (Status.OPTIMAL, 0 if fits else 5)
