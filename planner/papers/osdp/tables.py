"""OSDP's tables with every row: pure and hybrid strategies beside OSDP's own plans, and what cutting saves.

Data parallelism, FSDP and OSDP are planned by OSDP's own equations. Pipelines and tensor parallelism are in none of
them; they, and the same data-parallel rows again, are uniform strategies of :mod:`formulations.galvatron.uniform` with
communication that overlaps nothing, as in OSDP's model (a slowdown of two makes the sum). So within the rows named
``pipeline:`` all strategies have one evaluator: ``ddp``, ``fsdp``, ``tp``, ``gpipe``, the best ``3d`` of all degrees
(the paper tunes them), ``osdp`` (each operator replicated or sharded, uncut) and ``3d_osdp`` (the same inside the best
3D).
Memory there is the peak over operators without gathered parameters.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache, partial

from formulations.galvatron.costs import CostModel
from formulations.galvatron.joint import JointResult, solve_joint
from formulations.galvatron.pipeline import MicroBatchRule, PipelinePlan, PipelineProblem
from formulations.galvatron.strategies import Dimension
from formulations.galvatron.uniform import (
    UniformStrategy,
    baselines,
    solve_uniform,
    three_dimensions,
    uniform_problem,
    with_any_degree,
)
from formulations.layers.layer import LayerChain
from formulations.osdp.problem import (
    DP,
    SECONDS_PER_COST,
    Accounting,
    OsdpSettings,
    Slicing,
    operator_tables,
    step_bytes,
    step_cost,
)
from formulations.osdp.scheduler import Method, least_bytes, plan_osdp
from planner.graph.operator_graph import ITEM_BYTES
from planner.layers.presets.formulas import Boundary, FormulaDevice, layer_of, linear
from planner.layers.presets.paper_models import paper_layers
from planner.machine.cluster import load_cluster
from planner.papers.cells import Cell, Row, Table
from planner.papers.galvatron.adapter import device_links
from planner.papers.osdp.adapter import data_parallel_machine
from planner.papers.osdp.cases import CLUSTERS, FORMULATIONS, GIBIBYTE, LIMITS_GIB, MODELS, OsdpCase, exact_plan
from planner.papers.osdp.search_tables import (
    LOSSES_TIMED,
    OPINIONS_TIMED,
    loss_cells,
    opinion_cells,
    profile_rows,
    room_cells,
)

__all__ = ["TABLES", "pipeline_rows"]

NO_OVERLAP = 2.0
"""Slowdown of overlapped work with which computation and communication add up."""

SECONDS, GAP = 4.0, Fraction(1, 1000)
"""For all choices of one row, and relative gap of each."""

SEARCH_SECONDS, LONG_SECONDS = (2.0, 30.0), (300.0,)
"""For the paper's own search, which the paper reports to take 9 to 307 s: within the hour of all tables, and beyond."""

AMPLE_GIB = 2**20

SAMPLES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Samples a device of the rows named ``pipeline:``."""

_OWN = tuple(FORMULATIONS)
_BOTH = (Dimension.DATA, Dimension.SHARDED)


def blocks_of(model: str) -> int:
    """Transformer blocks of a model, which the paper counts as its layers."""
    return (len(paper_layers(model, load_cluster(CLUSTERS["titan"]), apart=True)) - 2) // 2


def own_rows(cluster: str, gibibytes: int, model: str) -> Iterator[Row]:
    """Data parallelism, FSDP and exact plans of every formulation, by OSDP's equations."""
    for formulation in _OWN:
        case = OsdpCase(model, cluster, gibibytes, formulation)
        for method in (Method.REPLICATED, Method.SHARDED, Method.KNAPSACK):
            started = time.perf_counter()
            plan = exact_plan(case) if method is Method.KNAPSACK else case.plan(method)
            modes = list(plan.modes.values())
            yield {
                "cluster": cluster,
                "memory_gib": gibibytes,
                "model": model,
                "strategy": f"{formulation}:{method}",
                "rate": None if plan.objective is None else case.samples_per_second(plan.objective),
                "status": str(plan.status),
                "batch": plan.batch,
                "replicated": sum(mode == DP for mode in modes),
                "cut": sum(mode.slices > 1 for mode in modes),
                "operators": len(modes),
                "seconds": time.perf_counter() - started,
            }


