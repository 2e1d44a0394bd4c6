r"""KIWI's full problem as published (equations 1, 12-23), linearised with Checkmate's method; for reproduction.

Stage ``t`` computes operator ``t`` for the first time and may run earlier ones again:
``A[t, i]`` computed, ``B[t, i]`` carried into the stage, ``U[t, k]`` bytes after operator ``k``,
``F[t, i, k]`` value ``i`` freed after ``k``, ``s`` strategies, ``e`` pairs of strategies of an edge.

=====================================================  ====================================================
(21) one strategy per operator, (22)-(23) edges        :class:`~formulations.kiwi.linear.StrategyProgram`
(1) cost                                               :meth:`PublishedModel.total_cost`
(12)-(15) dependencies                                 :meth:`PublishedModel.inputs_are_there` and following
(16)-(19) memory                                       :meth:`PublishedModel.carried_memory` and following
(20) frees                                             :meth:`PublishedModel.free_without_hazard` and following
(16) with extras, where a graph has them               :meth:`PublishedModel.extra_memory`
=====================================================  ====================================================

Products of binaries have columns of their own: ``As`` is :math:`A_{t,i} s_{i,p}`, ``Ae`` is :math:`A_{t,i} e_{ji,pq}`,
``Bs`` is :math:`B_{t,i} s_{i,p}` and ``Fs`` is :math:`F_{t,i,k} s_{i,p}`. Of the product in (20) Checkmate (Jain et
al., MLSys 2020, section 4.7) counts the *hazards* :math:`h`, and asks :math:`1 - F \le h \le \kappa (1 - F)` with
:math:`\kappa` the most hazards there can be.

Open points of the paper, kept: (16) is <=, as (8), because no solver can hold a strict bound.

Open points repaired: (22)-(23) are equalities, or the zero vector makes resharding free; ``e`` is the outer
product of the two one-hots; (19) and (20) free ``v_k`` itself too, or a recomputed value without use stays;
(14) and (15) contradict each other at ``t = i`` for parameters, which are a constant block of memory before
the first stage instead; (17) counts a value twice that is carried and computed in one stage, which is forbidden;
(20) reads ``B`` beyond the last stage, where it is 1 for values that stay and 0 for others.
"""

from __future__ import annotations

from typing import Any

from formulations.encodings.pyomo_program import add_rows
from formulations.kiwi.extras import Phase
from formulations.kiwi.linear import StrategyProgram
from formulations.kiwi.schedule import StagedDecision, tidy


