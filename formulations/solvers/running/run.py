"""The public way to solve: a worker finds, the exact checker judges, a second solver confirms."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from formulations.problem.checker import ViolationKind, check
from formulations.problem.solution import Claim, Progress, Proof, SolveOptions, SolveResult, Status
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.processes.worker import Ending, Listener, SolverPool
from formulations.solvers.protocol.exchange import Update
from formulations.solvers.protocol.registry import DEFAULT_SOLVER, SolverSpec, find_solver
from formulations.solvers.protocol.solver import AskOthers
from formulations.solvers.running import portfolio
from formulations.solvers.running.bounds import by_trust
from formulations.solvers.running.coordination import CoordinatorContext
from formulations.solvers.running.ledger import Ledger, SolverContradiction

CONFIRMERS = ("peak_prices", "highs", "cpsat")
"""Exact solvers of different kinds that confirm infeasibility, in the order in which they run: the quickest first."""

PROVERS = ("branch_and_bound", "highs", "cpsat")
"""Solvers that turn a claimed optimum into a proof, or find the counterexample, in the order in which they run."""

_KINDS_THAT_MUST_AGREE = 2
"""Not tunable: kinds of solver that prove infeasibility together."""

_OVERTIME_SECONDS = 1.0
"""Not tunable: time after the limit of the whole at which a confirming solver is stopped."""

_INDEX_DEFECTS = {ViolationKind.WRONG_LENGTH, ViolationKind.CHOICE_NOT_INTEGER, ViolationKind.CHOICE_OUT_OF_RANGE}


class SolveOptionsError(ValueError):
    """An option that makes no sense; the message names it, its value and the remedy."""


class SolverInputError(ValueError):
    """A solver refuses the problem; the message is the solver's own."""


def solve(
    problem: StrategyProblem,
    solver: str = DEFAULT_SOLVER,
    options: SolveOptions | None = None,
    progress: Callable[[Progress], None] | None = None,
    pool: SolverPool | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    from_others: AskOthers = lambda: None,
) -> SolveResult:
    """Solve a problem in a worker process and report only what has been checked.

    Every incumbent is replayed by :func:`formulations.problem.checker.check` and its objective recomputed in
    exact integers. ``optimal`` means that it equals a bound (or is within ``options.relative_gap`` of it) that follows
    in exact integers or that two kinds of solvers agree on (:class:`formulations.problem.solution.Proof`);
    ``infeasible`` means that two exact solvers of different kinds say so, or that it follows in exact integers. Where
    the solver only claims either, others use what is left of the time to prove or refute it. A claim that an assignment
    refutes is noted in ``message`` and does not count.
    A worker that is killed, hangs or crashes leaves its best incumbent and bound, and Ctrl-C
    returns the best so far; ``message`` then says what happened.

    Parameters
    ----------
    problem
        What to solve.
    solver
        A name that :func:`formulations.solvers.protocol.registry.find_solver` knows.
    options
        Limits and seeds; the defaults of :class:`SolveOptions` if None.
    progress
        Called in this thread when the checked incumbent or the bound improves.
    pool
        Warm workers to use; without one a process is started and ended for this solve.
    should_stop
        Called now and then; where it returns True, the solve ends as by Ctrl-C.
    from_others
        Asked now and then for an assignment that was found elsewhere; it is checked as any other.

    Raises
    ------
    ProblemError
        If the problem is not well formed.
    SolveOptionsError, UnknownSolverError, SolverInputError
        If an option, the solver's name or the problem's size does not fit.
    SolverContradiction
        If an exact bound exceeds a checked objective, or an assignment is found where none exists in exact integers.
    WorkerStartError
        If no process can be started.
    """
    spec = find_solver(solver)
    ledger = _open(problem, spec, options or SolveOptions(), progress)
    if not problem.nodes:
        return _without_decisions(ledger)
    workers = pool if pool is not None else SolverPool()
    try:
        claims_infeasible = _work(workers, spec, ledger, ledger.options, should_stop, from_others)
        verdict = _confirm_infeasible(workers, spec, ledger, should_stop) if claims_infeasible else None
        if verdict is None:
            _prove_optimal(workers, spec, ledger, should_stop)
    finally:
        if pool is None:
            workers.close()
    return ledger.result(verdict)


