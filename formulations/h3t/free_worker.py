"""The worker's side of :mod:`formulations.h3t.free`: HiGHS on the free program until the simulator agrees.

CP-SAT takes its place where the question is whether anything fits; it needs a process of its own, as it brings a HiGHS.
The canonical problem is empty; a sequence of switches leaves as the choices of a claim.
"""

from __future__ import annotations

import time
from itertools import product

import numpy as np

from formulations.encodings.pyomo_program import Values
from formulations.h3t.operations import ALL_ON, Switch
from formulations.h3t.problem import H3tStep, simulate_sequences
from formulations.h3t.program import FreeProgram
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import IntArray, StrategyProblem
from formulations.solvers.programs.branch_and_cut import solve_program
from formulations.solvers.programs.existence import find_solution
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress

_SIMULATED_LAYERS = 2**15
"""Layers of all sequences together that are simulated for one cut: a few hundredths of a second."""

__all__ = ["confirm", "solve"]


def solve(
    problem: StrategyProblem,
    options: SolveOptions,
    report: ReportProgress,
    incumbent: ReportIncumbent,
    *,
    step: H3tStep,
    cutoff: int,
) -> Claim:
    """Look for a sequence that costs at most `cutoff`; the claim's bound is above it where HiGHS says there is none."""
    return _Search(step, cutoff, options, report, incumbent).run()


def confirm(
    problem: StrategyProblem,
    options: SolveOptions,
    report: ReportProgress,
    incumbent: ReportIncumbent,
    *,
    step: H3tStep,
    cutoff: int,
) -> Claim:
    """Look for any sequence that fits and costs at most `cutoff`, by CP-SAT."""
    return _Search(step, cutoff, options, report, incumbent).run_existence()


class _Search:
    """Solves, simulates, forbids what does not fit, and solves again."""

    def __init__(
        self, step: H3tStep, cutoff: int, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent
    ) -> None:
        self.started = time.monotonic()
        self.deadline = self.started + options.time_limit
        self.step, self.cutoff, self.seed = step, cutoff, options.seed
        self.report, self.incumbent = report, incumbent
        self.program = FreeProgram(step, cutoff)
        self.bound: int | None = None
        self.best: tuple[int, tuple[int, ...]] | None = None
        self.forbidden: set[tuple[int, ...]] = set()

    def run(self) -> Claim:
        while True:
            outcome = solve_program(
                self.program.program(),
                self.deadline,
                self.seed,
                self._look_at,
                self._hear_bound,
                self._most - self.program.constant,
            )
            if outcome.bound is not None:
                self._hear_bound(outcome.bound)
            if outcome.values is not None:
                self._look_at(outcome.values)
            proven = self.best is not None and self.best[0] == self.bound
            if proven or not outcome.finished or outcome.values is None:
                return self._claim(outcome.message)

    def run_existence(self) -> Claim:
        while True:
            most = self.cutoff - self.program.constant
            found = find_solution(self.program.program(), self.deadline - time.monotonic(), self.seed, most)
            if found.values is not None:
                self._look_at(found.values)
            if found.values is None or self.best is not None:
                return self._claim(found.message, proved_infeasible=found.infeasible)

    @property
    def _most(self) -> int:
        """Cost above which sequences are of no interest."""
        return self.cutoff if self.best is None else self.best[0] - 1

    def _claim(self, message: str, *, proved_infeasible: bool = False) -> Claim:
        choices = None if self.best is None else self.best[1]
        return Claim(choices, self.bound, proved_infeasible, f"{message}, {len(self.forbidden)} sequences forbidden")

    def _look_at(self, values: Values) -> None:
        """Simulate what a solution says, and cut it off with all that differ in some switches and are no better."""
        sequence = self.program.sequence(values)
        if sequence in self.forbidden:
            return
        self.forbidden.add(sequence)
        likewise = np.array([sequence], dtype=np.int64)
        self._offer(likewise)
        compared = [int(ALL_ON)] * len(sequence)
        most = _SIMULATED_LAYERS // len(sequence)
        for layer, switch in product(reversed(range(len(sequence))), Switch):
            if len(likewise) >= most:
                break
            other = likewise.copy()
            other[:, layer] ^= int(switch)
            if self._offer(other):
                compared[layer] ^= int(switch)
                likewise = np.concatenate([likewise, other])
        self.program.forbid(sequence, compared)

    def _offer(self, sequences: IntArray) -> bool:
        """Simulate sequences and keep the best; whether nothing among them is faster than what was known."""
        found = simulate_sequences(self.step, sequences)
        better = np.flatnonzero((found[:, 1] <= self.step.memory_limit) & (found[:, 0] <= self._most))
        if len(better):
            row = int(better[found[better, 0].argmin()])
            sequence = tuple(sequences[row].tolist())
            self.best = (int(found[row, 0]), sequence)
            self.incumbent(sequence)
        return not len(better)

    def _hear_bound(self, bound: int) -> None:
        """A bound of the program: what is forbidden and fits costs at least as much as the best that is known."""
        cost = None if self.best is None else self.best[0]
        known = bound + self.program.constant
        known = known if cost is None else min(known, cost)
        if self.bound is None or known > self.bound:
            self.bound = known
            self.report(Progress(time.monotonic() - self.started, cost, self.bound, "highs"))
