"""Solvers that misbehave, to see what a worker makes of them; named ``support.problems.fake_solvers:NAME``."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

from formulations.problem.checker import check
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress

GRANULE = 16 * 1024 * 1024
HOARDED_GRANULES = 8


def _cheapest(problem: StrategyProblem) -> tuple[int, ...]:
    return tuple(int(node.cost.argmin()) for node in problem.nodes)


def hang(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Find something, prove something, and never return."""
    incumbent(_cheapest(problem))
    report(Progress(0.0, None, 0, "hang"))
    while True:
        time.sleep(60)


def crash(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Find something and die as a segmentation fault does."""
    incumbent(_cheapest(problem))
    print("last words", file=sys.stderr, flush=True)
    os.abort()


def eat(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Find something and take more and more memory."""
    incumbent(_cheapest(problem))
    eaten = []
    while True:
        eaten.append(bytearray(os.urandom(1024) * (GRANULE // 1024)))
        time.sleep(0.01)


def hoard(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Leave much memory behind, in a cycle; the message says in which process."""
    hoarded: list[object] = [bytearray(os.urandom(1024) * (GRANULE // 1024)) for _ in range(HOARDED_GRANULES)]
    hoarded.append(hoarded)
    return Claim(_cheapest(problem), None, message=f"pid={os.getpid()}")


def fail(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Find something and raise."""
    incumbent(_cheapest(problem))
    raise RuntimeError("a bug in the solver")


def refuse(
    problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent
) -> Claim:
    """Refuse the problem in words meant for the user."""
    raise ValueError("this solver takes at most two nodes; use another solver")


def wrong_bound(
    problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent
) -> Claim:
    """Claim a bound above what the assignment costs."""
    return Claim(_cheapest(problem), 10**15)


def wrong_assignment(
    problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent
) -> Claim:
    """Offer assignments that are none, then a right one, then claim a wrong one."""
    incumbent((999,) * len(problem.nodes))
    incumbent(_cheapest(problem))
    incumbent(())
    return Claim((-1,) * len(problem.nodes), 0)


def wrong_infeasible(
    problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent
) -> Claim:
    """Claim that nothing is feasible."""
    return Claim(None, None, proved_infeasible=True)


def environment(
    problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent
) -> Claim:
    """Say which process this is and which of the excluding libraries it has loaded."""
    loaded = [name for name in ("highspy", "ortools", "torch") if name in sys.modules]
    return Claim(_cheapest(problem), None, message=f"pid={os.getpid()} loaded={loaded}")


def burn(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Use half a second of processor time and 64 MiB."""
    end = time.process_time() + 0.5
    block = bytearray(os.urandom(1024) * (4 * GRANULE // 1024))
    while time.process_time() < end:
        block[0] = (block[0] + 1) % 256
    return Claim(_cheapest(problem), None)


def interrupt_parent(
    problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent
) -> Claim:
    """Find something, then press Ctrl-C in the parent."""
    import signal

    incumbent(_cheapest(problem))
    time.sleep(0.3)
    os.kill(os.getppid(), signal.SIGINT)
    while True:
        time.sleep(60)


def tree_whose_root_fails(
    problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent
) -> Claim:
    """Branch and bound to single assignments, where HiGHS gives no duals for the first relaxation of a tree."""
    from formulations.solvers.branching import branch_and_bound

    class Failing(branch_and_bound.Relaxation):
        failed = False

        def solve(self, allowed, deadline):
            relaxed = super().solve(allowed, deadline)
            first, self.failed = not self.failed, True
            return replace(relaxed, proof=None, duals=None, closed=False) if first else relaxed

    original, branch_and_bound.Relaxation = branch_and_bound.Relaxation, Failing
    try:
        return branch_and_bound.solve(problem, options, report, incumbent, most_enumerated=1)
    finally:
        branch_and_bound.Relaxation = original


def highs_lazily(
    problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent
) -> Claim:
    """HiGHS as on a large problem: usage rows only where a solution exceeds a limit."""
    from formulations.solvers.exact import highs, lazy_rows

    lazy_rows.EAGER_ENTRIES = -1
    return highs.solve(problem, options, report, incumbent)


def cpsat_lazily(
    problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent
) -> Claim:
    """CP-SAT as on a large problem: limits only where a solution exceeds them."""
    from formulations.solvers.exact import cpsat

    cpsat.EAGER_TERMS = -1
    return cpsat.solve(problem, options, report, incumbent)


def listen(
    problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent
) -> Claim:
    """Wait for what another solver found, and claim it."""
    from formulations.solvers.protocol.exchange import EXCHANGE

    while (found := EXCHANGE.take(problem)) is None:
        time.sleep(0.01)
    return Claim(found, None)


def listen_for_bound(
    problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent
) -> Claim:
    """Wait for a bound that another solver proved, and tell of it."""
    from formulations.solvers.protocol.exchange import EXCHANGE

    while (bound := EXCHANGE.bound(problem)) is None:
        time.sleep(0.01)
    return Claim(None, None, message=f"heard {bound}")


def highs_told(
    problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent
) -> Claim:
    """HiGHS that hears of ``options.initial_choices`` from another solver instead of starting with them."""
    from formulations.solvers.exact import highs
    from formulations.solvers.protocol.exchange import EXCHANGE, Update

    EXCHANGE.publish(Update(choices=options.initial_choices))
    return highs.solve(problem, replace(options, initial_choices=None), report, incumbent)


def gives_up(
    problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent
) -> Claim:
    """Return what is cheapest long before the time limit, with more to search."""
    return Claim(_cheapest(problem), None)


def claim_optimal(
    problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent
) -> Claim:
    """Return what is cheapest by itself and claim that it is optimal."""
    choices = _cheapest(problem)
    return Claim(choices, None, claimed=check(problem, choices).objective, complete=True)


def tree_without_enumeration(
    problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent
) -> Claim:
    """Branch and bound down to single assignments, so that its bounds decide small problems too."""
    from formulations.solvers.branching import branch_and_bound

    return branch_and_bound.solve(problem, options, report, incumbent, most_enumerated=1)


def slow_bound(
    problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent
) -> Claim:
    """Claim a bound, not at once."""
    time.sleep(3)
    return Claim(None, 0)
