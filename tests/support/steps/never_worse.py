"""Random planning cases: every formulation solved, executed and replayed, and none worse than what it contains.

A formulation begins from the plans of all that it contains. So it is worse than one of them only where its problem
leaves that plan out, or has another cost or other bytes for it: a defect, however short the time was.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from support.steps.models import SMALL_CONFIGURATIONS

from formulations.problem.checker import check
from formulations.problem.files import write_text_atomically
from formulations.problem.solution import SolveOptions
from formulations.solvers import SolverPool
from formulations.solvers.peaks.minimum_peak import minimum_peak
from formulations.step.sharding import MEMORY
from formulations.step.training_step import StepDecision
from planner.common.infeasibility import InfeasibleError
from planner.models.references import ModelReference
from planner.session import PlanningSession, PlanRequest

NETWORKS = (*SMALL_CONFIGURATIONS, "conv_net")
MESHES = ((2,), (4,), (2, 2), (1, 2))
CLUSTERS = ("a100-8-nvlink", "titan-rtx-8-pcie", "v100-2x4-gcp", "a100-4x4-infiniband")
LAYERS_KEY = {"gpt2": "n_layer", "t5": "num_layers"}

RULES = ("checkpoint_dots", "megatron_selective", "full_checkpoint", "checkmate", "alpa_then_checkmate")
CONTAINS = (
    ("kiwi_reduced", "sharding"),
    ("kiwi_chain", "kiwi_reduced"),
    *(("kiwi_chain", rule) for rule in RULES),
    ("kiwi_offload", "kiwi_chain"),
)
"""The space of the first contains that of the second."""

FREE_SECONDS = 20.0
"""For layouts without a limit: the search ends long before, with a proof."""

NARROW_FIRST = ("sharding", *RULES, "kiwi_reduced", "kiwi_chain", "kiwi_offload")
"""All formulations, each behind those that it contains."""


@dataclass(frozen=True, slots=True)
class Case:
    """One planning case.

    Parameters
    ----------
    network, layers, batch, sequence
        The step; a conv net has no layers.
    cluster, mesh
        Where it runs.
    room
        The limit, as a share of the way from the smallest peak of ``kiwi_chain`` to the peak without a limit.
    """

    network: str
    layers: int
    batch: int
    sequence: int
    cluster: str
    mesh: tuple[int, ...]
    room: float


@dataclass(frozen=True, slots=True)
class Found:
    """What a formulation found.

    Parameters
    ----------
    cost, bound
        Cost of its executed and replayed plan (None: no plan), and its bound.
    decision
        The plan.
    proved_impossible
        Whether it is proved that no plan fits.
    """

    cost: int | None
    bound: int | None
    decision: StepDecision | None = None
    proved_impossible: bool = False


def random_case(seed: int) -> Case:
    """Draw a small case."""
    rng = random.Random(seed)
    network = rng.choice(NETWORKS)
    return Case(
        network,
        layers=rng.randint(1, 2),
        batch=rng.choice([4, 8, 32]),
        sequence=rng.choice([16, 64, 256]),
        cluster=rng.choice(CLUSTERS),
        mesh=rng.choice(MESHES),
        room=max(0.0, rng.uniform(-0.1, 1.0)),
    )


def reference(case: Case) -> ModelReference:
    """The step of a case; tables need shapes only, so widths may be anything."""
    if case.network == "conv_net":
        return ModelReference("support.steps.models:conv_net", batch=case.batch)
    small = {**SMALL_CONFIGURATIONS[case.network], LAYERS_KEY.get(case.network, "num_hidden_layers"): case.layers}
    content = json.dumps({"model_type": case.network, **small, **_positions(case)})
    folder = Path(tempfile.gettempdir()) / f"meshwright-tests-{os.getuid()}" / "never-worse"
    path = folder / f"{case.network}-{case.layers}-{case.sequence}" / "config.json"
    if not path.exists():
        write_text_atomically(path, content)
    return ModelReference(f"hf:{path}", batch=case.batch, sequence=case.sequence, dtype="float32", seed=0, dropout=0.0)


def _positions(case: Case) -> dict[str, int]:
    key = {"gpt2": "n_positions", "llama": "max_position_embeddings", "bert": "max_position_embeddings"}
    return {key[case.network]: case.sequence} if case.network in key else {}


@lru_cache(maxsize=2)
def session_of_case(reference: ModelReference, cluster: str, mesh: tuple[int, ...]) -> PlanningSession:
    """Traced step and strategies; cases of one step share them."""
    return PlanningSession(reference, cluster, mesh)


def solve_all(
    case: Case, seconds: float, pool: SolverPool, formulations: tuple[str, ...] = NARROW_FIRST
) -> dict[str, Found]:
    """Solve every formulation of a case within the case's limit, each from the plans of those that it contains.

    Returns
    -------
    dict
        What was found, by formulation. Formulations that the mesh does not allow are left out.
    """
    session = session_of_case(reference(case), case.cluster, case.mesh)
    memory = limit_of(session, case.room, seconds, pool)
    requests = [PlanRequest(memory, name, time_limit=seconds, workers=1) for name in formulations]
    return solve_each(session, requests, pool)


def solve_each(
    session: PlanningSession, requests: list[PlanRequest], pool: SolverPool, from_contained: bool = True
) -> dict[str, Found]:
    """Solve requests of several formulations, narrow ones first.

    Parameters
    ----------
    session, requests, pool
        What is planned, by each formulation at most once.
    from_contained
        Whether each begins from the plans of those that it contains; else all are independent.

    Returns
    -------
    dict
        What was found, by formulation. Formulations that the mesh does not allow are left out.
    """
    found: dict[str, Found] = {}
    for request in requests:
        name = request.formulation
        contained = [found[narrow] for wide, narrow in CONTAINS if wide == name and narrow in found and from_contained]
        known = [each for each in contained if each.decision is not None]
        try:
            assert_contained(session, request, known, pool)
            found[name] = replayed(session, request, [each.decision for each in known], pool)
        except InfeasibleError as refused:
            found[name] = Found(None, None, proved_impossible="is too little: every plan" in str(refused))
        except ValueError as refused:
            if "allows no layouts to start from" not in str(refused):
                raise
    return found


def assert_contained(session: PlanningSession, request: PlanRequest, known: list[Found], pool: SolverPool) -> None:
    """Assert that plans are solutions of a request's problem, at the same costs."""
    if not known:
        return
    built = session.problem(request, pool)
    for each in known:
        report = check(built.problem, built.encoded(each.decision), each.cost)
        assert report.ok, (request, report.violations)


