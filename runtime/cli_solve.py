"""The command ``solve``: a canonical problem from a file, a solution into a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.units import format_gap
from runtime.cli_progress import progress_line
from runtime.cli_values import readable_file, writable_file


def solve(
    problem: Annotated[Path, typer.Argument(help="Problem in the contest's JSON, plain or .gz.")],
    out: Annotated[Path, typer.Option(help="Solution as JSON.")],
    solver: Annotated[str, typer.Option(help="Name of the solver.")] = "lagrangian",
    time_limit: Annotated[float, typer.Option(help="Seconds.", min=0.1)] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
) -> None:
    """Solve a problem file and write status, objective, bound, gap and choices."""
    readable_file(problem, "PROBLEM")
    writable_file(out, "--out")

    from formulations.formats.contest import read_contest_problem, write_solution
    from formulations.solution import SolveOptions
    from formulations.solvers import solve as solve_problem

    with progress_line(f"reading {problem.name}") as report:
        loaded = read_contest_problem(problem)
        report.what, report.seconds_per_cost = f"solving {problem.name}", loaded.seconds_per_cost
        result = solve_problem(loaded, solver, SolveOptions(time_limit=time_limit, seed=seed), report)
    write_solution(out, result)
    typer.echo(
        f"{result.status}: objective {result.objective}, bound {result.bound}, gap {format_gap(result.gap)}, "
        f"{result.seconds:.1f} s by {result.solver}; wrote {out}"
    )
