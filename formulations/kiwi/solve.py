"""Solves KIWI's problems that are no canonical problems: a worker runs HiGHS, a replay judges, CP-SAT confirms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from formulations.kiwi.graph import KiwiGraph
from formulations.kiwi.schedule import StagedDecision
from formulations.kiwi.schedule import replay as replay_decision
from formulations.kiwi.worker import MODELS, decode
from formulations.problem.checker import CheckReport, Peak
from formulations.problem.solution import Progress, Proof, SolveOptions, SolveResult, Status
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.processes.worker import Ending, Listener, SolverPool
from formulations.solvers.protocol.registry import SolverSpec
from formulations.solvers.running.ledger import Ledger

_KINDS = {"solve": "branch and cut", "confirm": "constraint programming"}
"""Kind of solver behind each task."""


class KiwiOptionsError(ValueError):
    """A formulation, a limit or an option that makes no sense; the message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class KiwiSolution:
    """A decision with its certificate.

    Parameters
    ----------
    decision
        The best decision that was found, or None.
    result
        Status, objective, bound, gap and times as of every solve; ``peak_usage`` is the decision's replayed peak
        in bytes, ``choices`` its form for transport.
    """

    decision: StagedDecision | None
    result: SolveResult


def solve_kiwi(
    graph: KiwiGraph,
    memory_limit: int | None,
    formulation: str = "kiwi_full",
    options: SolveOptions | None = None,
    pool: SolverPool | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> KiwiSolution:
    """Solve a problem of :data:`formulations.kiwi.worker.MODELS`; report only what has been replayed.

    ``optimal`` means that HiGHS claims that a replayed decision is optimal and CP-SAT that none is cheaper;
    ``infeasible`` that both say so. What HiGHS alone claims stands beside a decision that is ``feasible``.

    Parameters
    ----------
    graph
        The instance.
    memory_limit
        Bytes on one device, or None.
    formulation
        ``kiwi_full``, ``kiwi_reduced``, or one of them with ``_published`` behind it.
    options, pool, progress
        As for :func:`formulations.solvers.running.run.solve`; a relative gap and initial choices are not used.

    Raises
    ------
    KiwiOptionsError
        If there is no such formulation, a limit makes no sense, or an operator has too many configurations.
    WorkerStartError
        If no process can be started.
    """
    chosen = replace(options or SolveOptions(), relative_gap=0.0, initial_choices=None)
    _validate(memory_limit, formulation, chosen)
    limit = graph.most_bytes if memory_limit is None else memory_limit
    ledger = _KiwiLedger(graph, limit, formulation, chosen, progress)
    workers = pool if pool is not None else SolverPool()
    try:
        verdict = _confirm(workers, ledger) if _work(workers, ledger, "solve") else None
        if ledger.proof is Proof.CLAIMED and ledger.remaining_seconds > 0 and not ledger.interrupted:
            _agree(workers, ledger)
    finally:
        if pool is None:
            workers.close()
    result = ledger.result(verdict)
    return KiwiSolution(None if result.choices is None else decode(graph, result.choices), result)


def _validate(memory_limit: int | None, formulation: str, options: SolveOptions) -> None:
    if formulation not in MODELS:
        raise KiwiOptionsError(f"formulation {formulation!r} is not known; choose one of {', '.join(MODELS)}")
    if memory_limit is not None and memory_limit < 0:
        raise KiwiOptionsError(f"memory limit {memory_limit} is negative; give bytes, or None for no limit")
    if not (math.isfinite(options.time_limit) and options.time_limit > 0):
        raise KiwiOptionsError(f"time_limit is {options.time_limit}; give a positive number of seconds")


class _KiwiLedger(Ledger):
    """A ledger whose assignments are decisions, judged by their replay."""

    def __init__(
        self,
        graph: KiwiGraph,
        memory_limit: int,
        formulation: str,
        options: SolveOptions,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        # Workers take a canonical problem; this one is empty and lends its name to messages.
        super().__init__(StrategyProblem(graph.name, (), (), (), 0), formulation, options, progress)
        self.graph, self.memory_limit = graph, memory_limit

    def offer(self, assignments: Iterable[tuple[int, ...]], source: str) -> bool:
        """Replay decisions, the last (best) first, until one fits; keep it if it is better."""
        for choices in reversed(list(assignments)):
            replayed = replay_decision(self.graph, decode(self.graph, choices))
            if replayed.peak > self.memory_limit:
                self.note(
                    f"{source} offered a decision that peaks at {replayed.peak}, the limit is {self.memory_limit}"
                )
                continue
            if self.objective is None or replayed.cost < self.objective:
                peak = Peak(0, replayed.peak, replayed.memory.index(replayed.peak))
                self.choices, self.objective = choices, replayed.cost
                self._report = CheckReport(replayed.cost, (peak,), ())
                self._refute()
                self._record(source)
            return True
        return False


def _work(workers: SolverPool, ledger: _KiwiLedger, task: str, most_cost: int | None = None) -> bool:
    """Let a worker run a task of :mod:`kiwi_worker`; True if it claims that nothing is feasible."""
    keywords: dict[str, str | int] = {
        "graph": ledger.graph.to_json(),
        "memory_limit": ledger.memory_limit,
        "formulation": ledger.solver,
    }
    if most_cost is not None:
        keywords["most_cost"] = most_cost
    spec = SolverSpec(f"{ledger.solver} ({task})", f"formulations.kiwi.worker:{task}", keywords)
    options = replace(ledger.options, time_limit=ledger.remaining_seconds)
    listener = Listener(
        lambda progress: ledger.claim(progress.claimed, _KINDS[task], spec.name),
        lambda found: _take(ledger, found, spec.name),
    )
    outcome = workers.run(spec, ledger.problem, options, listener)
    ledger.spend(outcome.cpu_seconds, outcome.peak_rss_bytes)
    ledger.interrupted |= outcome.ending is Ending.INTERRUPTED
    if outcome.ending is Ending.FAILED and outcome.bad_input:
        raise KiwiOptionsError(outcome.message)
    if outcome.claim is None:
        ledger.note(f"{spec.name} {outcome.ending}: {outcome.message}")
        return False
    ledger.note(outcome.claim.message)
    if outcome.claim.choices is not None:
        ledger.offer([outcome.claim.choices], spec.name)
    ledger.claim(outcome.claim.claimed, _KINDS[task], spec.name)
    return outcome.claim.proved_infeasible


def _take(ledger: _KiwiLedger, found: list[tuple[int, ...]], source: str) -> None:
    ledger.offer(found, source)


def _confirm(workers: SolverPool, ledger: _KiwiLedger) -> Status | None:
    """Ask CP-SAT, another kind of solver, whether nothing is feasible."""
    if ledger.choices is None and ledger.remaining_seconds > 0 and _work(workers, ledger, "confirm"):
        return Status.INFEASIBLE
    if ledger.choices is not None:
        ledger.note("HiGHS claims that nothing is feasible, but a decision replays within the limit")
        return None
    return Status.INFEASIBLE_UNCONFIRMED


def _agree(workers: SolverPool, ledger: _KiwiLedger) -> None:
    """Ask CP-SAT whether nothing is cheaper; what it finds refutes the claim."""
    assert ledger.objective is not None, "only an assignment's cost is claimed to be optimal"
    objective = ledger.objective
    if _work(workers, ledger, "confirm", objective - 1):
        ledger.claim(objective, _KINDS["confirm"], "cpsat")
