"""H3T's exact searches as tables: synchronization as a free switch, and the searches beside their restatements.

In Table 1 greedy, random and manual sequences may leave synchronization out, so ``exact``, which synchronizes, is no
bound on them: ``exact_free`` is. It begins with the best of all searches, those that synchronize included, and has a
bound on every sequence. Where time ended before a proof, ``bound`` says how far from the best it may be.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from formulations.h3t.canonical import h3t_problem
from formulations.h3t.costs import SECONDS_PER_COST
from formulations.h3t.exact import solve_synchronized
from formulations.h3t.free import FreeResult, solve_free
from formulations.h3t.problem import H3tBorders, H3tLayer, H3tStep, simulate_sequences
from formulations.problem.solution import SolveOptions, Status
from formulations.solvers import solve
from planner.papers.cells import Cell, Row
from planner.papers.h3t.cases import GIGABYTE, H3tCase, column_of, problem_row, table_1_cases
from planner.papers.h3t.searches import FIGURE_6_COLUMNS, FIGURE_6_SHARES, SEARCHES, figure_6_case
from planner.papers.hardware import Hardware

__all__ = ["FREE_TIMED", "canonical_cells", "exact_free_cells", "figure_6_free_cells", "random_step", "restated_cells"]

SECONDS = 10.0
"""Time limit of a column of Table 1."""

FIGURE_6_SECONDS = 4.0
"""Time limit of a limit of Figure 6."""

STARTS = ("dp_up", "dp", "greedy", "uniform", "random", "synchronized")

RANDOM_LAYERS = (3, 4, 6, 8, 12)
RANDOM_STEPS = 3
RANDOM_SECONDS, COLUMN_SECONDS = 4.0, 10.0
"""Time limit of each way."""

RESTATED_COLUMNS = (0, 2, 4, 8)
CANONICAL_COLUMNS = (0, 4, 8)

WAYS = {"event model": 10**6, "program": 0}
"""By name, up to how many layers the event model decides."""

FREE_TIMED = frozenset({"seconds", "bound", "peak_gb", "proven", "gap", "exact_seconds"})


def exact_free_cells() -> Iterator[Cell]:
    """The columns of Table 1 under both hardwares."""
    for hardware in Hardware:
        for case in table_1_cases(hardware):
            yield Cell(f"{case}, {hardware}", partial(_exact_free, case, hardware))


def figure_6_free_cells() -> Iterator[Cell]:
    """The limits of Figure 6: what no sequence there is below, those of greedy, random and manual included."""
    for hardware in Hardware:
        for column in FIGURE_6_COLUMNS:
            for share in FIGURE_6_SHARES:
                label = f"{column_of(table_1_cases()[column])}, {hardware}, {share:.0%} of the room"
                yield Cell(label, partial(_figure_6_free, column, share, hardware))


def _figure_6_free(column: int, share: float, hardware: Hardware) -> Iterator[Row]:
    return _exact_free(figure_6_case(column, share, hardware), hardware, FIGURE_6_SECONDS)


def _starts(case: H3tCase) -> list[tuple[int, ...]]:
    pairs = [SEARCHES[name](case, SolveOptions()) for name in STARTS]
    return [pair[0] for pair in pairs if pair is not None]


def _exact_free(case: H3tCase, hardware: Hardware, seconds: float = SECONDS) -> Iterator[Row]:
    found = solve_free(case.step(), _starts(case), SolveOptions(time_limit=seconds))
    yield problem_row(case, hardware) | {
        "solver": "exact_free",
        "seconds": None if found.outcome is None else found.outcome.cost / 1e6,
        "bound": None if found.bound is None else found.bound / 1e6,
        "peak_gb": None if found.outcome is None else found.outcome.peak / GIGABYTE,
        "limit_gb": case.memory_limit / GIGABYTE,
        "proven": found.status is Status.OPTIMAL,
    }


def restated_cells() -> Iterator[Cell]:
    """Random steps of few layers, and columns of Table 1, by the event model and by the program."""
    for layers in RANDOM_LAYERS:
        for seed in range(RANDOM_STEPS):
            yield Cell(f"{layers} random layers, seed {seed}", partial(_random_restated, layers, seed))
    for column in RESTATED_COLUMNS:
        case = table_1_cases(Hardware.INFERRED)[column]
        yield Cell(str(case), partial(_column_restated, case))


def canonical_cells() -> Iterator[Cell]:
    """Columns of Table 1 with synchronized segments: the exact search, and the portfolio on the canonical problem."""
    for column in CANONICAL_COLUMNS:
        case = table_1_cases(Hardware.INFERRED)[column]
        yield Cell(str(case), partial(_canonical, case))


def _canonical(case: H3tCase) -> Iterator[Row]:
    tables = case.tables()
    started = time.perf_counter()
    exact = solve_synchronized(tables, case.memory_limit, deadline=time.monotonic() + COLUMN_SECONDS)
    seconds = time.perf_counter() - started
    problem = h3t_problem(tables, case.memory_limit, SECONDS_PER_COST)
    found = solve(problem, "portfolio", SolveOptions(time_limit=COLUMN_SECONDS))
    yield {
        "column": column_of(case),
        "exact_seconds": seconds,
        "exact_proven": exact.outcome is not None and exact.outcome.cost == exact.bound,
        "seconds": found.seconds,
        "proven": found.status is Status.OPTIMAL,
        "gap": found.gap,
    }


def _random_restated(layers: int, seed: int) -> Iterator[Row]:
    yield from _restated(f"random, seed {seed}", random_step(layers, seed), [], RANDOM_SECONDS)


def _column_restated(case: H3tCase) -> Iterator[Row]:
    greedy = SEARCHES["greedy"](case, SolveOptions())
    yield from _restated(column_of(case), case.step(), [] if greedy is None else [greedy[0]], COLUMN_SECONDS)


def _restated(name: str, step: H3tStep, starts: list[tuple[int, ...]], seconds: float) -> Iterator[Row]:
    for way, model_layers in WAYS.items():
        started = time.perf_counter()
        found = solve_free(step, starts, SolveOptions(time_limit=seconds), model_layers=model_layers)
        yield {
            "step": name,
            "layers": len(step.layers),
            "way": way,
            "seconds": time.perf_counter() - started,
            "gap": _gap(found),
            "proven": found.status in (Status.OPTIMAL, Status.INFEASIBLE),
        }


def _gap(found: FreeResult) -> float | None:
    """Share of the plan's time by which it may be above the best; None where there is no plan or no bound."""
    if found.outcome is None or found.bound is None:
        return None
    return 1 - found.bound / found.outcome.cost


def random_step(layers: int, seed: int) -> H3tStep:
    """A step of unlike layers whose limit lies among the peaks of random sequences."""
    rng = np.random.default_rng([layers, seed])

    def number(least: int, most: int) -> int:
        return int(rng.integers(least, most))

    step = H3tStep(
        layers=tuple(
            H3tLayer(
                parameter_bytes=number(1, 90),
                shard_bytes=number(1, 40),
                hidden_bytes=number(1, 60),
                activation_bytes=number(1, 150),
                forward_bytes=number(0, 40),
                backward_bytes=number(0, 40),
                forward=number(1, 90),
                backward=number(1, 150),
                gather=number(1, 90),
                scatter=number(1, 90),
                hidden_copy=number(1, 90),
                shard_copy=number(1, 50),
                update=number(0, 90),
            )
            for _ in range(layers)
        ),
        borders=H3tBorders(fixed_bytes=number(0, 50), output_bytes=number(0, 60), loss=number(0, 80)),
        device_link=bool(seed % 2),
        memory_limit=0,
    )
    peaks = np.sort(simulate_sequences(step, rng.integers(0, 128, (50, layers)))[:, 1])
    return replace(step, memory_limit=int(peaks[10]))
