r"""CP-SAT on the canonical problem: one literal per strategy, one per entry of a factor that costs or uses.

Encoded straight from the problem and not from the linear model, so that HiGHS and CP-SAT share no
reformulation: where they agree that nothing fits, two independent encodings agree.

- ``exactly_one(x_i)`` per node; forbidden strategies are false.
- A factor without costs and usage: one clause per forbidden combination.
- Any other factor: a literal ``e`` per allowed entry and, per axis and strategy ``s``,
  ``exactly_one(e with s, not x_s)``, which is the equality :math:`\sum e = x_s`.
- Usage at every time where something starts (usage rises nowhere else); on large problems only where
  a solution was found to exceed a limit.

Coefficients are exact int64. Where sums do not fit, costs and usages are divided by a quantum and rounded
**down**: a relaxation, whose bound and infeasibility stay valid, and whose solutions are replayed. CP-SAT works in
integers but is no proof that anybody else can check: its bounds are claimed.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import BoolArray, IntArray, StrategyProblem, UsageTerm
from formulations.solvers.exact.tunables import EAGER_TERMS
from formulations.solvers.protocol.exchange import EXCHANGE
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress

_LARGEST_SUM = 1 << 60
"""Not tunable: CP-SAT refuses constraints whose coefficients could sum to more."""

_BOUND_PRECISION = 2.0**-46
"""Not tunable: CP-SAT adds and removes offsets in doubles."""


def solve(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Solve with one CP-SAT worker, exactly or to ``options.relative_gap``."""
    return _Search(problem, options, report, incumbent).run()


@dataclass(frozen=True, slots=True)
class _Use:
    """Literals of one table and what they use during ``[start, end)`` beyond ``least``."""

    start: int
    end: int
    literals: list[Any]
    amounts: list[int]
    least: int


