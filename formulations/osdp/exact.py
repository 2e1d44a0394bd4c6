r"""OSDP solved exactly at every batch size by multiple-choice knapsacks.

The paper's depth-first search walks up to :math:`M^n` vectors of modes. Its problem is a knapsack over operators, and
nothing but a constant in it depends on the batch, so one preparation serves all batches.

At the peak (:attr:`~formulations.osdp.problem.Accounting.PEAK`) the largest temporary bytes of any operator are added
to what all of them hold. For a given value ``e`` of that largest one, modes that need more are left out and the rest is
a knapsack with ``e`` less room; the best over all values that occur is the optimum. Values whose relaxation already
costs more than the best so far are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from formulations.osdp.knapsack import Knapsack, KnapsackClass, Packing
from formulations.osdp.problem import Accounting, OperatorTable, step_bytes, step_cost
from formulations.problem.strategy_problem import BoolArray


class ExactOsdp:
    """The best modes at any batch size.

    Parameters
    ----------
    tables
        Of every operator, from :func:`formulations.osdp.problem.operator_tables`.
    accounting
        As in the settings that made them.
    memory_bytes
        Limit of tensors on one device, in bytes.
    """

    def __init__(self, tables: Sequence[OperatorTable], accounting: Accounting, memory_bytes: int) -> None:
        self.tables, self.accounting, self.memory_bytes = tuple(tables), accounting, memory_bytes
        members: dict[tuple[object, ...], list[int]] = {}
        for i, table in enumerate(self.tables):
            arrays = table.communication, table.fixed_resident, table.gathered
            key = (table.modes, *(array.tobytes() for array in arrays), table.temporary)
            members.setdefault(key, []).append(i)
        self._members = list(members.values())
        self._kinds = [self.tables[equal[0]] for equal in self._members]
        self._prepared: dict[bytes, Knapsack] = {}

    def solve(self, batch: int) -> tuple[int, int, tuple[int, ...]] | None:
        """Find the best modes at a batch size.

        Returns
        -------
        tuple or None
            Nanoseconds of the step, their lower bound over all modes, and the index of every operator's mode; None
            where no modes fit. The two figures are equal unless a list grew longer than
            :data:`formulations.osdp.knapsack.MOST_POINTS`.
        """
        packed = self._at_the_peak(batch) if self.accounting is Accounting.PEAK else self._summed(batch)
        if packed is None:
            return None
        choices = [0] * len(self.tables)
        for equal, chosen in zip(self._members, packed.choices, strict=True):
            for i, choice in zip(equal, chosen, strict=True):
                choices[i] = choice
        assert step_bytes(self.tables, choices, batch, self.accounting) <= self.memory_bytes
        cost = step_cost(self.tables, choices, batch)
        return cost, cost - packed.cost + packed.bound, tuple(choices)

    def _summed(self, batch: int) -> Packing | None:
        fixed = sum(batch * table.sample_resident + table.workspace(batch) for table in self.tables)
        everything = [np.ones(len(kind.modes), dtype=np.bool_) for kind in self._kinds]
        return self._knapsack(everything).solve(self.memory_bytes - fixed)

    def _at_the_peak(self, batch: int) -> Packing | None:
        fixed = batch * sum(table.sample_resident for table in self.tables)
        extra = [kind.extra(batch) for kind in self._kinds]
        least = max(int(each.min()) for each in extra)
        levels = sorted({value for each in extra for value in each.tolist() if value >= least})
        promising = []
        for level in levels:
            knapsack, room = self._knapsack([each <= level for each in extra]), self.memory_bytes - fixed - level
            bound = knapsack.bound(room)
            if bound is not None:
                promising.append((bound, room, knapsack))
        promising.sort(key=lambda entry: entry[0])
        best: Packing | None = None
        proved = True
        for _, room, knapsack in promising:
            found = knapsack.solve(room) if best is None else knapsack.improve(room, best.cost)
            if found is not None:
                proved &= found.bound == found.cost
                best = found if best is None or found.cost < best.cost else best
        return best if best is None or proved else replace(best, bound=promising[0][0])

    def _knapsack(self, allowed: Sequence[BoolArray]) -> Knapsack:
        """Prepare the knapsack of some modes of every kind; gathered bytes count at the peak alone, as a level."""
        key = b"".join(flags.tobytes() for flags in allowed)
        if key not in self._prepared:
            self._prepared[key] = Knapsack(
                [
                    KnapsackClass(kind.fixed_resident, kind.communication, flags, len(equal))
                    for kind, flags, equal in zip(self._kinds, allowed, self._members, strict=True)
                ]
            )
        return self._prepared[key]