class PublishedModel(StrategyProgram):
    """The full problem of a graph under a memory limit; arguments as of :class:`StrategyProgram`."""

    def build(self, m: Any) -> None:
        """Add ``A``, ``B``, ``U``, ``F``, ``s``, ``e`` and their products, (1) and (12)-(23)."""
        from pyomo.core import Binary, Objective, Var

        self.add_strategies(m)
        earlier = [(t, i) for t in m.V for i in m.V if i < t]
        stages = [(t, i) for t in m.V for i in m.V if i <= t]
        frees = [(t, i, k) for t, k in earlier for i in (*self.graph.parents[k], k)]
        again = self.graph.may_run_again
        m.A = Var(stages, domain=Binary, bounds=lambda m, t, i: (0, int(i == t or again(t, i))))
        m.B = Var(earlier, domain=Binary)
        m.F = Var(frees, domain=Binary)
        # (16): no more than the device has.
        m.U = Var([(t, k) for t in m.V for k in range(self.first - 1, t + 1)], bounds=lambda m, t, k: (0, self.most(k)))
        m.As = Var(self.with_strategies(earlier), bounds=(0, 1))
        m.Ae = Var(self.with_costly_pairs(earlier), bounds=(0, 1))
        m.Bs = Var(self.with_strategies(earlier), bounds=(0, 1))
        m.Fs = Var([(*at, p) for at in frees for p in self.strategies(at[1])], bounds=(0, 1))
        m.total_cost = Objective(rule=self.total_cost)
        reads = [(t, i, j) for t, j in stages for i in self.graph.parents[j]]
        add_rows(m, self.inputs_are_there, reads)
        add_rows(m, self.carried_was_there, [(t, i) for t, i in earlier if t - 1 in m.V])
        add_rows(m, self.progress, m.V)
        add_rows(m, self.stays, [(t, i) for t, i in earlier if self.graph.operators[i].stays])
        add_rows(m, self.not_carried_and_computed, earlier)
        add_rows(m, self.carried_memory, m.V)
        add_rows(m, self.memory, stages)
        extras = [(t, k, n) for t, k in stages for n in self._extras(t, k)]
        m.copied = Var(self.freed_columns(extras), bounds=(0, 1))
        add_rows(m, self.copied_so, m.copied)
        add_rows(m, self.copied_if_gone, m.copied)
        add_rows(m, self.extra_memory, extras)
        add_rows(m, self.free_without_hazard, frees)
        add_rows(m, self.no_free_with_hazard, frees)
        add_rows(m, self.computed_so, m.As)
        add_rows(m, self.resharded_so, m.Ae)
        add_rows(m, self.carried_so, m.Bs)
        add_rows(m, self.freed_if_free, m.Fs)
        add_rows(m, self.freed_so, m.Fs)

    def read(self, m: Any) -> StagedDecision:
        """Read strategies and stages."""
        stages = [[i for i in m.V if i <= t and m.A[t, i].value > 0.5] for t in m.V]
        return StagedDecision(self.chosen(m), tidy(self.graph, stages))

    def total_cost(self, m: Any) -> Any:
        r"""(1): :math:`\sum_t \sum_{i \le t} A_{t,i} [s_i^T (c_i + d_i) + \sum_{(v_j, v_i) \in E} e_{ji}^T R_{ji}]`.

        As :math:`A_{t,t} = 1`, everything runs once, and the products with earlier stages pay what runs again.
        """
        again = sum(self.cost[i][p] * m.As[t, i, p] for t, i, p in m.As)
        resharded = sum(self.resharding[j, i][p][q] * m.Ae[t, i, j, p, q] for t, i, j, p, q in m.Ae)
        return self.execution(m) + again + resharded

    # --------------------------------------------------------- dependencies

    def inputs_are_there(self, m: Any, t: int, i: int, j: int) -> Any:
        r"""(12): :math:`A_{t,j} \le A_{t,i} + B_{t,i}` for every edge :math:`(v_i, v_j)`."""
        return m.A[t, j] <= m.A[t, i] + m.B[t, i]

    def carried_was_there(self, m: Any, t: int, i: int) -> Any:
        r"""(13): :math:`B_{t,i} \le A_{t-1,i} + B_{t-1,i}`."""
        return m.B[t, i] <= m.A[t - 1, i] + (m.B[t - 1, i] if i < t - 1 else 0)

    def progress(self, m: Any, t: int) -> Any:
        """(14): :math:`A_{t,t} = 1`; what (14) sets to zero has no variable."""
        return m.A[t, t] == 1

    def stays(self, m: Any, t: int, i: int) -> Any:
        """(15): :math:`B_{t,i} = 1`, here for values that stay."""
        return m.B[t, i] == 1

    def not_carried_and_computed(self, m: Any, t: int, i: int) -> Any:
        r""":math:`A_{t,i} + B_{t,i} \le 1`, without which (17)-(18) count a value twice."""
        return m.A[t, i] + m.B[t, i] <= 1

    # --------------------------------------------------------------- memory

    def carried_memory(self, m: Any, t: int) -> Any:
        r"""(17): :math:`U_{t,0} = \sum_i s_i^T mem_i B_{t,i}`, and what is always there."""
        carried = sum(self.bytes_of(i, m.Bs, (t, i)) + self.kept(m, i) for i in m.V if i < t)
        return m.U[t, self.first - 1] == self.resident(m) + carried

    def memory(self, m: Any, t: int, k: int) -> Any:
        r"""(18): :math:`U_{t,k} = U_{t,k-1} - memFreed_{k-1}(t) + A_{t,k} (s_k^T mem_k)`."""
        made = self.bytes_of(k, m.s, (k,)) if k == t else self.bytes_of(k, m.As, (t, k))
        return m.U[t, k] == self.memory_before(m, t, k) + made

    def memory_before(self, m: Any, t: int, k: int) -> Any:
        r"""Bytes before ``k`` may run: :math:`U_{t,k-1} - memFreed_{k-1}(t)`."""
        return m.U[t, k - 1] - (self.memory_freed(m, t, k - 1) if k > self.first else 0)

    def memory_after(self, m: Any, t: int) -> Any:
        """Bytes once ``t`` has run and its inputs are freed: those that (17) carries on."""
        if t + 1 in m.V:
            return m.U[t + 1, self.first - 1] - self.kept(m, t)
        staying = [i for i in m.V if self.graph.operators[i].stays]
        return self.resident(m) + sum(self.bytes_of(i, m.s, (i,)) + (self.kept(m, i) if i < t else 0) for i in staying)

    def extra_memory(self, m: Any, t: int, k: int, n: int) -> Any:
        """(16) in a phase of ``k`` in which it holds an extra, where it runs."""
        extra = self.graph.extras_at[k][n]
        match extra.phase:
            case Phase.BEFORE:
                beside = self.memory_before(m, t, k)
            case Phase.DURING:
                beside = m.U[t, k]
            case _:
                beside = self.memory_after(m, t)
        beside = beside - self.freed(m, n, t, k)
        if k == t:
            return beside + self.of_first_run(m, extra) <= self.room
        more = self.extra_bytes(extra, lambda q: m.As[t, k, q], lambda j, p, q: m.Ae[t, k, j, p, q])
        return beside + more <= self.room

    def copied_if_gone(self, m: Any, t: int, k: int, n: int, j: int, p: int) -> Any:
        """Only what is freed once ``k`` has run, which (20) says of all but a stage's own operator."""
        kept = m.B[t + 1, j] if t + 1 in m.V else int(self.graph.operators[j].stays)
        return m.copied[t, k, n, j, p] <= (m.F[t, j, k] if k < t else 1 - kept)

    def resident(self, m: Any) -> Any:
        """Bytes of inputs and parameters."""
        return sum(self.bytes_of(i, m.s, (i,)) for i in range(self.first))

    def _extras(self, t: int, k: int) -> list[int]:
        """Extras of ``k`` that may be held in stage ``t``, by position."""
        runs = k == t or self.graph.may_run_again(t, k)
        return list(range(len(self.graph.extras_at[k]))) if runs else []

    def memory_freed(self, m: Any, t: int, k: int) -> Any:
        r"""(19): :math:`\sum_{(v_i, v_k) \in E} (s_i^T mem_i) F_{t,i,k}`, and the same of ``v_k`` itself."""
        return sum(self.bytes_of(i, m.Fs, (t, i, k)) for i in (*self.graph.parents[k], k))

    def free_without_hazard(self, m: Any, t: int, i: int, k: int) -> Any:
        r"""(20): :math:`1 - F_{t,i,k} \le h`."""
        return 1 - m.F[t, i, k] <= self.hazards(m, t, i, k)

    def no_free_with_hazard(self, m: Any, t: int, i: int, k: int) -> Any:
        r"""(20): :math:`h \le \kappa (1 - F_{t,i,k})`."""
        return self.hazards(m, t, i, k) <= (2 + len(self._later(t, i, k))) * (1 - m.F[t, i, k])

    def hazards(self, m: Any, t: int, i: int, k: int) -> Any:
        r"""(20), counted: :math:`h = (1 - A_{t,k}) + B_{t+1,i} + \sum_{(v_i, v_j) \in E, j > k} A_{t,j}`."""
        kept = m.B[t + 1, i] if t + 1 in m.V else int(self.graph.operators[i].stays)
        return 1 - m.A[t, k] + kept + sum(m.A[t, j] for j in self._later(t, i, k))

    def _later(self, t: int, i: int, k: int) -> list[int]:
        """Operators that read ``i`` after ``k`` and have a column in stage ``t``."""
        return [j for j in self.graph.children[i] if k < j <= t]

    # ------------------------------------------------------------- products

    def computed_so(self, m: Any, t: int, i: int, p: int) -> Any:
        r""":math:`A_{t,i} s_{i,p} \ge A_{t,i} + s_{i,p} - 1`."""
        return m.As[t, i, p] >= m.A[t, i] + m.s[i, p] - 1

    def resharded_so(self, m: Any, t: int, i: int, j: int, p: int, q: int) -> Any:
        r""":math:`A_{t,i} e_{ji,pq} \ge A_{t,i} + e_{ji,pq} - 1`."""
        return m.Ae[t, i, j, p, q] >= m.A[t, i] + m.e[j, i, p, q] - 1

    def carried_so(self, m: Any, t: int, i: int, p: int) -> Any:
        r""":math:`B_{t,i} s_{i,p} \ge B_{t,i} + s_{i,p} - 1`."""
        return m.Bs[t, i, p] >= m.B[t, i] + m.s[i, p] - 1

    def freed_if_free(self, m: Any, t: int, i: int, k: int, p: int) -> Any:
        r""":math:`F_{t,i,k} s_{i,p} \le F_{t,i,k}`."""
        return m.Fs[t, i, k, p] <= m.F[t, i, k]

    def freed_so(self, m: Any, t: int, i: int, k: int, p: int) -> Any:
        r""":math:`F_{t,i,k} s_{i,p} \le s_{i,p}`."""
        return m.Fs[t, i, k, p] <= m.s[i, p]
