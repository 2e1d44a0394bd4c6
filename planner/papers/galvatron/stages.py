"""Whole models of Table II as one stage on eight devices, by Algorithm 3 and by exact labels.

Algorithm 3 runs as printed, as published and repaired (with 32 MB of granularity); the exact labels begin with the best
of these. All have the same strategies and costs, so what Algorithm 3 loses here is due to its table and its search over
budgets alone. The micro-batch is the smallest whose activations fill the memory of all devices, so that some layers
have to be checkpointed. Costs are quanta of a micro-batch with synchronisation.
"""

from __future__ import annotations

import time
from functools import cache

from formulations.galvatron.dynamic_program import search_stage
from formulations.galvatron.labels import StageResult, solve_stage
from formulations.galvatron.slips import READINGS, Slip
from formulations.galvatron.stage import StageProblem
from planner.papers.galvatron.cases import GIGABYTE, GalvatronCase, paper_chain

__all__ = ["algorithm_3", "exact_labels", "the_stage"]

CLUSTER, DEVICES = "titan-rtx-8-pcie", 8

LABEL_LIMIT = 2_000_000
"""Labels of one layer; a model of unequal layers needs most, some gigabytes of memory."""


@cache
def the_stage(model: str, memory_gb: int) -> StageProblem:
    """All layers on all devices of the cluster, with all strategies, data and sharded data parallelism together too."""
    memory_limit = memory_gb * GIGABYTE
    micro_batch = DEVICES
    while paper_chain(model, CLUSTER).activation_bytes * micro_batch < DEVICES * memory_limit:
        micro_batch *= 2
    problem = GalvatronCase(CLUSTER, model, memory_gb, "galvatron_bmw").problem()
    return problem.tables(1, micro_batch).stage(0, problem.layers, 1, memory_limit)


def algorithm_3(slips: Slip, stage: StageProblem, time_limit: float) -> StageResult:
    """The plan of Algorithm 3; the time limit is not used, it takes milliseconds."""
    del time_limit
    found = search_stage(stage, slips=slips)
    if found is None or found.choices is None:
        return StageResult(None, None, 0)
    return StageResult(found.choices, found.cost, 0)


def exact_labels(stage: StageProblem, time_limit: float) -> StageResult:
    """The exact plan, by a search that begins with the best plan of Algorithm 3."""
    deadline = time.monotonic() + time_limit
    published = [algorithm_3(slips, stage, time_limit) for slips in READINGS.values()]
    fitting = [found.choices for found in published if found.choices is not None and stage.is_feasible(found.choices)]
    start = min(fitting, key=stage.cost_of, default=None)
    return solve_stage(stage, label_limit=LABEL_LIMIT, deadline=deadline, start=start)
