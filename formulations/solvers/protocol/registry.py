"""Names of solvers and where their functions live; nothing is imported until a solver is run."""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, cast

from formulations.solvers.protocol.solver import Solver

ENTRY_POINT_GROUP = "meshwright.solvers"
DEFAULT_SOLVER = "portfolio"

SOLVERS: dict[str, str] = {
    "blocks": "formulations.solvers.columns.generation:solve",
    "branch_and_bound": "formulations.solvers.branching.branch_and_bound:solve",
    "brute_force": "formulations.solvers.exact.brute_force:solve",
    "bucket_bound": "formulations.solvers.prices.bucket_bound:solve",
    "cpsat": "formulations.solvers.exact.cpsat:solve",
    "greedy": "formulations.solvers.reference.greedy:solve",
    "guessed_cores": "formulations.solvers.huge_tables.guessed_cores:solve",
    "highs": "formulations.solvers.exact.highs:solve",
    "hub_branching": "formulations.solvers.huge_tables.hub_branching:solve",
    "lagrangian": "formulations.solvers.prices.lagrangian:solve",
    "large_neighbourhood": "formulations.solvers.improvement.large_neighbourhood:solve",
    "peak_prices": "formulations.solvers.peaks.prices:solve",
    "portfolio": "formulations.solvers.running.portfolio:solve",
    "price_and_branch": "formulations.solvers.huge_tables.price_and_branch:solve",
    "price_bounding": "formulations.solvers.prices.bounding:solve",
    "pyomo": "formulations.solvers.reference.pyomo_mirror:solve",
    "tree_dp": "formulations.solvers.reference.tree_dp:solve",
}
"""Built-in solvers, name -> ``module:function``."""

EXACT_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "brute_force": "enumeration",
        "cpsat": "constraint programming",
        "highs": "branch and cut",
        "peak_prices": "memory prices",
        "pyomo": "branch and cut",
        "tree_dp": "dynamic programming",
    }
)
"""Solvers whose word counts when nothing seems feasible, by the kind of their method."""

_BRANCH_AND_CUT = "branch and cut"

_CLAIMANTS: Mapping[str, str] = MappingProxyType({"blocks": _BRANCH_AND_CUT, "large_neighbourhood": _BRANCH_AND_CUT})
"""Kind of solver behind what other built-in solvers claim without proof."""

_METHODS: Mapping[str, str] = MappingProxyType(
    {
        "blocks": "prices",
        "branch_and_bound": "linear program",
        "brute_force": "enumeration",
        "bucket_bound": "dynamic programming",
        "cpsat": "constraint programming",
        "guessed_cores": "prices",
        "highs": "linear program",
        "hub_branching": "prices",
        "lagrangian": "prices",
        "price_and_branch": "prices",
        "price_bounding": "prices",
        "tree_dp": "dynamic programming",
    }
)
"""What the exact bounds of built-in solvers are evaluations of."""

_SOLVER_ARGUMENTS = ("problem", "options", "report", "incumbent")

LIBRARIES: Mapping[str, str] = MappingProxyType(
    {
        "blocks": "highspy",
        "branch_and_bound": "highspy",
        "cpsat": "ortools",
        "guessed_cores": "highspy",
        "highs": "highspy",
        "price_and_branch": "highspy",
        "pyomo": "pyomo",
    }
)
"""Built-in solvers that load a library which excludes others from its process."""

EXECUTABLE = "exe"
_EXECUTABLE_TARGET = "formulations.solvers.reference.executable:solve"

_COORDINATORS = frozenset({"portfolio"})


class UnknownSolverError(ValueError):
    """A solver name that is neither built in, nor an entry point, nor ``module:function``."""


