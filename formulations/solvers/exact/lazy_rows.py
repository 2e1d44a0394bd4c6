"""Which usage rows a HiGHS session has, and which ones a solution shows to be missing."""

from __future__ import annotations

import numpy as np

from formulations.encodings.usage_rows import UsageTable, spread_worst
from formulations.problem.strategy_problem import IntArray
from formulations.solvers.exact.highs_session import HighsSession, Values
from formulations.solvers.exact.tunables import EAGER_ENTRIES, RELATIVE_EXCESS, ROWS_PER_ROUND


class LazyRows:
    """Which usage rows of a model a session has; finds and adds the ones that matter."""

    def __init__(self, session: HighsSession) -> None:
        self.session = session
        self.model = session.model
        self._added: set[tuple[int, int]] = set()
        self._maximal = [table.maximal_times(self.model.allowed) for table in self.model.usage]

    def add_all_if_few(self) -> None:
        """Add every row of a small model at once: rounds would cost more than rows."""
        if sum(len(times) for times in self._maximal) * self.model.columns <= EAGER_ENTRIES:
            for table, times in zip(self.model.usage, self._maximal, strict=True):
                self._add(table, times.tolist())

    def add_violated(self, values: Values, limits: list[float | None]) -> int:
        """Add rows that fractional ``values`` violate most; return how many were added."""
        count = 0
        for table, times, limit in zip(self.model.usage, self._maximal, limits, strict=True):
            if limit is None:
                continue
            usage = table.expected_profile(values)[times]
            size = max(limit, 1.0)
            bad = (usage - limit) / size > RELATIVE_EXCESS
            bad &= np.array([(table.resource, int(t)) not in self._added for t in times], dtype=np.bool_)
            worst = spread_worst(times[bad], (usage[bad] - limit) / size, ROWS_PER_ROUND)
            self._add(table, worst)
            count += len(worst)
        return count

    def add_for_choice(self, local: IntArray) -> bool:
        """Cut off an assignment that exceeds a limit; return False if it exceeds none."""
        violated = False
        for table in self.model.usage:
            if table.limit is None:
                continue
            profile = table.profile(local)
            over = np.flatnonzero(profile > table.limit)
            if not len(over):
                continue
            violated = True
            excess = np.array([float(profile[t]) - table.limit for t in over])
            worst = spread_worst(over, excess, ROWS_PER_ROUND)
            fresh = [t for t in worst if (table.resource, t) not in self._added]
            self._add(table, fresh)
            if not fresh:
                self.session.forbid_together(table.cover(worst[0], local))
        return violated

    def _add(self, table: UsageTable, times: list[int]) -> None:
        for t in times:
            self._added.add((table.resource, t))
            self.session.add_usage_row(table.row(t, self.model.allowed))
