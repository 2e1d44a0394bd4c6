"""Small random instances of the papers' programs, and their optima by two ways from a Pyomo model to HiGHS."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.problems.h3t_steps import random_step
from support.problems.kiwi_graphs import greatest_peak, random_graph

from formulations.encodings.pyomo_program import write_program
from formulations.h3t.program import FreeProgram
from formulations.kiwi.worker import MODELS
from formulations.solvers.programs.branch_and_cut import solve_program


def kiwi(formulation: str) -> Callable[[int], Any]:
    def program(seed: int) -> Any:
        graph = random_graph(seed)
        return MODELS[formulation](graph, int(greatest_peak(graph) * (0.5 + seed % 5 / 10)))

    return program


def h3t(seed: int) -> Any:
    step = random_step(seed, most_layers=2)
    durations = step.durations()
    horizon = int(durations[durations > 0].sum()) + sum(layer.shard_copy for layer in step.layers)
    return FreeProgram(step, horizon)


PROGRAMS: dict[str, Callable[[int], Any]] = {**{name: kiwi(name) for name in MODELS}, "h3t": h3t}
"""By name, what makes a program of a seed."""


def optima(name: str, seeds: range) -> Iterator[tuple[int | None, int | None]]:
    """Optima by the exact rows and by the file that Pyomo writes; None where nothing is feasible."""
    for seed in seeds:
        made = PROGRAMS[name](seed)
        yield by_rows(made.program()), by_file(made.model)


def by_rows(program: Any) -> int | None:
    outcome = solve_program(program, time.monotonic() + 60.0, 0, lambda _: None, lambda _: None)
    assert outcome.infeasible or (outcome.finished and outcome.values is not None)
    if outcome.values is None:
        return None
    found = round(float(program.cost @ outcome.values))
    assert outcome.bound == found
    return found


def by_file(model: Any) -> int | None:
    import highspy

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.lp"
        write_program(model, path)
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("mip_rel_gap", 0.0)
        assert solver.readModel(str(path)) == highspy.HighsStatus.kOk
    solver.run()
    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return None
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return round(solver.getInfo().objective_function_value)


if __name__ == "__main__":
    print(json.dumps(list(optima(sys.argv[1], range(int(sys.argv[2]))))))
