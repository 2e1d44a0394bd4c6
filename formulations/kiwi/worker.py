"""The worker's side of :mod:`formulations.kiwi.solve`: programs of KIWI's problems, solved until a replay fits.

A graph arrives as text beside an empty canonical problem, and a decision leaves as the choices of a claim: one
strategy per operator, then per stage the operators that it computes as the bits of an integer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType

from formulations.encodings.pyomo_program import Values
from formulations.kiwi.full_published import PublishedModel
from formulations.kiwi.full_staged import StagedModel
from formulations.kiwi.graph import KiwiGraph
from formulations.kiwi.program import KiwiProgram, Moment
from formulations.kiwi.reduced_published import PublishedReducedModel
from formulations.kiwi.reduced_staged import ReducedStagedModel
from formulations.kiwi.schedule import StagedDecision, replay
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.programs.branch_and_cut import ProgramOutcome, solve_program
from formulations.solvers.programs.existence import find_solution
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress

MODELS: Mapping[str, type[KiwiProgram]] = MappingProxyType(
    {
        "kiwi_full": StagedModel,
        "kiwi_full_published": PublishedModel,
        "kiwi_reduced": ReducedStagedModel,
        "kiwi_reduced_published": PublishedReducedModel,
    }
)
"""Formulations by name; those without ``published`` are in stages: fast, and with true liveness."""


def encode(decision: StagedDecision) -> tuple[int, ...]:
    """Write a decision as integers."""
    return (*decision.strategies, *(sum(1 << i for i in stage) for stage in decision.stages))


def decode(graph: KiwiGraph, choices: tuple[int, ...]) -> StagedDecision:
    """Read what :func:`encode` wrote."""
    count = len(graph.operators)
    stages = tuple(tuple(i for i in range(count) if bits >> i & 1) for bits in choices[count:])
    return StagedDecision(choices[:count], stages)


def solve(
    problem: StrategyProblem,
    options: SolveOptions,
    report: ReportProgress,
    incumbent: ReportIncumbent,
    *,
    graph: str,
    memory_limit: int,
    formulation: str,
) -> Claim:
    """Minimise with HiGHS; ``problem`` is empty, the keywords say what is solved."""
    return _Search(KiwiGraph.from_json(graph), memory_limit, formulation, options, report, incumbent).run()


def confirm(
    problem: StrategyProblem,
    options: SolveOptions,
    report: ReportProgress,
    incumbent: ReportIncumbent,
    *,
    graph: str,
    memory_limit: int,
    formulation: str,
    most_cost: int | None = None,
) -> Claim:
    """Find a decision that fits and costs at most ``most_cost`` with CP-SAT, or claim that there is none.

    Other arguments as of :func:`solve`.
    """
    instance = KiwiGraph.from_json(graph)
    model = MODELS[formulation](instance, memory_limit)
    deadline = time.monotonic() + options.time_limit
    while True:
        found = find_solution(model.program(), deadline - time.monotonic(), options.seed, most_cost)
        if found.values is None:
            return Claim(None, None, proved_infeasible=found.infeasible, message=found.message)
        decision = model.decision(found.values)
        over = replay(instance, decision).over(memory_limit)
        if not over:
            return Claim(encode(decision), None)
        if not model.refine(over):
            return Claim(None, None, message="CP-SAT found a decision whose replay exceeds the limit")


class _Search:
    """Solves a model, replays, adds what the replay finds, and solves again."""

    def __init__(
        self,
        graph: KiwiGraph,
        memory_limit: int,
        formulation: str,
        options: SolveOptions,
        report: ReportProgress,
        incumbent: ReportIncumbent,
    ) -> None:
        self.started = time.monotonic()
        self.graph, self.memory_limit, self.options = graph, memory_limit, options
        self.report, self.incumbent = report, incumbent
        self.model = MODELS[formulation](graph, memory_limit)
        self.best: tuple[int, StagedDecision] | None = None
        self.bound: int | None = None
        self.rounds = 0

    def run(self) -> Claim:
        deadline = self.started + self.options.time_limit
        while True:
            self.rounds += 1
            # RINS and RENS find nothing here that the tree does not: without them proofs take 5 to 25 % less.
            outcome = solve_program(
                self.model.program(), deadline, self.options.seed, self._on_values, self._raise_bound, sub_mips=False
            )
            if outcome.infeasible:
                return Claim(None, None, proved_infeasible=True, message=outcome.message, iterations=self.rounds)
            if outcome.bound is not None:
                self._raise_bound(outcome.bound)
            if self._is_done(outcome):
                choices = None if self.best is None else encode(self.best[1])
                message = f"{outcome.message} in round {self.rounds}"
                return Claim(choices, None, message=message, iterations=self.rounds, claimed=self.bound)

    def _is_done(self, outcome: ProgramOutcome) -> bool:
        """Whether another round would find nothing; if not, the model is refined for it."""
        over = [] if outcome.values is None else self._keep(outcome.values)
        return not outcome.finished or not over or not self.model.refine(over)

    def _on_values(self, values: Values) -> None:
        self._keep(values)

    def _keep(self, values: Values) -> list[Moment]:
        """Replay a solution and keep it if it fits and is better; return where it is over the limit."""
        decision = self.model.decision(values)
        replayed = replay(self.graph, decision)
        over = replayed.over(self.memory_limit)
        if not over and (self.best is None or replayed.cost < self.best[0]):
            self.best = (replayed.cost, decision)
            self.incumbent(encode(decision))
            self._publish()
        return over

    def _raise_bound(self, bound: int) -> None:
        if self.bound is None or bound > self.bound:
            self.bound = bound
            self._publish()

    def _publish(self) -> None:
        cost = self.best[0] if self.best else None
        self.report(Progress(time.monotonic() - self.started, cost, None, "highs", claimed=self.bound))
