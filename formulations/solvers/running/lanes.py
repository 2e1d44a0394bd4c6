"""The lanes of a portfolio: one per worker process, each a sequence of turns of members.

Two exact methods that complement each other come first, so that two workers suffice; a lane that ends early, or
more workers, give the others their turn. With one worker the turns are limited by iterations and not by the
clock, so that a solve that ends before its limit is deterministic.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from formulations.encodings.linear_model import linear_columns
from formulations.problem.solution import SolveOptions
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.columns.repeated_blocks import find_repeats
from formulations.solvers.prices.bounding import is_wide
from formulations.solvers.prices.tunables import LARGE_ENTRIES
from formulations.solvers.protocol.registry import SOLVERS
from formulations.solvers.running.tunables import (
    BLOCKS_UNTIL,
    HEAD_START_SECONDS,
    ITERATIONS_ALONE,
    LEAST_NODES_OF_COLUMNS,
    MEMORY_SHARE,
    MOST_COLUMNS,
    MOST_NODES_IN_PARTS,
    PRICES_UNTIL,
    TINY_COLUMNS,
)

PRICES, BRANCH_AND_CUT, PRICES_AND_BRANCH = "lagrangian", "highs", "price_and_branch"
PROOF = "branch_and_bound"
FEASIBILITY, PARTS, CONSTRAINTS = "peak_prices", "large_neighbourhood", "cpsat"
BLOCKS, CORES = "blocks", "guessed_cores"
MEMBERS = (
    "blocks",
    "branch_and_bound",
    "cpsat",
    "guessed_cores",
    "highs",
    "lagrangian",
    "large_neighbourhood",
    "peak_prices",
    "price_and_branch",
)
"""Techniques: the built-in solvers that lanes may have; turns of other built-in ones are left out."""

PROVING = (BRANCH_AND_CUT, PROOF, PRICES_AND_BRANCH, CONSTRAINTS)
"""Members that prove or claim an optimum; the others only search once it is claimed."""

_MOST_GUESSED = 1_500_000
"""Not tunable: columns up to which cores of guesses found more than moves at prices; with twice as many, less."""

LEAST_LANES = 2
"""Not tunable: lanes that every search has."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A member's time in a lane.

    Parameters
    ----------
    solver
        Name of the member.
    until
        Part of the portfolio's time limit after which it has to end.
    iterations
        Its iteration limit where the caller gave none, or None; for members that could go on for ever.
    head_start
        Seconds that the other lanes have before it begins.
    without_incumbent
        Whether it is left out where anything feasible is known already.
    """

    solver: str
    until: float = 1.0
    iterations: int | None = None
    head_start: float = 0.0
    without_incumbent: bool = False


Lane = tuple[Turn, ...]


def worker_count(options: SolveOptions) -> int:
    """Return the number of processes that may work at once: the option, or one per core of this process."""
    return len(os.sched_getaffinity(0)) if options.workers is None else options.workers


def runs_alone(options: SolveOptions) -> bool:
    """Return whether one process works at a time, so that the result does not depend on the clock."""
    return worker_count(options) == 1 or options.iteration_limit is not None


def fair_share_of_memory(lanes: int) -> int | None:
    """Return the resident bytes that each of some processes may take at most; None where nothing is known.

    Most of the memory that is free now, in equal parts: a member that takes more is killed before memory runs out.
    """
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    free = next((int(line.split()[1]) for line in text.splitlines() if line.startswith("MemAvailable:")), None)
    return None if free is None else int(MEMORY_SHARE * free * 1024 / max(1, lanes))


def lanes_for(problem: StrategyProblem, options: SolveOptions, *, deep: bool = False) -> tuple[Lane, ...]:
    """Return the lanes that suit the size of a reduced problem and the number of workers.

    Where most of a small problem is blocks that repeat, their columns come before prices. In a large problem of a deep
    model (``deep``) they come first of all; prices, and branches where limits bind, have a process of their own there
    only where tables are not so large that one process has to be enough for memory.
    Where tables are very large, one process does nothing but bound, and another nothing but look for assignments.
    """
    lanes = _lanes_of_all(problem, options, deep=deep)
    left_out = SOLVERS.keys() - set(MEMBERS)
    kept = (tuple(turn for turn in lane if turn.solver not in left_out) for lane in lanes)
    return tuple(lane for lane in kept if lane)


def _lanes_of_all(problem: StrategyProblem, options: SolveOptions, *, deep: bool) -> tuple[Lane, ...]:
    """Return the lanes where no member is left out."""
    columns = linear_columns(problem)
    if deep:
        iterations = ITERATIONS_ALONE if worker_count(options) == 1 else None
        columns_first = Turn(BLOCKS, until=BLOCKS_UNTIL, iterations=iterations)
        prices, anything = Turn(PRICES, iterations=iterations), Turn(FEASIBILITY, without_incumbent=True)
        if iterations is not None or columns > LARGE_ENTRIES:
            return ((columns_first, prices, anything),)
        is_limited = any(resource.limit is not None for resource in problem.resources)
        return ((columns_first, prices, anything), (Turn(PRICES_AND_BRANCH) if is_limited else prices,))
    small = columns <= MOST_COLUMNS
    workers = worker_count(options)
    alone = runs_alone(options)
    iterations = ITERATIONS_ALONE if alone else None
    # Where sums leave the range of doubles, branch and bound declines, and others claim what they can.
    proof = (Turn(PROOF), Turn(BRANCH_AND_CUT))
    exact = proof if small else (Turn(PRICES_AND_BRANCH, iterations=iterations),)
    # No iteration limit ends constraint programming, and where the clock does, results depend on it.
    confirmed = (*exact, *(Turn(CONSTRAINTS),) * (small and options.iteration_limit is None))
    repeating = (Turn(BLOCKS, until=BLOCKS_UNTIL, iterations=iterations),) * (small and repeats_mostly(problem))
    if alone:
        prices = Turn(PRICES, iterations=iterations)
        anything = Turn(FEASIBILITY, iterations=iterations, without_incumbent=True)
        return ((*repeating, prices, anything, *confirmed),)
    if is_wide(columns, len(problem.factors)):
        search = (Turn(FEASIBILITY, until=PRICES_UNTIL, without_incumbent=True), Turn(PARTS))
        return (exact, search, *[(Turn(PRICES),)] * (workers > LEAST_LANES))
    parts = [PARTS] * (PARTS in MEMBERS and len(problem.nodes) <= MOST_NODES_IN_PARTS)
    guesses = not small and columns <= _MOST_GUESSED
    prices = Turn(CORES if guesses else PRICES, head_start=HEAD_START_SECONDS if columns <= TINY_COLUMNS else 0.0)
    if workers > LEAST_LANES:
        more = [(Turn(other),) for other in ([CONSTRAINTS] * small + parts)[: workers - LEAST_LANES]]
        return (*_beside(exact, (prices, Turn(FEASIBILITY, without_incumbent=True)), repeating), *more)
    until = PRICES_UNTIL if parts else 1.0
    anything = Turn(FEASIBILITY, until=(1.0 + until) / 2, without_incumbent=True)
    return _beside(confirmed, (replace(prices, until=until), anything, *map(Turn, parts)), repeating)


def _beside(exact: Lane, search: Lane, columns_first: Lane) -> tuple[Lane, ...]:
    """The lanes of exact members and of a search; columns begin before both where there are any."""
    if not columns_first:
        return (exact, search)
    return ((*columns_first, *search), (replace(exact[0], head_start=HEAD_START_SECONDS), *exact[1:]))


def repeats_mostly(problem: StrategyProblem) -> bool:
    """Whether most nodes of a problem that is not small are of blocks that repeat."""
    if len(problem.nodes) < LEAST_NODES_OF_COLUMNS:
        return False
    return 2 * find_repeats(problem).count >= len(problem.nodes)
