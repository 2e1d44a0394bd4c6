"""The suite ``h3t``: H3T's searches as published, repaired and exact, beside the paper's figures.

=============  =====================================================================================
``table-1``    the models of Table 2 on the three machines at the paper's limits: the default
``figure-6``   four of them over memory limits, from the least of any plan to that of the fastest one
``table-5``    four settings on 64 A100, for the times of the solvers
``table-6``    how often switches are on: slower PCIe, slower computation, a larger limit; also with the
               PCIe that the paper's times imply
``optimizer``  two of the models with the optimizer overlapped, at the end, and left out
``free``       four columns of Table 1, with ``free`` beside the others: minutes
=============  =====================================================================================

Every case makes two instances, since plans without synchronization, or with a choice of it, may be faster than any
synchronized plan. Of formulation ``h3t_synchronized``: ``dp_printed`` is Algorithm 4 with every slip kept,
``dp_published`` without those that the paper's text contradicts, ``dp`` repaired, all rounding to the nearest of 128
units, ``dp_up`` and ``dp_down`` repaired with other roundings; ``exact`` decides in bytes, with a proof. Any solver of
canonical problems may run beside them on the first column of Table 1. Of formulation ``h3t``, over all 128 sets:
``all_on``, ``random`` (Algorithm 1), ``uniform`` (one set for all layers), ``greedy_printed`` and ``greedy`` (Algorithm
2), ``synchronized``, the exact plan of the other instance, and ``free``, which improves the best of these and gives a
bound on all sequences. A dynamic program's plan that breaks the limit in bytes counts as none. The loss of a search
against ``exact`` is in its message. Objective and bound are microseconds of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Self

from formulations.h3t.canonical import h3t_problem
from formulations.h3t.costs import SECONDS_PER_COST
from formulations.h3t.dynamic_program import search_dp
from formulations.h3t.exact import ExactResult, least_memory, solve_synchronized
from formulations.h3t.free import solve_free
from formulations.h3t.operations import ALL_ON, Switch
from formulations.h3t.problem import Optimizer, Outcome, simulate
from formulations.h3t.sampling import H3tFound, search_greedy, search_random, search_uniform
from formulations.h3t.slips import AS_PRINTED, AS_PUBLISHED, REPAIRED, Rounding, Slip
from formulations.problem.solution import Progress, Proof, SolveOptions, SolveResult, Status, relative_gap
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers import SolverPool
from formulations.solvers.processes.worker_process import read_status_bytes
from formulations.solvers.running.ledger import SolverContradiction
from planner.benchmarks.metering import Meter
from planner.benchmarks.rows import BenchRow
from planner.benchmarks.suites import BenchInstance, OwnSolver, ReportProgress, Suite, check_names
from planner.papers.h3t import paper_tables as paper
from planner.papers.h3t.cases import GIGABYTE, NO_LIMIT_GB, H3tCase, table_1_cases
from planner.papers.hardware import H3T_PCIE_SHARE, Hardware

SECONDS = 60.0
"""Time limit of one solve."""

SYNCHRONIZED, FREE = "h3t_synchronized", "h3t"

_SYNCHRONIZED_NAME = "-synchronized"
_SOLVER = "highs"
REPORTED = (Switch.PARTITION, Switch.LAZY_PREFETCH, Switch.REMAT, Switch.OFFLOAD_HIDDEN)

Found = tuple[tuple[int, ...], Outcome] | None
Search = Callable[[H3tCase, SolveOptions], Found]


def h3t_suite(parts: Sequence[str] | None = None) -> Suite:
    """Make the suite or some parts of it.

    Parameters
    ----------
    parts
        Names of :data:`PARTS`; ``table-1`` if None.

    Raises
    ------
    SuiteError
        There is no such part.
    """
    chosen = ["table-1"] if parts is None else parts
    check_names("h3t", "part", chosen, PARTS)
    instances = tuple(_named(instance, part) for part in chosen for instance in PARTS[part]())
    return Suite("h3t", instances, SECONDS, solvers=(_SOLVER,), notes=NOTES, summarize=summary)


def _named(instance: BenchInstance, part: str) -> BenchInstance:
    """Its name with the part, as parts have cases in common."""
    return instance if part == "table-1" else replace(instance, name=f"{instance.name}-{part}")


def instances_of(
    case: H3tCase, printed: str = "", *, canonical: bool = False, with_bound: bool = False
) -> list[BenchInstance]:
    """The two instances of a case.

    Parameters
    ----------
    case
        What is solved.
    printed
        Text of the paper's figures for this case.
    canonical
        Whether solvers of canonical problems may run too.
    with_bound
        Whether ``free`` is among the solvers.
    """
    synchronized: dict[str, OwnSolver] = {
        solver: partial(_solve, case, printed, solver, search) for solver, search in _SYNCHRONIZED.items()
    }
    synchronized["exact"] = partial(_solve_exactly, case, printed)
    free: dict[str, OwnSolver] = {
        solver: partial(_solve, case, printed, solver, search) for solver, search in _FREE.items()
    }
    if with_bound:
        free["free"] = partial(_solve_free, case, printed)
    load = partial(_canonical, case) if canonical else None
    return [
        BenchInstance(f"{case}{_SYNCHRONIZED_NAME}", SYNCHRONIZED, load, own_solvers=synchronized),
        BenchInstance(str(case), FREE, None, own_solvers=free),
    ]


@cache
def exact(case: H3tCase) -> ExactResult:
    """The exact synchronized plan of a case, to the proof or for :data:`SECONDS`."""
    return solve_synchronized(case.tables(), case.memory_limit, deadline=time.monotonic() + SECONDS)


def summary(rows: Sequence[BenchRow]) -> list[str]:
    """One line for each case: seconds of every solver's plan, the fastest first, and the losses against that."""
    cases: dict[str, list[tuple[int, str]]] = {}
    for row in rows:
        found = cases.setdefault(row.instance.replace(_SYNCHRONIZED_NAME, ""), [])
        if row.objective is not None:
            found.append((row.objective, row.solver))
    lines = []
    for case, plans in cases.items():
        ordered = sorted(plans)
        text = [f"{solver} {cost / 1e6:.3f} s (+{100 * (cost / ordered[0][0] - 1):.2f} %)" for cost, solver in ordered]
        lines.append(f"{case}: {', '.join(text) or 'nothing fits'}")
    return lines


