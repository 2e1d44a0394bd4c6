"""The worker's side of :mod:`formulations.h3t.free`: HiGHS on the free program until the simulator agrees.

CP-SAT takes its place where the question is whether anything fits; it needs a process of its own, as it brings a HiGHS.
A step arrives as text beside an empty canonical problem; a sequence of switches leaves as the choices of a claim.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from itertools import product

import numpy as np

from formulations.encodings.pyomo_program import Values
from formulations.h3t.operations import ALL_ON, Switch
from formulations.h3t.problem import H3tBorders, H3tLayer, H3tStep, Optimizer, simulate_sequences
from formulations.h3t.program import FreeProgram
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import IntArray, StrategyProblem
from formulations.solvers.programs.branch_and_cut import solve_program
from formulations.solvers.programs.existence import find_solution
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress

_SIMULATED_LAYERS = 2**15
"""Layers of all sequences together that are simulated for one cut: a few hundredths of a second."""

__all__ = ["solve", "step_as_text", "step_of_text"]


def step_as_text(step: H3tStep) -> str:
    """Write a step as JSON."""
    return json.dumps(asdict(step))


def step_of_text(text: str) -> H3tStep:
    """Read what :func:`step_as_text` wrote."""
    fields = json.loads(text)
    fields["layers"] = tuple(H3tLayer(**layer) for layer in fields["layers"])
    fields["borders"] = H3tBorders(**fields["borders"])
    fields["optimizer"] = Optimizer(fields["optimizer"])
    return H3tStep(**fields)


def solve(
    problem: StrategyProblem,
    options: SolveOptions,
    report: ReportProgress,
    incumbent: ReportIncumbent,
    *,
    step: str,
    cutoff: int,
) -> Claim:
    """Look for a sequence that costs at most ``cutoff``; ``problem`` is empty.

    The claim's bound is above ``cutoff`` where HiGHS says that there is none.
    """
    return _Search(step_of_text(step), cutoff, options, report, incumbent).run()


def confirm(
    problem: StrategyProblem,
    options: SolveOptions,
    report: ReportProgress,
    incumbent: ReportIncumbent,
    *,
    step: str,
    cutoff: int,
    costs_at_most: bool = False,
) -> Claim:
    """Look for any sequence that fits, by CP-SAT; ``problem`` is empty.

    ``cutoff`` is what none takes longer than, or with ``costs_at_most`` what it may cost at most.
    """
    return _Search(step_of_text(step), cutoff, options, report, incumbent).run_existence(costs_at_most)


class _Search:
    """Solves, simulates, forbids what does not fit, and solves again."""

    def __init__(
        self, step: H3tStep, cutoff: int, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent
    ) -> None:
        self.started = time.monotonic()
        self.step, self.cutoff, self.options = step, cutoff, options
        self.report, self.incumbent = report, incumbent
        self.program = FreeProgram(step, cutoff)
        self.bound: int | None = None
        self.best: tuple[int, tuple[int, ...]] | None = None
        self.forbidden: set[tuple[int, ...]] = set()

    def run(self) -> Claim:
        deadline = self.started + self.options.time_limit
        rounds = 0
        while True:
            rounds += 1
            cutoff = min(self.cutoff, self.best[0] - 1 if self.best else self.cutoff)
            outcome = solve_program(
                self.program.program(),
                deadline,
                self.options.seed,
                self._look_at,
                self._hear_bound,
                cutoff - self.program.constant,
            )
            if outcome.bound is not None:
                self._hear_bound(outcome.bound)
            if outcome.values is not None:
                self._look_at(outcome.values)
            proven = self.best is not None and self.best[0] == self.bound
            if proven or not outcome.finished or outcome.values is None:
                return Claim(self._choices, self.bound, message=self._words(outcome.message), iterations=rounds)

    def run_existence(self, costs_at_most: bool) -> Claim:
        deadline = self.started + self.options.time_limit
        most = self.cutoff - self.program.constant if costs_at_most else None
        while True:
            found = find_solution(self.program.program(), deadline - time.monotonic(), self.options.seed, most)
            if found.values is not None:
                self._look_at(found.values)
            if found.values is None or self.best is not None:
                words = self._words(found.message)
                return Claim(self._choices, None, proved_infeasible=found.infeasible, message=words)

    @property
    def _choices(self) -> tuple[int, ...] | None:
        return None if self.best is None else self.best[1]

    def _words(self, message: str) -> str:
        return f"{message}, {len(self.forbidden)} sequences forbidden"

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
        known = self.cutoff + 1 if self.best is None else self.best[0]
        better = np.flatnonzero((found[:, 1] <= self.step.memory_limit) & (found[:, 0] < known))
        if len(better):
            row = int(better[found[better, 0].argmin()])
            sequence = tuple(sequences[row].tolist())
            self.best = (int(found[row, 0]), sequence)
            self.incumbent(sequence)
        return not len(better)

    def _hear_bound(self, bound: int) -> None:
        """A bound of the program: what is forbidden and fits costs at least as much as the best that is known."""
        known = bound + self.program.constant
        if self.best is not None:
            known = min(known, self.best[0])
        if self.bound is None or known > self.bound:
            self.bound = known
            cost = self.best[0] if self.best else None
            self.report(Progress(time.monotonic() - self.started, cost, self.bound, "highs"))