def pipeline_rows(cluster: str, gibibytes: int, model: str, seconds: float = SECONDS) -> Iterator[Row]:
    """Uniform strategies, OSDP uncut, and OSDP inside of 3D, by one evaluator."""
    spec, blocks = load_cluster(cluster), blocks_of(model)
    devices = spec.devices
    hybrids = list(_degrees(devices, blocks))
    rows: dict[str, list[UniformStrategy]] = {
        name: [uniform] for name, uniform in baselines(devices).items() if name != "3d" and uniform.stages <= blocks
    }
    rows["osdp"] = [three_dimensions(1, devices, 1, _BOTH)]
    rows["3d"] = [three_dimensions(*degrees, (Dimension.DATA,)) for degrees in hybrids]
    rows["3d_osdp"] = [three_dimensions(*degrees, _BOTH) for degrees in hybrids]
    for name in ("ddp", "fsdp", "tp", "gpipe", "1f1b", "osdp", "3d", "3d_osdp"):
        best = _best(cluster, gibibytes, model, rows.get(name, []), seconds)
        plan = None if best is None else best[2].plan
        yield {
            "cluster": cluster,
            "memory_gib": gibibytes,
            "model": model,
            "strategy": f"pipeline:{name}",
            "rate": None if best is None or plan is None else best[1].samples_per_second(plan),
            "batch": None if plan is None else plan.batch,
            "degrees": None
            if best is None
            else f"{best[0].stages} stages, {' or '.join(map(str, best[0].strategies))}",
            "applicable": name in rows,
        }


Found = tuple[UniformStrategy, PipelineProblem, JointResult]


def _best(cluster: str, gibibytes: int, model: str, tried: Sequence[UniformStrategy], seconds: float) -> Found | None:
    """The fastest of several: at first each strategy alone, then choices of two, the most promising ones first.

    Replicas are never slower than shards, so the first strategy alone, with ample memory, bounds a choice of both.
    """
    deadline = time.monotonic() + seconds
    best: Found | None = None
    choices: list[tuple[Fraction, UniformStrategy, PipelineProblem, PipelinePlan | None]] = []
    for uniform in tried:
        alone = [replace(uniform, strategies=(each,)) for each in uniform.strategies]
        starts: list[PipelinePlan] = []
        problem = _problem(cluster, gibibytes, model, uniform)
        for choice, each in enumerate(alone):
            single, found = _alone(cluster, gibibytes, model, each)
            best = _faster(best, (each, single, found))
            if found.plan is not None:
                starts.append(replace(found.plan, choices=(choice,) * single.layers))
        if len(alone) == 1:
            continue
        bound = _alone(cluster, AMPLE_GIB, model, alone[0])[1].quanta_per_sample
        if bound is not None:
            start = min(starts, key=lambda plan: Fraction(problem.evaluate(plan).cost, plan.batch), default=None)
            choices.append((bound, uniform, problem, start))
    for bound, uniform, problem, start in sorted(choices, key=lambda each: each[0]):
        left = deadline - time.monotonic()
        if left <= 0 or (best is not None and bound >= (best[2].quanta_per_sample or 0)):
            break
        best = _faster(best, (uniform, problem, solve_joint(problem, GAP, start, left)))
    return best


def _faster(best: Found | None, found: Found) -> Found | None:
    """The one with less time per sample; one without a plan is none."""
    ours, other = found[2].quanta_per_sample, None if best is None else best[2].quanta_per_sample
    return found if ours is not None and (other is None or ours < other) else best


def _degrees(devices: int, blocks: int) -> Iterator[tuple[int, int, int]]:
    """Stages, data, tensor: at least two of them above one."""
    powers = [2**k for k in range(devices.bit_length()) if devices % 2**k == 0]
    for stages in powers:
        for tensor in powers:
            data, rest = divmod(devices, stages * tensor)
            if not rest and data and stages <= blocks and sum(each > 1 for each in (stages, data, tensor)) > 1:
                yield stages, data, tensor


@lru_cache(maxsize=256)
def _alone(cluster: str, gibibytes: int, model: str, uniform: UniformStrategy) -> tuple[PipelineProblem, JointResult]:
    """The problem of one strategy and its solution."""
    problem = _problem(cluster, gibibytes, model, uniform)
    return problem, solve_uniform(problem)


def _problem(cluster: str, gibibytes: int, model: str, uniform: UniformStrategy) -> PipelineProblem:
    spec, chain = load_cluster(cluster), _chain(cluster, model)
    limit = gibibytes * GIBIBYTE - spec.device.reserve_bytes
    batches = [spec.devices * samples for samples in SAMPLES]
    costs = CostModel(device_links(spec), overlap_slowdown=NO_OVERLAP)
    return uniform_problem(chain, limit, batches, costs, uniform, MicroBatchRule.TWICE_THE_STAGES)


@lru_cache(maxsize=8)
def _chain(cluster: str, model: str) -> LayerChain:
    spec = load_cluster(cluster)
    return with_any_degree(paper_layers(model, spec, apart=True), spec.devices)


def _figure(part: str) -> Iterator[Cell]:
    for gibibytes in LIMITS_GIB:
        for model in MODELS:
            label = f"{CLUSTERS[part]}, {gibibytes} GiB, {model}"
            yield Cell(label, partial(_cell, CLUSTERS[part], gibibytes, model))