def _dp(slips: Slip, rounding: Rounding, case: H3tCase, options: SolveOptions) -> Found:
    del options
    found = search_dp(case.tables(), case.memory_limit, slips=slips, rounding=rounding)
    return None if found.sequence is None or found.outcome is None else (found.sequence, found.outcome)


def _all_on(case: H3tCase, options: SolveOptions) -> Found:
    del options
    step = case.step()
    sequence = (int(ALL_ON),) * len(step.layers)
    return sequence, simulate(step, sequence)


def _random(case: H3tCase, options: SolveOptions) -> Found:
    return _pair(search_random(case.step(), options.seed))


def _uniform(case: H3tCase, options: SolveOptions) -> Found:
    del options
    return _pair(search_uniform(case.step()))


def _greedy(slips: Slip, case: H3tCase, options: SolveOptions) -> Found:
    del options
    return _pair(search_greedy(case.step(), slips))


def _synchronized(case: H3tCase, options: SolveOptions) -> Found:
    del options
    found = exact(case)
    return None if found.sequence is None or found.outcome is None else (found.sequence, found.outcome)


def _pair(found: H3tFound | None) -> Found:
    return None if found is None else (found.sequence, found.outcome)


_SYNCHRONIZED: dict[str, Search] = {
    "dp_printed": partial(_dp, AS_PRINTED, Rounding.NEAREST),
    "dp_published": partial(_dp, AS_PUBLISHED, Rounding.NEAREST),
    "dp": partial(_dp, REPAIRED, Rounding.NEAREST),
    "dp_up": partial(_dp, REPAIRED, Rounding.UP),
    "dp_down": partial(_dp, REPAIRED, Rounding.DOWN),
}
_FREE: dict[str, Search] = {
    "all_on": _all_on,
    "random": _random,
    "uniform": _uniform,
    "greedy_printed": partial(_greedy, AS_PRINTED),
    "greedy": partial(_greedy, REPAIRED),
    "synchronized": _synchronized,
}

SEARCHES = _SYNCHRONIZED | _FREE
"""Searches by name: a sequence of switches with its cost and peak, or None."""


def _solve(
    case: H3tCase,
    printed: str,
    solver: str,
    search: Search,
    options: SolveOptions,
    progress: ReportProgress,
    pool: SolverPool | None,
) -> SolveResult:
    del progress
    case.tables()  # the profile, which every search has before it starts
    with Meter(pool) as meter:
        found = search(case, options)
        taken = _Taken.by(meter)
    if found is None:
        return _result(solver, taken, Status.NO_SOLUTION, None, None, f"nothing found; {printed}")
    sequence, outcome = found
    text = f"{described(sequence, outcome)}{_loss(case, solver, outcome)}; {printed}"
    if outcome.peak > case.memory_limit:
        return _result(solver, taken, Status.NO_SOLUTION, None, None, f"does not fit: {text}")
    return _result(solver, taken, Status.FEASIBLE, found, None, text)


