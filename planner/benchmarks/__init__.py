"""Solvers side by side on the same problems: what ``meshwright bench`` runs and notebooks call.

>>> from planner.benchmarks import bench, contest_suite
>>> result = bench(contest_suite(["problems"]), ["portfolio", "my_solver"], time_limit=60)  # doctest: +SKIP
>>> result.save("rows.json")  # doctest: +SKIP

A solver is a name of ``formulations/solvers``, ``module:function``, or the name of an entry point of the group
``meshwright.solvers``, which a distribution of your own declares as::

    [project.entry-points."meshwright.solvers"]
    my_solver = "my_package.my_module:solve"

The function follows :class:`formulations.solvers.base.Solver`; it runs in a process of its own, and what it
claims is checked like everyone's.

The suites of the papers plan models, which takes torch: they are imported where they are asked for, since torch would
take longer to import than a problem of the contest to solve.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from planner.benchmarks.capture import capture_suite
    from planner.benchmarks.galvatron import galvatron_suite
    from planner.benchmarks.h3t import h3t_suite
    from planner.benchmarks.kiwi_mlp import kiwi_mlp_suite
    from planner.benchmarks.kiwi_transformer import kiwi_transformer_suite
    from planner.benchmarks.osdp import osdp_suite

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
    "capture_suite",
    "contest_suite",
    "galvatron_suite",
    "h3t_suite",
    "kiwi_mlp_suite",
    "kiwi_transformer_suite",
    "load_best_known",
    "osdp_suite",
    "random_suite",
]

_OF_PAPERS = frozenset(name for name in __all__ if name.endswith("_suite")) - {"contest_suite", "random_suite"}


def __getattr__(name: str) -> Any:
    if name not in _OF_PAPERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{name.removesuffix('_suite')}"), name)
