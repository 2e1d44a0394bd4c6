r"""Duals of the linear model as prices and messages of the flat problem, for exact bounds.

HiGHS solves its linear programs in floating point, so that their values prove nothing. But weak duality holds for any
duals: the dual of a marginal row :math:`\sum_{e: e_k = s} e = x_{i,s}` is the message :math:`m_{f,i}(s)`, and the
negative dual of a usage row is the price :math:`\mu_t` of :mod:`formulations.solvers.prices.dual_bound`. Evaluated
there in integers, they give a bound on which no tolerance and no rounding has an influence. The messages of factors
that the linear model folded into costs of nodes are what it folded.
"""

from __future__ import annotations

import numpy as np

from formulations.encodings.flat import FlatProblem, FloatArray, message_entries
from formulations.encodings.flat_restriction import FORBIDDEN_SHARE
from formulations.encodings.linear_model import LinearModel
from formulations.problem.strategy_problem import IntArray
from formulations.solvers.exact.highs_session import AddedRow, CostScale


class DualEvaluation:
    """From row duals of a linear model to prices and messages.

    Parameters
    ----------
    model
        The linear model of a problem.
    flat
        The same problem in flat arrays, without contradiction.
    """

    def __init__(self, model: LinearModel, flat: FlatProblem) -> None:
        self._flat, self._structural = flat, len(model.row_rhs)
        self._cost_unit = 2.0**model.cost_shift
        self._row_of_message, self._folded = _message_rows(model, flat)
        rows = zip(flat.rows.resource.tolist(), flat.rows.time.tolist(), strict=True)
        self._place = {key: place for place, key in enumerate(rows)}

    def prices_and_messages(
        self, row_dual: FloatArray, added: list[AddedRow | None], scale: CostScale
    ) -> tuple[FloatArray, FloatArray]:
        """Return prices per row of flat usage and messages, in the problem's cost quanta.

        Parameters
        ----------
        row_dual
            Structural rows first, then those of ``added``.
        added
            The rows of a session beside the structural ones.
        scale
            Of the session's costs.
        """
        dual = row_dual * (self._cost_unit * scale.divisor * 2.0**scale.exponent)
        messages = np.where(self._row_of_message >= 0, dual[self._row_of_message], self._folded)
        prices = np.zeros(len(self._flat.usage.limit))
        for row, value in zip(added, dual[self._structural :].tolist(), strict=True):
            place = None if row is None else self._place.get((row.resource, row.time))
            if row is not None and place is not None and value < 0.0:
                prices[place] = -value / row.unit * self._flat.rows.quantum[row.resource]
        return prices, messages


def _message_rows(model: LinearModel, flat: FlatProblem) -> tuple[IntArray, FloatArray]:
    """Per message its structural row, -1 for those of folded factors, and the messages of these."""
    first = model.marginal_rows()
    rows = np.full(message_entries(flat.graph), -1, dtype=np.int64)
    folded = np.zeros(len(rows))
    for g, group in enumerate(flat.groups):
        starts = first.get(tuple(sorted(group.scope)))
        order = sorted(group.scope)
        for axis, i in enumerate(group.scope):
            begin = int(flat.graph.message_start[g, axis])
            own = slice(begin, begin + len(flat.supported[i]))
            if starts is not None:
                rows[own] = starts[order.index(i)] + flat.supported[i]
            else:
                folded[own] = _folded_part(model, flat, g, axis)
    return rows, folded


def _folded_part(model: LinearModel, flat: FlatProblem, g: int, axis: int) -> FloatArray:
    """What a separable table adds to each strategy of a node: its entries along an axis, the corner counted once."""
    group, graph = flat.groups[g], flat.graph
    shape = tuple(len(flat.supported[i]) for i in group.scope)
    start = int(graph.table_start[g])
    table = flat.tables[start : start + int(graph.table_size[g])].reshape(shape)
    corner = []
    for i in group.scope:
        allowed = model.allowed[model.group_start[i] + flat.supported[i]]
        corner.append(int(np.argmax(allowed)))
    along = table[tuple(slice(None) if k == axis else c for k, c in enumerate(corner))]
    part = along - (table[tuple(corner)] if axis else 0.0)
    # Any messages are valid; those of forbidden entries are of no use.
    return np.where(np.abs(part) < FORBIDDEN_SHARE * flat.penalty, part, 0.0)