def _solve_exactly(
    case: H3tCase, printed: str, options: SolveOptions, progress: ReportProgress, pool: SolverPool | None
) -> SolveResult:
    del options, progress
    case.tables()
    exact.cache_clear()
    with Meter(pool) as meter:
        found = exact(case)
        taken = _Taken.by(meter)
    if found.bound is None:
        text = f"needs at least {least_memory(case.tables()) / GIGABYTE:.2f} GB; {printed}"
        return _result("exact", taken, Status.INFEASIBLE, None, None, text)
    if found.sequence is None or found.outcome is None:
        return _result("exact", taken, Status.NO_SOLUTION, None, found.bound, f"not found in time; {printed}")
    status = Status.OPTIMAL if found.outcome.cost == found.bound else Status.FEASIBLE
    text = f"{described(found.sequence, found.outcome)}; {printed}"
    return _result("exact", taken, status, (found.sequence, found.outcome), found.bound, text)


def _solve_free(
    case: H3tCase, printed: str, options: SolveOptions, progress: ReportProgress, pool: SolverPool | None
) -> SolveResult:
    del progress
    step = case.step()
    with Meter(pool) as meter:
        plans = [search(case, options) for search in _FREE.values()]
        starts = [plan[0] for plan in plans if plan is not None]
        left = replace(options, time_limit=max(0.0, options.time_limit - meter.seconds))
        found = solve_free(step, starts, left, meter)
        taken = _Taken.by(meter)
    if found.sequence is None or found.outcome is None:
        without = _result("free", taken, found.status, None, None, f"{found.message}; {printed}")
        return replace(without, claimed=found.bound, claimed_by="highs")
    text = f"{described(found.sequence, found.outcome)}{_loss(case, 'free', found.outcome)}; {found.message}"
    best = found.sequence, found.outcome
    if found.status is Status.OPTIMAL:
        return _result("free", taken, found.status, best, found.bound, text, Proof.AGREED)
    claimed = replace(_result("free", taken, found.status, best, None, text), claimed=found.bound)
    return replace(claimed, claimed_by="highs")


def described(sequence: Sequence[int], outcome: Outcome) -> str:
    """Time, peak, and how many layers have which switches on."""
    shares = ", ".join(
        f"{switch.name.lower().replace('_', ' ')} {share:.0f} %"
        for switch, share in zip(REPORTED, switch_shares(sequence), strict=True)
        if switch.name
    )
    return f"{outcome.cost / 1e6:.3f} s, peak {outcome.peak / GIGABYTE:.2f} GB, {shares}"


def switch_shares(sequence: Sequence[int]) -> list[float]:
    """Percent of layers with partition, lazy prefetching, rematerialization, hidden offloading on, as in Table 6."""
    return [100 * sum(bool(switches & switch) for switches in sequence) / len(sequence) for switch in REPORTED]


def _loss(case: H3tCase, solver: str, outcome: Outcome) -> str:
    """Text on the loss of a plan that fits against the exact one.

    Raises
    ------
    SolverContradiction
        A synchronized plan is below the exact search's bound.
    """
    best = exact(case)
    if outcome.peak > case.memory_limit:
        return ""
    if solver in _SYNCHRONIZED and (best.bound is None or outcome.cost < best.bound):
        raise SolverContradiction(f"{case}: {solver} takes {outcome.cost}, but {best.bound} is proven for all")
    if best.outcome is None:
        return ""
    return f", loses {100 * (outcome.cost / best.outcome.cost - 1):.3f} % against the exact synchronized plan"


@dataclass(frozen=True, slots=True)
class _Taken:
    """Time and memory of a solve, by the meter at its end."""

    seconds: float
    cpu_seconds: float
    peak_rss_bytes: int

    @classmethod
    def by(cls, meter: Meter) -> Self:
        peak_rss_bytes = max(meter.peak_rss_bytes, read_status_bytes("self", "VmHWM"))
        return cls(meter.seconds, meter.cpu_seconds, peak_rss_bytes)