@dataclass(frozen=True, slots=True)
class SolverSpec:
    """A solver by name, the function behind it and keywords that the name adds.

    ``exe:PATH`` is an executable with the keyword ``path=PATH``, ``pyomo:NAME`` is the solver ``pyomo`` with
    ``solver_name=NAME``, and ``large_neighbourhood:NAME`` has ``part_solver=NAME``.
    """

    name: str
    target: str
    keywords: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str | None:
        """Kind of method if the solver is exact, else None."""
        return EXACT_KINDS.get(self.name.partition(":")[0])

    @property
    def is_built_in(self) -> bool:
        """Whether it is a solver of this package, whose exact bounds are exact; others only claim."""
        return self.target in SOLVERS.values()

    @property
    def claimant(self) -> str:
        """Kind of solver behind its claims; what is not built in is a kind of its own."""
        head, _, tail = self.name.partition(":")
        if not self.is_built_in:
            return self.name if self.target == _EXECUTABLE_TARGET else self.target
        if head == "large_neighbourhood" and tail:
            return find_solver(tail).claimant
        if head == "pyomo" and tail and "highs" not in tail:
            return self.name
        return self.kind or _CLAIMANTS.get(head, head)

    @property
    def library(self) -> str | None:
        """Library that must not be loaded beside others (HiGHS and CP-SAT exclude each other), or None.

        What a solver that is not built in loads is not known: its own place stands for it.
        """
        if self.target == SOLVERS["large_neighbourhood"]:
            return find_solver(str(self.keywords.get("part_solver", "highs"))).library
        head = self.name.partition(":")[0]
        return LIBRARIES.get(head) if self.is_built_in else self.target

    @property
    def needs_own_process(self) -> bool:
        """Whether it is built in and loads a library that excludes others."""
        return self.library in LIBRARIES.values()

    @property
    def is_coordinator(self) -> bool:
        """Whether it runs other solvers, from the caller's process."""
        return self.name in _COORDINATORS

    def load(self) -> Solver:
        """Import the function; call only in the process that will run it.

        Raises
        ------
        UnknownSolverError
            There is no such function, or it cannot be called as a solver.
        """
        module, _, function = self.target.partition(":")
        try:
            found = getattr(importlib.import_module(module), function)
            inspect.signature(found).bind(*_SOLVER_ARGUMENTS, **self.keywords)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise UnknownSolverError(
                f"{self.name!r} is no solver: {self.target} must be a function of "
                f"{', '.join(_SOLVER_ARGUMENTS)} ({error})"
            ) from error
        return cast(Solver, partial(found, **self.keywords) if self.keywords else found)


def method_of(solver: str) -> str:
    """Return what the exact bounds of a solver are evaluations of; its own name where that is not known."""
    return _METHODS.get(solver, solver)


def find_solver(name: str) -> SolverSpec:
    """Resolve a solver name without importing its module.

    Parameters
    ----------
    name
        A key of :data:`SOLVERS`, ``exe:PATH`` for an executable that follows the contest's protocol, ``pyomo:NAME``
        for any solver that Pyomo knows, ``large_neighbourhood:NAME``
        for any solver of its parts, the name of an entry point of the group ``meshwright.solvers``, or
        ``module:function``.

    Raises
    ------
    UnknownSolverError
        With the names that exist.
    """
    if name in SOLVERS:
        return SolverSpec(name, SOLVERS[name])
    head, colon, tail = name.partition(":")
    if head == "pyomo" and tail:
        return SolverSpec(name, SOLVERS["pyomo"], {"solver_name": tail})
    if head == "large_neighbourhood" and tail:
        return SolverSpec(name, SOLVERS[head], {"part_solver": find_solver(tail).name})
    if head == EXECUTABLE and colon:
        return SolverSpec(name, _EXECUTABLE_TARGET, {"path": _executable(name, tail)})
    plugins = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name in plugins:
        return SolverSpec(name, plugins[name])
    if colon and all(part.isidentifier() for part in (*head.split("."), tail)):
        return SolverSpec(name, name)
    known = ", ".join(sorted({*SOLVERS, *plugins}))
    raise UnknownSolverError(
        f"unknown solver {name!r}; known are {known}, pyomo:NAME for a solver of Pyomo, exe:PATH, or module:function"
    )


def _executable(name: str, path: str) -> str:
    """Return the absolute path of an executable, given by path or as a command."""
    found = shutil.which(path)
    if found is not None:
        return os.path.abspath(found)
    if not os.path.isfile(path):
        raise UnknownSolverError(f"solver {name}: there is no file or command {path!r}")
    raise UnknownSolverError(f"solver {name}: {path!r} may not be executed; run chmod +x {path}")