def limit_of(session: PlanningSession, room: float, seconds: float, pool: SolverPool) -> int:
    """Bytes of a device between the smallest peak found for ``kiwi_chain`` and the peak without a limit.

    Where the search finds nothing in its time, the peak without a limit is the smallest that is known.
    """
    free = session.solve(PlanRequest(None, "sharding", time_limit=FREE_SECONDS, workers=1), pool=pool)
    largest = session.execute(free.decision).peak
    problem = session.problem(PlanRequest(None, "kiwi_chain", workers=1), pool)
    safe = problem.overestimate().problem if problem.overestimate is not None else problem.problem
    smallest = minimum_peak(safe, MEMORY, SolveOptions(time_limit=2 * seconds, workers=1), pool).peak
    smallest = largest if smallest is None else min(smallest, largest)
    return session.costs.device.reserve_bytes + smallest + int(room * (largest - smallest))


def replayed(session: PlanningSession, request: PlanRequest, known: list[StepDecision], pool: SolverPool) -> Found:
    """Solve a request; the schedule of its decision must replay cleanly, at its cost and within the limit."""
    solved = session.solve(request, pool=pool, known=known)
    budget = session.budget(request.memory)
    report = session.replay(session.schedule(solved.decision, budget.tensor_bytes), budget.tensor_bytes)
    assert report.violations == (), (request, report.violations)
    assert report.total_quanta == solved.result.objective, request
    return Found(solved.result.objective, solved.result.bound, solved.decision)


def violations(found: dict[str, Found]) -> list[str]:
    """Where a formulation is worse than one that it contains, or claims a bound that is none."""
    wrong = []
    for wide, narrow in CONTAINS:
        if wide not in found or narrow not in found or found[narrow].cost is None:
            continue
        ours, theirs = found[wide], found[narrow]
        if ours.cost is None or ours.cost > theirs.cost:
            wrong.append(f"{wide} costs {ours.cost}, {narrow} {theirs.cost}")
        if ours.proved_impossible:
            wrong.append(f"{wide} is proved impossible, {narrow} has a plan")
        if ours.bound is not None and ours.bound > theirs.cost:
            wrong.append(f"bound {ours.bound} of {wide} is above the plan {theirs.cost} of {narrow}")
    return wrong