def solve_in_process(problem: StrategyProblem, solver: str, options: SolveOptions | None = None) -> SolveResult:
    """Solve without a worker: for thousands of tiny problems with solvers that cannot hang or crash.

    Checks and statuses are those of :func:`solve`, except that nothing confirms infeasibility and no
    limit is enforced from outside.

    Raises
    ------
    SolveOptionsError
        For solvers whose libraries must stay in a process of their own.
    """
    spec = find_solver(solver)
    if spec.needs_own_process or spec.is_coordinator:
        raise SolveOptionsError(
            f"solver {solver} needs a process of its own, or several; use solve() with a SolverPool"
        )
    ledger = _open(problem, spec, options or SolveOptions(), None)
    if not problem.nodes:
        return _without_decisions(ledger)
    started = time.process_time()
    report = partial(_report, ledger, spec)
    claim = spec.load()(problem, ledger.options, report, lambda choices: _take(ledger, [choices], solver))
    ledger.spend(time.process_time() - started, 0)
    return ledger.result(Status.INFEASIBLE_UNCONFIRMED if _enter(ledger, claim, spec) else None)


def _open(
    problem: StrategyProblem, spec: SolverSpec, options: SolveOptions, progress: Callable[[Progress], None] | None
) -> Ledger:
    if not (math.isfinite(options.time_limit) and options.time_limit > 0):
        raise SolveOptionsError(f"time_limit is {options.time_limit}; give a positive number of seconds")
    if not 0 <= options.relative_gap < 1:
        raise SolveOptionsError(f"relative_gap is {options.relative_gap}; give a number in [0, 1), 0 for a proof")
    if options.memory_limit_bytes is not None and options.memory_limit_bytes <= 0:
        raise SolveOptionsError(f"memory_limit_bytes is {options.memory_limit_bytes}; give a positive size or None")
    if options.workers is not None and options.workers < 1:
        raise SolveOptionsError(f"workers is {options.workers}; give a positive number, or None for one per core")
    problem.validate()
    ledger = Ledger(problem, spec.name, options, progress)
    start = options.initial_choices
    if start is not None:
        report = check(problem, start)
        defect = next((v for v in report.violations if v.kind in _INDEX_DEFECTS), None)
        if defect is not None:
            raise SolveOptionsError(f"initial_choices do not belong to the problem: {defect.message}")
        if report.ok:
            ledger.offer([start], "initial choices")
    return ledger


def _without_decisions(ledger: Ledger) -> SolveResult:
    """No nodes: nothing to choose, nothing to pay, and no solver to trouble with it."""
    ledger.offer([()], "no decisions")
    ledger.raise_bound(0, "no decisions")
    return ledger.result()


def _work(
    workers: SolverPool,
    spec: SolverSpec,
    ledger: Ledger,
    options: SolveOptions,
    should_stop: Callable[[], bool] = lambda: False,
    from_others: AskOthers = lambda: None,
) -> bool:
    """Run one solver and enter what it finds; True if it claims that nothing is feasible."""
    if spec.is_coordinator:
        context = CoordinatorContext(
            workers,
            lambda progress: _report(ledger, find_solver(progress.source), progress),
            lambda found, source: _take(ledger, [found], source),
            ledger.spend,
            should_stop,
            partial(_ask, ledger, from_others),
        )
        claim = portfolio.solve(ledger.problem, options, context)
        ledger.note(claim.message)
        return _enter(ledger, claim, spec)
    listener = Listener(
        partial(_report, ledger, spec),
        lambda found: _take(ledger, found, spec.name),
        lambda: None if (found := _ask(ledger, from_others)) is None else Update(choices=found),
        should_stop,
    )
    outcome = workers.run(spec, ledger.problem, options, listener)
    ledger.spend(outcome.cpu_seconds, outcome.peak_rss_bytes)
    ledger.interrupted |= outcome.ending is Ending.INTERRUPTED
    if outcome.ending is Ending.FAILED and outcome.bad_input:
        raise SolverInputError(f"{spec.name}: {outcome.message}")
    ledger.note(outcome.message if outcome.claim is not None else f"{spec.name} {outcome.ending}: {outcome.message}")
    return outcome.claim is not None and _enter(ledger, outcome.claim, spec)