class _Encoding:
    """The CP-SAT model of a problem."""

    def __init__(self, problem: StrategyProblem) -> None:
        from ortools.sat.python import cp_model

        self.library = cp_model
        self.problem = problem
        self.model = cp_model.CpModel()
        self.literals = [[self.model.new_bool_var("") for _ in range(node.size)] for node in problem.nodes]
        self.constant = 0
        self.uses: list[list[_Use]] = [[] for _ in problem.resources]
        self._costed: list[tuple[list[Any], list[int]]] = []
        for literals, node in zip(self.literals, problem.nodes, strict=True):
            self.model.add_exactly_one(literals)
            flags = node.forbidden if node.forbidden is not None else np.zeros(node.size, dtype=np.bool_)
            for literal in itertools.compress(literals, flags):
                self.model.add(literal == 0)
            self._add_table(literals, node.cost, flags, node.usage)
        for factor in problem.factors:
            self._add_factor(factor.scope, factor.cost, factor.forbidden, factor.usage)
        self.total_cost: int = sum(sum(costs) for _, costs in self._costed)
        self.quantum = self._minimise()

    def _add_factor(
        self, scope: tuple[int, ...], cost: IntArray, forbidden: BoolArray | None, usage: tuple[UsageTerm, ...]
    ) -> None:
        flags = forbidden if forbidden is not None else np.zeros(cost.shape, dtype=np.bool_)
        used = [t for t in usage if self._counts(t)]
        if not used and int(cost.min()) == int(cost.max()):
            self.constant += int(cost.flat[0])
            for entry in np.argwhere(flags):
                chosen = [self.literals[i][s] for i, s in zip(scope, entry.tolist(), strict=True)]
                self.model.add_bool_or([literal.negated() for literal in chosen])
            return
        allowed = np.argwhere(~flags)
        entries = [self.model.new_bool_var("") for _ in range(len(allowed))]
        for axis, i in enumerate(scope):
            members: list[list[Any]] = [[x.negated()] for x in self.literals[i]]
            for literal, strategy in zip(entries, allowed[:, axis].tolist(), strict=True):
                members[strategy].append(literal)
            for member in members:
                self.model.add_exactly_one(member)
        spread = [UsageTerm(t.resource, t.start, t.end, t.amount[~flags]) for t in used]
        self._add_table(entries, cost[~flags], np.zeros(len(entries), dtype=np.bool_), tuple(spread))

    def _add_table(self, literals: list[Any], cost: IntArray, flags: BoolArray, usage: tuple[UsageTerm, ...]) -> None:
        if flags.all():
            return
        kept = list(itertools.compress(literals, ~flags))
        costs = [int(c) for c in cost[~flags]]
        self.constant += min(costs)
        self._costed.append((kept, [c - min(costs) for c in costs]))
        for term in usage:
            if self._counts(term):
                amounts = [int(a) for a in term.amount[~flags]]
                least = min(amounts)
                use = _Use(term.start, term.end, kept, [a - least for a in amounts], least)
                self.uses[term.resource].append(use)

    def _counts(self, term: UsageTerm) -> bool:
        limited = self.problem.resources[term.resource].limit is not None
        return limited and term.start < term.end and bool(term.amount.any())

    def _minimise(self) -> int:
        quantum = self.total_cost // _LARGEST_SUM + 1
        literals = [literal for table, _ in self._costed for literal in table]
        costs = [c // quantum for _, table in self._costed for c in table]
        self.model.minimize(self.library.LinearExpr.weighted_sum(literals, costs))
        return quantum

    def times(self, resource: int) -> list[int]:
        """Times at which usage can rise, ascending."""
        return sorted({use.start for use in self.uses[resource]})

    def limit_usage(self, resource: int, time_: int) -> None:
        """Demand that the usage at one time fits; nothing is added where every choice fits."""
        limit = self.problem.resources[resource].limit
        active = [use for use in self.uses[resource] if use.start <= time_ < use.end]
        if limit is None:
            return
        slack = limit - sum(use.least for use in active)
        if sum(max(use.amounts) for use in active) <= slack:
            return
        if slack < 0:
            self.model.add_bool_or([])
            return
        total: int = sum(sum(use.amounts) for use in active)
        shift = max(0, total.bit_length() - _LARGEST_SUM.bit_length())
        literals = [literal for use in active for literal in use.literals]
        amounts = [a >> shift for use in active for a in use.amounts]
        self.model.add(self.library.LinearExpr.weighted_sum(literals, amounts) <= slack >> shift)

    def exclude(self, choices: tuple[int, ...]) -> None:
        """Exclude one assignment (its rounded usage fits, its exact usage does not)."""
        chosen = [literals[s] for literals, s in zip(self.literals, choices, strict=True)]
        self.model.add_bool_or([literal.negated() for literal in chosen])

    def cost_at_least(self, bound: int | None) -> None:
        """Search only among assignments that cost ``bound`` or more; no effect where costs are rounded."""
        domain = self.model.proto.objective.domain
        domain.clear()
        if bound is not None and self.quantum == 1 and 0 < bound - self.constant <= _LARGEST_SUM:
            domain.extend((bound - self.constant, _LARGEST_SUM))

    def hint(self, choices: tuple[int, ...]) -> None:
        """Suggest an assignment as a start."""
        self.model.clear_hints()
        for literals, choice in zip(self.literals, choices, strict=True):
            for s, literal in enumerate(literals):
                self.model.add_hint(literal, int(s == choice))


class _Search:
    """State of one solve."""

    def __init__(
        self, problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent
    ) -> None:
        self.started = time.monotonic()
        self.problem, self.options, self.report, self.incumbent = problem, options, report, incumbent
        self.encoding = _Encoding(problem)
        self.best: tuple[int, tuple[int, ...]] | None = None
        self.bound = self.encoding.constant
        self.rounds = 0
        self.limited: set[tuple[int, int]] = set()

    def run(self) -> Claim:
        encoding = self.encoding
        self.report_progress()
        for resource in range(len(self.problem.resources)):
            times = encoding.times(resource)
            if len(times) * len(encoding.uses[resource]) <= EAGER_TERMS:
                self.limit(resource, times)
        start = self.options.initial_choices
        if start is not None:
            encoding.hint(start)
            if not self.overloads(start):
                self.offer(start)
        trusts_others = True
        while (remaining := self.options.time_limit - (time.monotonic() - self.started)) > 0:
            self.rounds += 1
            floor = EXCHANGE.bound(self.problem) if trusts_others else None
            encoding.cost_at_least(floor)
            status, choices = self.solve_once(remaining)
            library = encoding.library
            if status == library.INFEASIBLE and floor is not None:
                trusts_others = False  # infeasibility has to be shown without their help
                continue
            if status == library.INFEASIBLE:
                return self.claim(proved_infeasible=True, message="INFEASIBLE")
            if status == library.MODEL_INVALID:
                raise ValueError(f"CP-SAT rejects problem {self.problem.name}: {encoding.model.validate()}")
            overloads = self.overloads(choices) if choices is not None else []
            if choices is None or not overloads:
                return self.claim(message=str(status).rpartition(".")[2], complete=status == library.OPTIMAL)
            fresh = [(r, t) for r, t in overloads if (r, t) not in self.limited]
            for resource, time_ in fresh:
                self.limit(resource, [time_])
            if not fresh:
                encoding.exclude(choices)
        return self.claim(message="time limit")

    def limit(self, resource: int, times: list[int]) -> None:
        for time_ in times:
            self.limited.add((resource, time_))
            self.encoding.limit_usage(resource, time_)

    def solve_once(self, remaining: float) -> tuple[Any, tuple[int, ...] | None]:
        library, search = self.encoding.library, self
        solver = library.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = self.options.seed % (1 << 31)
        solver.parameters.max_time_in_seconds = remaining
        solver.parameters.relative_gap_limit = self.options.relative_gap
        # The default ends the search where bound and objective are equal as doubles: units apart beyond 2^53.
        solver.parameters.absolute_gap_limit = 0.0
        # This presolve step certifies wrong optima in 9.15 (or-tools issue 5293; ours is among the tests).
        solver.parameters.presolve_inclusion_work_limit = 0

        class Listener(library.CpSolverSolutionCallback):  # type: ignore[name-defined, misc]
            """Hands every solution that fits to the search."""

            def on_solution_callback(self) -> None:
                choices = search.decode(self.response_proto.solution)
                if not search.overloads(choices):
                    search.offer(choices)

        solver.best_bound_callback = self.raise_bound
        status = solver.solve(self.encoding.model, Listener())
        if status not in (library.OPTIMAL, library.FEASIBLE):
            if status == library.UNKNOWN:
                self.raise_bound(solver.best_objective_bound)
            return status, None
        choices = self.decode(solver.response_proto.solution)
        # A double cannot hold a large objective exactly; an optimal one is recomputed.
        exact = status == library.OPTIMAL and self.options.relative_gap == 0
        self.raise_bound(self.rounded_objective(choices) if exact else solver.best_objective_bound)
        return status, choices

    def decode(self, values: Any) -> tuple[int, ...]:
        solution = np.array(values, dtype=np.int64)
        sizes = [node.size for node in self.problem.nodes]
        ones = np.flatnonzero(solution[: sum(sizes)])
        return tuple((ones - (np.cumsum(sizes) - sizes)).tolist())

    def rounded_objective(self, choices: tuple[int, ...]) -> int:
        """Cost of an assignment as the model sees it: tables normalised, entries rounded to the quantum."""
        total = 0
        quantum = self.encoding.quantum
        for scope, cost, forbidden in _tables(self.problem):
            least = int(cost.min() if forbidden is None or forbidden.all() else cost[~forbidden].min())
            total += (int(cost[tuple(choices[i] for i in scope)]) - least) // quantum
        return total

    def overloads(self, choices: tuple[int, ...]) -> list[tuple[int, int]]:
        """Resource and worst time of every limit that an assignment exceeds, in exact integers."""
        found = []
        for r, resource in enumerate(self.problem.resources):
            if resource.limit is None:
                continue
            change: dict[int, int] = {}
            for scope, term in self.problem.usage_terms():
                if term.resource == r and term.start < term.end:
                    amount = int(term.amount[tuple(choices[i] for i in scope)])
                    change[term.start] = change.get(term.start, 0) + amount
                    change[term.end] = change.get(term.end, 0) - amount
            times = sorted(change)
            usage = list(itertools.accumulate(change[t] for t in times))
            worst = max(range(len(times)), key=usage.__getitem__, default=None)
            if worst is not None and usage[worst] > resource.limit:
                found.append((r, times[worst]))
        return found

    def offer(self, choices: tuple[int, ...]) -> None:
        objective = sum(int(c[tuple(choices[i] for i in scope)]) for scope, c, _ in _tables(self.problem))
        if self.best is None or objective < self.best[0]:
            self.best = (objective, choices)
            self.incumbent(choices)
            self.report_progress()

    def raise_bound(self, rounded: float) -> None:
        """Keep a bound of the model, lowered where a double may have rounded it up."""
        if not math.isfinite(rounded):
            return
        error = 1e-6 + self.encoding.total_cost / self.encoding.quantum * _BOUND_PRECISION
        steps = rounded if isinstance(rounded, int) else math.ceil(Fraction(rounded) - Fraction(error))
        bound = self.encoding.constant + steps * self.encoding.quantum
        if bound > self.bound:
            self.bound = bound
            self.report_progress()

    def report_progress(self) -> None:
        objective = self.best[0] if self.best else None
        self.report(Progress(time.monotonic() - self.started, objective, None, "cpsat", claimed=self.bound))

    def claim(self, message: str, *, proved_infeasible: bool = False, complete: bool = False) -> Claim:
        """Return what was found; a search that is complete claims that the best assignment is optimal."""
        objective, choices = self.best if self.best else (None, None)
        exact_costs = self.encoding.quantum == 1 and self.options.relative_gap == 0.0
        claimed = objective if complete and exact_costs else self.bound
        if proved_infeasible:
            claimed = None
        return Claim(choices, None, proved_infeasible, message, self.rounds, claimed=claimed, complete=complete)


def _tables(problem: StrategyProblem) -> list[tuple[tuple[int, ...], IntArray, BoolArray | None]]:
    nodes = [((i,), node.cost, node.forbidden) for i, node in enumerate(problem.nodes)]
    return [*nodes, *((factor.scope, factor.cost, factor.forbidden) for factor in problem.factors)]
