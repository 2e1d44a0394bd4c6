"""Linear relaxation of a problem under branching, of which only exact evaluations are believed.

HiGHS solves the linear program of what a branch allows, warm from the last one, with usage rows added as they are
violated. Its duals become prices and messages (:mod:`formulations.solvers.exact.dual_evaluation`), and these an exact
bound on the branch. Where the program is infeasible, its dual ray is evaluated with all costs zero: if that bound is
above zero, the branch has no assignment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from formulations.encodings.flat import FlatProblem, FloatArray
from formulations.encodings.flat_restriction import FORBIDDEN_SHARE, restrict
from formulations.encodings.linear_model import build_linear_model
from formulations.problem.strategy_problem import BoolArray, StrategyProblem
from formulations.solvers.exact.dual_evaluation import DualEvaluation
from formulations.solvers.exact.highs_session import CostScale, HighsSession, Outcome
from formulations.solvers.exact.lazy_rows import LazyRows
from formulations.solvers.prices.integer_bound import IntegerBound, integer_bound

_LEAST_VALUE = 1e-6
"""Not tunable: values of columns below it are rounding errors."""


@dataclass(frozen=True, slots=True, eq=False)
class Relaxed:
    """A branch after its relaxation.

    Parameters
    ----------
    allowed
        Flags of the strategies left, laid out as ``unary`` of the flat problem.
    proof
        The exact evaluation with the strategies of ``allowed``; None where 64 bits do not hold it.
    closed
        Whether the branch has no assignment, in exact integers.
    duals
        Prices and messages of the whole problem behind ``proof``, or None.
    values
        Value of every strategy in the relaxation, laid out alike; None where it was not solved.
    """

    allowed: BoolArray
    proof: IntegerBound | None
    closed: bool
    duals: tuple[FloatArray, FloatArray] | None = None
    values: FloatArray | None = None


class Relaxation:
    """The linear relaxation of a problem and of its branches.

    Parameters
    ----------
    problem, flat
        A problem, and the same in flat arrays that hold its costs exactly.
    seed
        Of HiGHS.
    """

    def __init__(self, problem: StrategyProblem, flat: FlatProblem, seed: int) -> None:
        self._flat = flat
        self._without_costs = _without_costs(flat)
        model = build_linear_model(problem)
        self._scale = CostScale.of(model.cost)
        self._session = HighsSession(model, self._scale.apply(model.cost), seed)
        self._rows = LazyRows(self._session)
        self._rows.add_all_if_few()
        self._limits = [None if table.limit is None else float(table.limit) for table in model.usage]
        self._duals = DualEvaluation(model, flat)
        starts = model.group_start[: len(flat.supported)]
        self._columns = np.concatenate([start + kept for start, kept in zip(starts, flat.supported, strict=True)])
        self._possible = model.allowed[: model.one_hot_columns]

    def solve(self, allowed: BoolArray, deadline: float) -> Relaxed:
        """Solve the relaxation of a branch, until ``deadline`` (of :func:`time.monotonic`) at most."""
        flags = np.zeros_like(self._possible)
        flags[self._columns[allowed]] = True
        self._session.allow_only(flags & self._possible)
        outcome = self._session.run(deadline)
        while outcome.finished and outcome.values is not None:
            if not self._rows.add_violated(outcome.values, self._limits):
                break
            outcome = self._session.run(deadline)
        return self._evaluated(allowed, outcome)

    def _evaluated(self, allowed: BoolArray, outcome: Outcome) -> Relaxed:
        restriction = restrict(self._flat, allowed)
        if restriction is None:
            return Relaxed(allowed, None, True)
        left = np.zeros_like(allowed)
        left[restriction.entries] = True
        if outcome.row_dual is None:
            return Relaxed(left, None, False)
        prices, messages = self._duals.prices_and_messages(outcome.row_dual, self._session.added_rows, self._scale)
        if outcome.infeasible:
            empty = restrict(self._without_costs, allowed)
            proof = None if empty is None else integer_bound(empty.flat, prices, messages[empty.messages])
            return Relaxed(left, None, empty is None or (proof is not None and _is_positive(proof)))
        proof = integer_bound(restriction.flat, prices, messages[restriction.messages])
        values = None
        if outcome.values is not None:
            values = np.where(left, outcome.values[self._columns], 0.0)
            values[values < _LEAST_VALUE] = 0.0
        return Relaxed(left, proof, proof is not None and proof.contradiction, (prices, messages), values)


def _is_positive(proof: IntegerBound) -> bool:
    return proof.contradiction or proof.total > 0


def _without_costs(flat: FlatProblem) -> FlatProblem:
    """The problem with all costs zero; forbidden combinations stay forbidden."""
    limit = FORBIDDEN_SHARE * flat.penalty
    unary, tables = (np.where(values < limit, 0.0, flat.penalty) for values in (flat.unary, flat.tables))
    return replace(flat, unary=unary, tables=tables)