def _cell(cluster: str, gibibytes: int, model: str) -> Iterator[Row]:
    yield from own_rows(cluster, gibibytes, model)
    yield from pipeline_rows(cluster, gibibytes, model)


GRANULARITIES = (0, 2, 4, 8, 16)
HIDDEN_SIZES = (768, 1024, 8192, 12288)
TOKENS = 96
"""Of a sample, as in :mod:`planner.layers.presets.paper_models`."""


def _slices(hidden: int) -> Iterator[Row]:
    """Memory and time of one sharded product from a hidden size to four times it, uncut and cut, one sample."""
    spec = load_cluster(CLUSTERS["titan"])
    machine = data_parallel_machine(spec, spec.devices, spec.device.memory_bytes)
    states = TOKENS * hidden * ITEM_BYTES["float32"]
    work = linear(TOKENS, hidden, 4 * hidden, ITEM_BYTES["float32"])
    module = layer_of("product", "product", [work], Boundary(states, 4 * states), FormulaDevice(spec, "float32"))
    chain = LayerChain(f"product of {hidden}", (module,), "float32", ())
    for granularity in GRANULARITIES:
        cut = max(1, granularity)
        tables = operator_tables(chain, machine, OsdpSettings(slices=(1, cut), accounting=Accounting.PEAK))
        choice = [tables[0].modes.index(Slicing(cut, cut))]
        yield {
            "hidden": hidden,
            "granularity": granularity,
            "bytes": step_bytes(tables, choice, 1, Accounting.PEAK),
            "seconds": step_cost(tables, choice, 1) * SECONDS_PER_COST,
        }


def _size(model: str) -> Iterator[Row]:
    case = OsdpCase(model, CLUSTERS["titan"], max(LIMITS_GIB), "osdp")
    chain = case.chain()
    yield {
        "model": model,
        "family": case.family,
        "layers": blocks_of(model),
        "operators": len(chain),
        "params_b": chain.parameter_bytes / 4e9,
        "least_gb": least_bytes(chain, case.machine(), case.settings) / 1e9,
    }


def _search(model: str, seconds: float) -> Iterator[Row]:
    """The paper's search for some seconds, beside the exact one."""
    case = OsdpCase(model, CLUSTERS["titan"], min(LIMITS_GIB), "osdp")
    found, exact = case.plan(Method.DFS, seconds), exact_plan(case)
    lost = None
    if found.objective is not None and exact.objective is not None:
        lost = found.objective / exact.objective - 1
    yield {
        "model": model,
        "limit_seconds": seconds,
        "seconds": found.seconds,
        "proven": found.gap == 0,
        "lost": lost,
        "exact_seconds": exact.seconds,
    }


def _search_limits(limits: Sequence[float]) -> Iterator[Cell]:
    """The paper's search of every model with these seconds.

    Its cuts look at the operators that have a mode alone, so what more time brings is chance: it depends on the order
    of the modes.
    """
    for model in MODELS:
        for seconds in limits:
            yield Cell(f"{model}, {seconds:g} s", partial(_search, model, seconds))


def _modes() -> Iterator[Row]:
    """How many operators of one plan have each mode, with two gathered tensors counted."""
    case = OsdpCase("N&D-48x1536", CLUSTERS["titan"], 16, "osdp_peak")
    plan = plan_osdp(case.chain(), case.machine(), replace(case.settings, gathered_tensors=2))
    for mode, count in Counter(map(str, plan.modes.values())).most_common():
        yield {"case": case.name, "mode": mode, "operators": count}


_TIMED = frozenset({"seconds", "exact_seconds", "proven", "lost"})

TABLES: Mapping[str, Table] = {
    "table_1": Table(lambda: [Cell(model, partial(_size, model)) for model in MODELS]),
    "figure_5": Table(partial(_figure, "titan"), frozenset({"seconds"})),
    "figure_6": Table(partial(_figure, "a100"), frozenset({"seconds"})),
    "figure_7": Table(lambda: [Cell(f"hidden size {hidden}", partial(_slices, hidden)) for hidden in HIDDEN_SIZES]),
    "search_limits": Table(partial(_search_limits, SEARCH_SECONDS), _TIMED, named_only=True),
    "search_limits_long": Table(partial(_search_limits, LONG_SECONDS), _TIMED, named_only=True),
    "losses": Table(loss_cells, LOSSES_TIMED, named_only=True),
    "room": Table(room_cells),
    "profile": Table(lambda: [Cell("all", profile_rows)]),
    "modes": Table(lambda: [Cell("plan", _modes)]),
    "second_opinion": Table(opinion_cells, OPINIONS_TIMED, named_only=True),
}
"""Tables by name; Figures 8 and 9 are rows of ``figure_5``."""
