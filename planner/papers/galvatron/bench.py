"""The suite ``galvatron``: Galvatron-BMW's tables as published, repaired and exact, beside the paper's figures.

============  =====================================================================================
``small``     BERT-Huge-32 on 8 TITAN with 8 GB, all variants: the default
``joint``     BMW with any number of micro-batches: BERT-Huge-48 on 8 and on 16 TITAN, batches to 256
``stages``    one stage of 48 layers on eight devices, with any solver of canonical problems beside
``table-2``   eight models on 8 TITAN, four limits, all variants
``table-3``   six models on two clusters of 16 devices, two limits, all variants
``table-4``   partitions: 1F1B with bi-objective adjustment on 16 A100, and balanced ones
``table-5``   two models of 128 layers on 64 A100, two limits, BMW: minutes for a search
``figure-6``  time of the searches: BERT of 8 to 128 layers on 8 TITAN, and BERT-Huge-48 on 8, 16 and 64 A100
============  =====================================================================================

``stages`` is described in :mod:`planner.papers.galvatron.stages`. Every other instance has four solvers, all on the
paper's problem: without the strategies that Takeaway 3 drops, and but for ``joint`` with one number of micro-batches.
``as_printed`` runs the variant's own search with every slip kept (:mod:`formulations.galvatron.slips`),
``as_published`` without the two that the paper's text contradicts, ``repaired`` with none. Repaired costs judge
every plan; one that then breaks the memory limit counts as none. ``exact`` decides stages, partition, strategies,
batch and micro-batches at once, to a proven gap of 0.1 % (1 % on 64 devices) or for its time, beginning with the
plans of the others. The loss of a published plan is its extra time over the exact one, in the message of
``exact``. Objective and bound are tenths of a nanosecond per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

from formulations.galvatron.joint import solve_joint
from formulations.galvatron.pipeline import MicroBatchRule, PipelinePlan, PipelineProblem, PlanCost
from formulations.galvatron.published_search import Balance
from formulations.galvatron.slips import AS_PRINTED, AS_PUBLISHED, REPAIRED, Slip
from formulations.problem.solution import Progress, Proof, SolveOptions, SolveResult, Status, relative_gap
from formulations.solvers import DEFAULT_SOLVER, SolverPool
from formulations.solvers.running.ledger import SolverContradiction
from planner.benchmarks.metering import Meter
from planner.benchmarks.suites import BenchInstance, OwnSolver, ReportProgress, Suite, check_names
from planner.papers.galvatron import paper_tables as paper
from planner.papers.galvatron.cases import BATCHES, GIGABYTE, GalvatronCase
from planner.papers.galvatron.stages import stage_instances
from planner.papers.galvatron.summary import EXACT_GAP, UNITS_PER_SECOND, summary

SOLVERS = ("as_printed", "as_published", "repaired", "exact")
SECONDS = 60.0
"""Time limit of one solve."""

_LARGE_GAP = Fraction(1, 100)
_LARGE_BATCHES = (64, 128, 256, 512, 1024, 1536)
_LARGEST_JOINT_BATCH = 256
_FIGURE_6_VARIANTS = ("galvatron_dp_tp", "galvatron_dp_pp", "galvatron", "galvatron_bmw")
_FIGURE_6_BLOCKS = (8, 16, 32, 64, 128)


_NOT_PRINTED = paper.in_words(None)


class GalvatronCell:
    """One case and the plans that its solvers have found.

    Parameters
    ----------
    case
        What is solved, without the strategies that Takeaway 3 drops.
    printed
        Text of the paper's figures for this case.
    gap
        Relative gap at which the exact search ends.
    """

    def __init__(self, case: GalvatronCase, printed: str = _NOT_PRINTED, gap: Fraction = EXACT_GAP) -> None:
        self.case, self.printed, self.gap = replace(case, data_with_sharded=False), printed, gap
        self._plans: dict[str, PipelinePlan] = {}

    def instance(self, balances: Sequence[Balance] = ()) -> BenchInstance:
        """Make the instance with its solvers, and repaired ones that take a balanced partition and leave it."""
        own: dict[str, OwnSolver] = {
            "as_printed": partial(self._search, "as_printed", AS_PRINTED, None),
            "as_published": partial(self._search, "as_published", AS_PUBLISHED, None),
            **{f"{each}_balanced": partial(self._search, f"{each}_balanced", REPAIRED, each) for each in balances},
            "repaired": partial(self._search, "repaired", REPAIRED, None),
            "exact": self._exact,
        }
        name = f"{self.case}-{self.case.variant}{'-partitions' if balances else ''}"
        return BenchInstance(name, self.case.variant, None, own_solvers=own, time_limit=SECONDS)

    def _search(
        self,
        solver: str,
        slips: Slip,
        balance: Balance | None,
        options: SolveOptions,
        progress: ReportProgress,
        pool: SolverPool | None,
    ) -> SolveResult:
        with Meter(pool) as meter:
            truth = self.case.problem()
            found = self.case.search(slips, balance, options.time_limit)
            ended = "" if found.ended else "ended by its time limit, "
            if found.best is None:
                return _result(solver, meter, None, None, f"{ended}no plan found; {self.printed}")
            plan = found.best.plan
            cost = truth.evaluate(plan)
            message = f"{ended}{_described(truth, plan, cost)}; {self.printed}"
            if not cost.fits:
                needed = max(cost.stage_peaks) / GIGABYTE
                return _result(solver, meter, None, None, f"needs {needed:.1f} GiB, so it does not fit: {message}")
            self._plans[solver] = plan
            return _result(solver, meter, Fraction(cost.cost, plan.batch), None, message)

    def _exact(self, options: SolveOptions, progress: ReportProgress, pool: SolverPool | None) -> SolveResult:
        with Meter(pool) as meter:
            problem = self.case.problem()
            start = min(self._plans.values(), key=lambda plan: _per_sample(problem, plan), default=None)
            found = solve_joint(problem, self.gap, start, options.time_limit)
            for solver, plan in self._plans.items():
                if found.quanta_per_sample is None or _per_sample(problem, plan) < found.quanta_per_sample:
                    raise SolverContradiction(f"{solver} has a better plan than the exact search, which began with it")
            if found.plan is None:
                proven = "proven to have no plan" if found.bound is None else "no plan found"
                infeasible = found.bound is None
                return _result("exact", meter, None, None, f"{proven}; {self.printed}", infeasible=infeasible)
            lost = ", ".join(self._loss(solver, problem, found.plan) for solver in SOLVERS[:-1])
            message = f"{_described(problem, found.plan, problem.evaluate(found.plan))}; {lost}; {self.printed}"
            return _result("exact", meter, found.quanta_per_sample, found.bound, message)

    def _loss(self, solver: str, problem: PipelineProblem, best: PipelinePlan) -> str:
        """Extra time of a plan per sample over the best one."""
        if solver not in self._plans:
            return f"{solver} has no plan that fits"
        ratio = _per_sample(problem, self._plans[solver]) / _per_sample(problem, best)
        return f"{solver} loses {100 * (float(ratio) - 1):.1f} %"


def galvatron_suite(parts: Sequence[str] | None = None) -> Suite:
    """Make the suite or some parts of it.

    Parameters
    ----------
    parts
        Names of :data:`PARTS`; ``small`` if None.

    Raises
    ------
    SuiteError
        There is no such part.
    """
    chosen = ["small"] if parts is None else parts
    check_names("galvatron", "part", chosen, PARTS)
    # Some cells are in several tables.
    instances = {instance.name: instance for part in chosen for instance in PARTS[part]()}
    cells = tuple(instances.values())
    return Suite("galvatron", cells, SECONDS, solvers=(DEFAULT_SOLVER,), notes=NOTES, summarize=summary)


def _per_sample(problem: PipelineProblem, plan: PipelinePlan) -> Fraction:
    return Fraction(problem.evaluate(plan).cost, plan.batch)


def _described(problem: PipelineProblem, plan: PipelinePlan, cost: PlanCost) -> str:
    tables = problem.tables(plan.stages, plan.batch // plan.micro_batches)
    used = dict.fromkeys(str(tables.strategies[choice]) for choice in plan.choices)
    return (
        f"{problem.samples_per_second(plan):.2f} samples/s with batch {plan.batch}, {plan.micro_batches} "
        f"micro-batches, layers per stage {list(plan.partition)}, peak {max(cost.stage_peaks) / GIGABYTE:.2f} GiB, "
        f"{' '.join(used)}"
    )


def _result(
    solver: str,
    meter: Meter,
    per_sample: Fraction | None,
    bound: Fraction | None,
    message: str,
    *,
    infeasible: bool = False,
) -> SolveResult:
    """Round quanta per sample to integers, objectives up and bounds down."""
    scale = UNITS_PER_SECOND // 10**7
    objective = None if per_sample is None else -(-per_sample * scale // 1)
    lower = None if bound is None else int(bound * scale)
    if objective is not None:
        status = Status.OPTIMAL if objective == lower else Status.FEASIBLE
    else:
        status = Status.INFEASIBLE if infeasible else Status.NO_SOLUTION
    return SolveResult(
        status,
        None,
        objective,
        lower,
        relative_gap(objective, lower),
        solver,
        meter.seconds,
        meter.cpu_seconds,
        meter.peak_rss_bytes,
        (),
        (Progress(meter.seconds, objective, lower, solver),) if objective is not None else (),
        message,
        proof=None if lower is None else Proof.EXACT,
    )


def _cells(
    clusters: Sequence[str],
    models: Sequence[str],
    tables: Sequence[paper.Table],
    variants: Sequence[str],
) -> Iterator[BenchInstance]:
    for cluster, table in zip(clusters, tables, strict=True):
        for memory_gb, printed in table.items():
            for column, model in enumerate(models):
                for variant in variants:
                    case = GalvatronCase(cluster, model, memory_gb, variant)
                    yield GalvatronCell(case, paper.in_words(printed[variant][column])).instance()


def _small() -> Iterator[BenchInstance]:
    for variant in paper.VARIANTS:
        case = GalvatronCase("titan-rtx-8-pcie", "BERT-Huge-32", 8, variant)
        yield GalvatronCell(case, paper.in_words(paper.TABLE_2[8][variant][0])).instance()


def _joint() -> Iterator[BenchInstance]:
    batches = tuple(batch for batch in BATCHES if batch <= _LARGEST_JOINT_BATCH)
    for cluster, memory_gb in (("titan-rtx-8-pcie", 12), ("titan-rtx-2x8-pcie", 16)):
        case = GalvatronCase(cluster, "BERT-Huge-48", memory_gb, "galvatron_bmw", MicroBatchRule.DIVISORS, batches)
        yield GalvatronCell(case).instance()


def _table_4() -> Iterator[BenchInstance]:
    for memory_gb in paper.PARTITIONS:
        for column, model in enumerate(paper.TABLE_4_MODELS):
            case = GalvatronCase("a100-2x8-nvlink", model, memory_gb, "galvatron_1f1b_biobj")
            yield GalvatronCell(case, paper.partitions_in_words(memory_gb, column)).instance(tuple(Balance))


def _table_5() -> Iterator[BenchInstance]:
    for memory_gb, printed in paper.TABLE_5.items():
        for column, model in enumerate(paper.TABLE_5_MODELS):
            case = GalvatronCase("a100-8x8-nvlink", model, memory_gb, "galvatron_bmw", batches=_LARGE_BATCHES)
            yield GalvatronCell(case, paper.in_words(printed["galvatron_bmw"][column]), _LARGE_GAP).instance()


def _figure_6() -> Iterator[BenchInstance]:
    for variant in _FIGURE_6_VARIANTS:
        for blocks in _FIGURE_6_BLOCKS:
            case = GalvatronCase("titan-rtx-8-pcie", "BERT-Huge-48", 16, variant, blocks=blocks)
            yield GalvatronCell(case).instance()
    for cluster in ("a100-8-nvlink", "a100-2x8-nvlink", "a100-8x8-nvlink"):
        case = GalvatronCase(cluster, "BERT-Huge-48", 16, "galvatron_bmw", batches=_LARGE_BATCHES)
        yield GalvatronCell(case, gap=_LARGE_GAP).instance()


PARTS: dict[str, Callable[[], Iterator[BenchInstance]]] = {
    "small": _small,
    "joint": _joint,
    "stages": stage_instances,
    "table-2": partial(_cells, ["titan-rtx-8-pcie"], paper.TABLE_2_MODELS, [paper.TABLE_2], paper.VARIANTS),
    "table-3": partial(
        _cells,
        ["titan-rtx-2x8-pcie", "a100-2x8-nvlink"],
        paper.TABLE_3_MODELS,
        [paper.TABLE_3_TITAN, paper.TABLE_3_A100],
        paper.VARIANTS,
    ),
    "table-4": _table_4,
    "table-5": _table_5,
    "figure-6": _figure_6,
}
"""Makers of the instances of each part."""

NOTES = (
    "but for stages, objective and bound are tenths of a nanosecond per sample, by our cost presets; "
    "the paper measured its seconds",
    "layers per stage count the embedding as a layer of the first stage and the head as one of the last",
    "a GB is 2^30 bytes and a MB 2^20, as in the authors' scripts",
)
