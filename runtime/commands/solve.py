"""The command ``solve``: a canonical problem from a file, a solution into a file."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from planner.common.units import format_gap
from runtime.commands.options import DEFAULT_SOLVER, JsonFile, Solver, Workers
from runtime.commands.tables.progress import progress_line
from runtime.commands.values import readable_file, writable_file, write_json

LEAST_SOLVING_SECONDS = 0.1
"""Time for the solver where reading took the whole limit; it is enough for small problems."""

MOST_EXPLAINING_SECONDS = 30.0
"""Time beyond the limit for explaining why nothing fits; at most the time limit itself."""


def solve(
    problem: Annotated[Path, typer.Argument(help="Problem in the contest's JSON, plain or .gz.")],
    out: Annotated[Path, typer.Option(help="Solution as JSON.")],
    solver: Solver = DEFAULT_SOLVER,
    time_limit: Annotated[float, typer.Option(help="Seconds, reading the file included.", min=0.1)] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    workers: Workers = None,
    json_file: JsonFile = None,
) -> None:
    """Solve a problem file and write status, objective, bound with its proof, gap and choices.

    Where nothing fits, a second line names a limit that would be enough, a lower bound on all limits, and the
    tensors alive at the peak.
    """
    started = time.monotonic()
    readable_file(problem, "PROBLEM")
    writable_file(out, "--out")

    from formulations.instances.contest import read_contest_problem, write_solution
    from formulations.problem.solution import SolveOptions, Status
    from formulations.solvers import explain_infeasible
    from formulations.solvers import solve as solve_problem

    why = ""
    with progress_line(f"reading {problem.name}") as report:
        loaded = read_contest_problem(problem)
        report.what, report.seconds_per_cost = f"solving {problem.name}", loaded.seconds_per_cost
        remaining = max(LEAST_SOLVING_SECONDS, time_limit - (time.monotonic() - started))
        options = SolveOptions(time_limit=remaining, seed=seed, workers=workers)
        result = solve_problem(loaded, solver, options, report)
        result = replace(result, seconds=time.monotonic() - started)
        if result.status in (Status.INFEASIBLE, Status.INFEASIBLE_UNCONFIRMED):
            report.begin(f"looking for limits that fit {problem.name}", named=True)
            report.seconds_per_cost = None  # what is reported is memory
            seconds = min(MOST_EXPLAINING_SECONDS, time_limit)
            why = explain_infeasible(loaded, SolveOptions(time_limit=seconds, seed=seed), progress=report)
    write_solution(out, result)
    proof = "" if result.proof is None or result.bound is None else f" ({result.proof})"
    claimed = "" if result.claimed is None else f"{result.claimed} claimed by {result.claimed_by}, "
    typer.echo(
        f"{result.status}: objective {result.objective}, bound {result.bound}{proof}, gap {format_gap(result.gap)}, "
        f"{claimed}"
        f"{result.seconds:.1f} s by {result.solver}; wrote {out}"
    )
    if why:
        typer.echo(why)
    elif result.choices is None and result.message:
        typer.echo(f"meshwright: {result.message}", err=True)
    figures = {
        "status": str(result.status),
        "objective": result.objective,
        "bound": result.bound,
        "proof": None if result.proof is None else str(result.proof),
        "gap": result.gap,
        "claimed": result.claimed,
        "claimed_by": result.claimed_by,
        "seconds": result.seconds,
        "solver": result.solver,
        "message": why or result.message,
        "out": str(out),
    }
    write_json(json_file, figures)
