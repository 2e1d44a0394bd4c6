"""The cells of a sweep, and their digests: what a row depends on."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

from formulations.solvers import UnknownSolverError, find_solver
from planner.explore.errors import ExploreError
from planner.layers.planning import LAYER_FORMULATIONS
from planner.machine.cluster import ClusterSpec, load_cluster
from planner.models.references import ModelReference
from planner.session.formulations import FORMULATIONS
from planner.session.request import PlanRequest
from planner.torch_adapter.rules.cache import code_digest

_OF_OPERATORS = ("workers", "gap", "host_memory", "overlap")
"""Parts of a request that plans of layers do not use, beside the solver."""

OWN_SEARCH = "its own"
"""Solver of a row of a plan of layers."""


@dataclass(frozen=True)
class Cell:
    """One plan of a sweep.

    Parameters
    ----------
    reference, cluster, mesh, optimizer
        As for :class:`planner.session.planning.PlanningSession`.
    request
        Limit, formulation and solver.
    """

    reference: ModelReference
    cluster: ClusterSpec
    mesh: tuple[int, ...]
    optimizer: str | None
    request: PlanRequest

    @property
    def step(self) -> tuple[ModelReference, str, tuple[int, ...], str | None, PlanRequest]:
        """What cells share that are planned from what is known of each other: all but memory and formulation.

        Solvers, their times, gaps and seeds are compared, so no search begins from what one with others found.
        """
        searched = replace(self.request, memory=None, formulation=PlanRequest().formulation)
        return self.reference, self.cluster.fingerprint(), self.mesh, self.optimizer, searched

    @property
    def of_layers(self) -> bool:
        """Whether its plan is one of layers."""
        return self.request.formulation in LAYER_FORMULATIONS

    def digest(self) -> str:
        """SHA-256 of what its row depends on.

        That is: model, cluster, request, files of the model and of a solver that is not built in, code of sharding
        rules, versions of packages.
        """
        content = {
            "reference": asdict(self.reference),
            "model": _model_digest(self.reference.source),
            "solver": "" if self.of_layers else _solver_digest(self.request.solver),
            "cluster": self.cluster.fingerprint(),
            "mesh": self.mesh,
            "optimizer": self.optimizer,
            "request": asdict(self.request),
            "rules": code_digest(),
            "packages": {name: _version(name) for name in ("meshwright", "torch", "transformers")},
        }
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Grid:
    """All combinations of some values, in the order in which steps are shared longest.

    Parameters
    ----------
    reference, cluster, optimizer
        As for a plan; the batch is replaced by those of the grid.
    meshes, memories, batches, formulations, solvers
        Values; a memory of None is all of the device, no batches are that of the reference.
    request
        Time limit, seed, workers, gap and host memory of every plan.
    """

    reference: ModelReference
    cluster: ClusterSpec | str
    meshes: Sequence[tuple[int, ...]]
    memories: Sequence[int | None] = (None,)
    batches: Sequence[int] = ()
    formulations: Sequence[str] = ("kiwi_chain",)
    solvers: Sequence[str] = ("portfolio",)
    optimizer: str | None = None
    request: PlanRequest = field(default_factory=PlanRequest)

    def __post_init__(self) -> None:
        for name in ("meshes", "memories", "formulations", "solvers"):
            if not getattr(self, name):
                raise ExploreError(f"{name}: give at least one")
        known = (*FORMULATIONS, *LAYER_FORMULATIONS)
        unknown = [name for name in self.formulations if name not in known]
        if unknown:
            raise ExploreError(f"formulation {unknown[0]!r} is not known; a sweep takes {', '.join(known)}")

        unused = self.unused()
        if unused and all(name in LAYER_FORMULATIONS for name in self.formulations):
            planned = ", ".join(self.formulations)
            raise ExploreError(
                f"{unused[0]}: {planned} plan layers by searches of their own; leave it out, or sweep a formulation of "
                "operators too"
            )

    def unused(self) -> tuple[str, ...]:
        """Options that are not at their defaults and that formulations of layers do not use, if there are such."""
        if not any(name in LAYER_FORMULATIONS for name in self.formulations):
            return ()
        plain, asked = PlanRequest(), self.request
        given = [name for name in _OF_OPERATORS if getattr(asked, name) != getattr(plain, name)]
        return ("solver", *given) if set(self.solvers) != {plain.solver} else tuple(given)

    def notes(self) -> tuple[str, ...]:
        """What some formulations of the grid leave unused."""
        planned = ", ".join(name for name in self.formulations if name in LAYER_FORMULATIONS)
        return tuple(f"{name}: not used by the plans of layers ({planned})" for name in self.unused())

    def __iter__(self) -> Iterator[Cell]:
        cluster = load_cluster(self.cluster) if isinstance(self.cluster, str) else self.cluster
        # From more memory to less: bounds for more hold for less, and the best plan without a limit is found once.
        memories = sorted(set(self.memories), key=lambda memory: (memory is not None, -(memory or 0)))
        for batch, mesh in product(self.batches or (self.reference.batch,), self.meshes):
            reference = replace(self.reference, batch=batch)
            for solver, formulation, memory in product(self.solvers, self.formulations, memories):
                if formulation in LAYER_FORMULATIONS and solver != self.solvers[0]:
                    continue  # it has a search of its own, which is no other under another solver's name
                request = replace(self.request, memory=memory, formulation=formulation, solver=solver)
                yield Cell(reference, cluster, tuple(mesh), self.optimizer, request)


def _model_digest(source: str) -> str:
    """Digest of the file that defines a model where it is one: a configuration, or a module of functions."""
    prefix, _, name = source.partition(":")
    return _file_digest(Path(name) if prefix == "hf" else _module_file(prefix))


def _solver_digest(name: str) -> str:
    """Digest of the executable or of the module that a solver is, or that its part is; empty for built-in ones."""
    try:
        solver = find_solver(name)
    except UnknownSolverError:  # it may be known on the machines where cells are planned
        return ""
    if "part_solver" in solver.keywords:
        return _solver_digest(solver.keywords["part_solver"])
    if "path" in solver.keywords:
        return _file_digest(Path(solver.keywords["path"]))
    return "" if solver.is_built_in else _file_digest(_module_file(solver.target.partition(":")[0]))


def _module_file(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def _file_digest(file: Path | None) -> str:
    """SHA-256 of a file; empty where there is none."""
    return "" if file is None or not file.is_file() else sha256(file.read_bytes()).hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def row_of_cell(cell: Cell) -> dict[str, Any]:
    """The columns of a row that say which cell it is."""
    return {
        "batch": cell.reference.batch,
        "mesh": "x".join(map(str, cell.mesh)),
        "memory_bytes": cell.request.memory,
        "formulation": cell.request.formulation,
        "solver": OWN_SEARCH if cell.of_layers else cell.request.solver,
    }