def _take(ledger: Ledger, found: list[tuple[int, ...]], source: str) -> None:
    ledger.offer(found, source)


def _ask(ledger: Ledger, from_others: AskOthers) -> tuple[int, ...] | None:
    """Ask what was found elsewhere, and enter it, so that it stays whatever becomes of the solver."""
    found = from_others()
    return found if found is not None and ledger.offer([found], "others") else None


def _report(ledger: Ledger, spec: SolverSpec, progress: Progress) -> None:
    """Enter the bounds of a line of progress; its incumbent counts only once checked."""
    _enter_bounds(ledger, spec, progress.bound, progress.claimed, progress.source)


def _enter_bounds(ledger: Ledger, spec: SolverSpec, exact: int | None, claimed: int | None, source: str) -> None:
    exact, claimed = by_trust(spec, exact, claimed)
    ledger.raise_bound(exact, source)
    ledger.claim(claimed, spec.claimant, source)


def _enter(ledger: Ledger, claim: Claim, spec: SolverSpec) -> bool:
    """Enter a claim; True if it says that nothing is feasible and nothing feasible is known."""
    if claim.choices is not None:
        ledger.offer([claim.choices], spec.name)
    if not claim.proved_infeasible:
        _enter_bounds(ledger, spec, claim.bound, claim.claimed, spec.name)
        ledger.complete |= claim.complete
        return False
    certified = claim.certified and spec.is_built_in
    if ledger.choices is None:
        ledger.certified |= certified
        return True
    refuted = f"{spec.name} claims that nothing is feasible, but an assignment that passes the checker exists"
    if certified:
        raise SolverContradiction(f"problem {ledger.problem.name}: {refuted} and costs {ledger.objective}")
    ledger.note(refuted)
    return False


def _prove_optimal(workers: SolverPool, spec: SolverSpec, ledger: Ledger, should_stop: Callable[[], bool]) -> None:
    """Where the optimum is only claimed, let solvers of other kinds prove or refute it in the time that is left."""
    if spec.is_coordinator:
        return  # its own members have had their turns
    waiting = [prover for prover in map(find_solver, PROVERS) if prover.claimant != spec.claimant]
    for k, prover in enumerate(waiting):
        seconds = ledger.remaining_seconds / (len(waiting) - k)
        is_claimed = ledger.proof is Proof.CLAIMED or (ledger.proof is None and ledger.complete)
        if not is_claimed or ledger.choices is None or ledger.interrupted or seconds <= 0 or should_stop():
            return
        _work(workers, prover, ledger, replace(ledger.options, time_limit=seconds, initial_choices=ledger.choices))


def _confirm_infeasible(
    workers: SolverPool, spec: SolverSpec, ledger: Ledger, should_stop: Callable[[], bool]
) -> Status | None:
    """Ask exact solvers of other kinds one after another; each may take its part of the time that is left.

    Floats and tolerances are why one word is not enough. A proof in exact integers (presolve, a bound on what the
    limits lack, or one above the cost of any assignment) has none of them: it counts as any bound does, and nobody
    else is asked. An assignment that is found refutes the claim: None.
    """

    def is_over() -> bool:
        return should_stop() or ledger.remaining_seconds < -_OVERTIME_SECONDS

    agreed = {spec.kind} - {None}
    waiting = [confirmer for confirmer in map(find_solver, CONFIRMERS) if confirmer.kind not in agreed]
    for k, confirmer in enumerate(waiting):
        seconds = ledger.remaining_seconds / (len(waiting) - k)
        if ledger.certified or len(agreed) >= _KINDS_THAT_MUST_AGREE:
            break
        if ledger.interrupted or seconds <= 0 or should_stop():
            break
        options = replace(ledger.options, time_limit=seconds, initial_choices=None)
        if _work(workers, confirmer, ledger, options, is_over):
            agreed.add(confirmer.kind)
        elif ledger.choices is not None:
            ledger.note(
                f"{spec.name} claims that nothing is feasible, but {confirmer.name} found an assignment that passes "
                f"the checker and costs {ledger.objective}"
            )
            return None
    if ledger.certified or len(agreed) >= _KINDS_THAT_MUST_AGREE:
        return Status.INFEASIBLE
    ledger.note("no second exact solver confirmed it in time")
    return Status.INFEASIBLE_UNCONFIRMED
