"""Solvers side by side on the same problems: what ``meshwright bench`` runs and notebooks call.

>>> from planner.benchmarks import bench, contest_suite
>>> result = bench(contest_suite(["problems"]), ["portfolio", "my_solver"], time_limit=60)  # doctest: +SKIP
>>> result.save("rows.json")  # doctest: +SKIP

A solver is a name of ``formulations/solvers``, ``module:function``, or the name of an entry point of the group
``meshwright.solvers``, which a distribution of your own declares as::

    [project.entry-points."meshwright.solvers"]
    my_solver = "my_package.my_module:solve"

The function follows :class:`formulations.solvers.protocol.solver.Solver`; it runs in a process of its own, and its
claims are checked like those of every other solver.

The suites of the papers are in :mod:`planner.papers`.
"""

from planner.benchmarks.results import BenchResult
from planner.benchmarks.rows import BenchRow
from planner.benchmarks.runner import BenchError, Observer, bench
from planner.benchmarks.suites import (
    DEFAULT_SIZES,
    DEFAULT_SOLVERS,
    BenchInstance,
    Suite,
    SuiteError,
    contest_suite,
    load_best_known,
    random_suite,
)

__all__ = [
    "DEFAULT_SIZES",
    "DEFAULT_SOLVERS",
    "BenchError",
    "BenchInstance",
    "BenchResult",
    "BenchRow",
    "Observer",
    "Suite",
    "SuiteError",
    "bench",
    "contest_suite",
    "load_best_known",
    "random_suite",
]