def _result(
    solver: str,
    taken: _Taken,
    status: Status,
    found: Found,
    bound: int | None,
    message: str,
    proof: Proof = Proof.EXACT,
) -> SolveResult:
    sequence, outcome = (None, None) if found is None else found
    objective = None if outcome is None else outcome.cost
    return SolveResult(
        status,
        sequence,
        objective,
        bound,
        relative_gap(objective, bound),
        solver,
        taken.seconds,
        taken.cpu_seconds,
        taken.peak_rss_bytes,
        () if outcome is None else (outcome.peak,),
        (Progress(taken.seconds, objective, bound, solver),) if objective is not None else (),
        message,
        proof=None if bound is None else proof,
    )


def _canonical(case: H3tCase) -> StrategyProblem:
    return h3t_problem(case.tables(), case.memory_limit, SECONDS_PER_COST)


def _table_1() -> Iterator[BenchInstance]:
    for column, case in enumerate(table_1_cases()):
        printed = ", ".join(f"{name} {_seconds(row[column])}" for name, row in paper.TABLE_1.items())
        text = f"paper: {printed}; all on needs {paper.TABLE_3[column]} GB"
        yield from instances_of(case, text, canonical=column == 0)


def _seconds(printed: float | None) -> str:
    return "out of memory" if printed is None else f"{printed} s"


FIGURE_6_COLUMNS = (0, 2, 4, 8)
"""Columns of Table 1 that are searched over memory limits."""

FIGURE_6_SHARES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
"""Limits between the least memory of any synchronized sequence and that of the fastest one."""


def figure_6_case(column: int, share: float, hardware: Hardware = Hardware.PRESET) -> H3tCase:
    """A column of Table 1 at a limit: 0 is the least memory of any synchronized plan, 1 that of the fastest one."""
    case = table_1_cases(hardware)[column]
    least = least_memory(case.tables())
    most = exact(replace(case, limit_gb=NO_LIMIT_GB)).outcome
    assert most is not None, "without a limit there is a plan"
    limit = int(least + (most.peak - least) * share)
    return replace(case, limit_gb=-(-limit // 10**7) / 100)


def _figure_6() -> Iterator[BenchInstance]:
    for column in FIGURE_6_COLUMNS:
        for share in FIGURE_6_SHARES:
            yield from instances_of(figure_6_case(column, share), "paper: a plot without figures")


def _table_5() -> Iterator[BenchInstance]:
    for row in paper.TABLE_5:
        printed = f"paper: dp {row.dp} min, greedy {row.greedy} min, random {row.random} min"
        yield from instances_of(H3tCase("a100-8x8-nvlink", row.model, row.batch, row.limit_gb), printed)


def table_6_cases(pcie_share: float = 1.0) -> dict[str, H3tCase]:
    """The simulated cases of Table 6; ``greedy`` is the default one by another solver.

    Parameters
    ----------
    pcie_share
        Of our preset's PCIe that the default case has.
    """
    case = replace(table_1_cases()[0], pcie_share=pcie_share)
    return {
        "default": case,
        "pcie-slow": replace(case, pcie_share=0.1 * pcie_share),
        "compute-slow": replace(case, compute_share=0.1),
        "limit-25": replace(case, limit_gb=25.0),
    }


def _table_6() -> Iterator[BenchInstance]:
    for share in (1.0, H3T_PCIE_SHARE):
        for name, case in table_6_cases(share).items():
            printed = "paper, dp: {} % partition, {} % lazy, {} % remat, {} % offload".format(*paper.TABLE_6[name])
            yield from instances_of(case, printed)


def _optimizer() -> Iterator[BenchInstance]:
    for column in (0, 6):
        for optimizer in Optimizer:
            yield from instances_of(replace(table_1_cases()[column], optimizer=optimizer), "paper: no such figures")


def _free() -> Iterator[BenchInstance]:
    for column in FIGURE_6_COLUMNS:
        yield from instances_of(table_1_cases()[column], with_bound=True)


PARTS: dict[str, Callable[[], Iterator[BenchInstance]]] = {
    "table-1": _table_1,
    "figure-6": _figure_6,
    "table-5": _table_5,
    "table-6": _table_6,
    "optimizer": _optimizer,
    "free": _free,
}
"""Makers of the instances of each part."""

NOTES = (
    "objective and bound are microseconds of a step by our cost presets; the paper measured its seconds",
    "paper: dp beats all switches on by up to 1.18, and loses to greedy or all-on by 0.1 to 0.3 s in three columns",
)
"""Notes for readers of the rows."""
