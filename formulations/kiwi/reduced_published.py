r"""KIWI with reduced complexity as published: equations (2)-(11) with the linearisation (24)-(31); for reproduction.

``m[i]`` says whether forward operator ``i`` keeps its output, ``z_i`` (a constant) whether backward reads it,
``H_i`` (a constant) the first backward operator that does, before which a dropped output is computed again,
``h[i]`` after which operator a forward output is freed for good, ``F[i, j]`` whether that is ``j``, and ``U[t]``
the bytes after operator ``t``. Only operators with ``z_i = 1`` (set ``Z``) have an ``m``: the others run once.

==============================================  ================================================================
(21)-(23) strategies, edges                     :class:`~formulations.kiwi.linear.StrategyProgram`
(2) cost                                        :meth:`PublishedReducedModel.total_cost`
(9), (31) inputs of a recomputed one are kept   :meth:`PublishedReducedModel.inputs_are_kept`
(10), (24)-(28) time of the last free           :meth:`PublishedReducedModel.one_maximum` and following
(11), (29)-(30) which operator that is          :meth:`PublishedReducedModel.not_before` and following
(3)-(8) memory                                  :meth:`PublishedReducedModel.memory` and following
(8) with extras, where a graph has them         :meth:`PublishedReducedModel.extra_memory`
==============================================  ================================================================

Products of binaries have columns of their own: ``Ms`` is :math:`(1 - m_i) s_{i,p}` where it costs or occupies, ``Me``
is :math:`(1 - m_i) e_{ji,pq}`, ``Ds`` is :math:`(1 - m_i) s_{i,p}` where it frees, ``Fs`` is :math:`F_{i,j} s_{i,p}`.

A dropped output is computed again as part of the step of ``H_i``: (3) adds its bytes together with those of
``H_i``'s own output, and a kept input that waits for it (10) is freed after that step. True liveness
(:mod:`formulations.step.kiwi_reduced`) frees that input before ``H_i`` itself runs, so that its optimum may
be lower, never higher. Nothing else is between both on a captured step, whose graph has extras, which the paper does
not count (:mod:`formulations.kiwi.extras`).

Open points kept: (8) is <=; frees counted at ``i + 1`` are those after operator ``i``, in (6) as in (7).

Open points repaired: (9) and (31) apply only where ``z_j = 1`` (their big constant then is the number of inputs);
the maximum in (10) ranges over children with ``z = 1``, ``H`` being undefined for others; ``delta`` in (29) is
1, because times are integers; edges have equality marginals; parameters are a constant block; values that stay
are never freed and never dropped.
"""

from __future__ import annotations

from typing import Any

from formulations.encodings.pyomo_program import add_rows
from formulations.kiwi.extras import Phase
from formulations.kiwi.linear import StrategyProgram
from formulations.kiwi.schedule import StagedDecision, with_recomputed
from formulations.step.training_step import NodeKind


class PublishedReducedModel(StrategyProgram):
    """The reduced problem of a graph under a memory limit; arguments as of :class:`StrategyProgram`."""

    def build(self, m: Any) -> None:
        """Add ``m``, ``h``, ``hz``, ``F``, ``U``, ``s``, ``e`` and their products, (2)-(11) and (24)-(31)."""
        from pyomo.core import Binary, Integers, Objective, Set, Var

        self.add_strategies(m)
        graph = self.graph
        m.Z = Set(initialize=graph.candidates)
        forward = [i for i in m.V if graph.operators[i].kind is NodeKind.FORWARD]
        frees = [(i, j) for i in forward for j in m.V if j >= i]
        maxima = [(i, j) for i in forward for j in graph.children[i] if j in m.Z]
        m.m = Var(m.Z, domain=Binary)
        m.h = Var(forward, domain=Integers, bounds=(0, self.never))
        m.hz = Var([*((i, 0) for i in forward), *((i, self.count(j)) for i, j in maxima)], domain=Binary)
        m.F, m.F_minus, m.F_plus = (Var(frees, domain=Binary) for _ in range(3))
        # (8): no more than the device has.
        m.U = Var(m.V, bounds=lambda m, t: (0, self.most(t)))
        dropped = [(i,) for i in m.Z]
        m.Ms = Var(self.with_strategies(dropped), bounds=(0, 1))
        m.Me = Var(self.with_costly_pairs(dropped), bounds=(0, 1))
        m.Ds = Var(self.with_strategies(dropped), bounds=(0, 1))
        m.Fs = Var([(i, j, p) for i, j in frees for p in self.strategies(i)], bounds=(0, 1))
        m.total_cost = Objective(rule=self.total_cost)
        add_rows(m, self.inputs_are_kept, [j for j in m.Z if self._inputs(m, j)])
        add_rows(m, self.one_maximum, forward)
        add_rows(m, self.at_most_live, forward)
        add_rows(m, self.at_least_live, forward)
        add_rows(m, self.at_most_recomputed, maxima)
        add_rows(m, self.at_least_recomputed, maxima)
        add_rows(m, self.not_before, frees)
        add_rows(m, self.not_after, frees)
        add_rows(m, self.before_at_or_after, frees)
        add_rows(m, self.memory, m.V)
        again = [(graph.first_backward_use[j], j) for j in m.Z]
        moments = [*((t, t) for t in m.V), *again]
        extras = [(t, k, n) for t, k in moments for n in range(len(graph.extras_at[k]))]
        m.copied = Var(self.freed_columns((t, k, n) for t, k, n in extras if t == k), bounds=(0, 1))
        add_rows(m, self.copied_so, m.copied)
        add_rows(m, self.copied_if_gone, m.copied)
        add_rows(m, self.extra_memory, extras)
        add_rows(m, self.recomputed_so, m.Ms)
        add_rows(m, self.resharded_so, m.Me)
        add_rows(m, self.dropped_if_dropped, m.Ds)
        add_rows(m, self.dropped_so, m.Ds)
        add_rows(m, self.freed_if_free, m.Fs)
        add_rows(m, self.freed_so, m.Fs)

    def read(self, m: Any) -> StagedDecision:
        """Read strategies, and the stages that compute every dropped operator again at its ``H``."""
        dropped = [i for i in m.Z if m.m[i].value < 0.5]
        return StagedDecision(self.chosen(m), with_recomputed(self.graph, dropped))

    def total_cost(self, m: Any) -> Any:
        r"""(2): :math:`\sum_i (1 + (1 - m_i) z_i) [s_i^T (c_i + d_i) + \sum_{(v_j, v_i) \in E} e_{ji}^T R_{ji}]`."""
        again = sum(self.cost[i][p] * m.Ms[i, p] for i, p in m.Ms)
        resharded = sum(self.resharding[j, i][p][q] * m.Me[i, j, p, q] for i, j, p, q in m.Me)
        return self.execution(m) + again + resharded

    def inputs_are_kept(self, m: Any, j: int) -> Any:
        r"""(9) as (31): :math:`M m_j + \sum_{(v_i, v_j) \in E} m_i \ge p_j`, with the least ``M``, which is ``p_j``.

        Inputs that are resident or have ``z = 0`` are always kept and left out.
        """
        inputs = self._inputs(m, j)
        return len(inputs) * m.m[j] + sum(m.m[i] for i in inputs) >= len(inputs)

    # -------------------------------------------------- time of the last free

    def one_maximum(self, m: Any, i: int) -> Any:
        r"""(24): :math:`\sum_j hz_{i,j} = 1`; one of the numbers in (10) is the maximum."""
        return sum(m.hz[i, self.count(j)] for j in self.graph.children[i] if j in m.Z) + m.hz[i, 0] == 1

    def at_most_live(self, m: Any, i: int) -> Any:
        r"""(25): :math:`h_i \le live_i + |V| (1 - hz_{i,0})`."""
        return m.h[i] <= self.live(i) + self.never * (1 - m.hz[i, 0])

    def at_least_live(self, m: Any, i: int) -> Any:
        r"""(26): :math:`h_i \ge live_i`."""
        return m.h[i] >= self.live(i)

    def at_most_recomputed(self, m: Any, i: int, j: int) -> Any:
        r"""(27): :math:`h_i \le H_j (1 - m_j) + |V| (1 - hz_{i,j})`."""
        return m.h[i] <= self.recomputed_at(j) * (1 - m.m[j]) + self.never * (1 - m.hz[i, self.count(j)])

    def at_least_recomputed(self, m: Any, i: int, j: int) -> Any:
        r"""(28): :math:`h_i \ge H_j (1 - m_j)`."""
        return m.h[i] >= self.recomputed_at(j) * (1 - m.m[j])

    def not_before(self, m: Any, i: int, j: int) -> Any:
        r"""(29), left: :math:`j F_{i,j} + (j + \delta) F_{+i,j} \le h_i`."""
        at = self.count(j)
        return at * m.F[i, j] + (at + 1) * m.F_plus[i, j] <= m.h[i]

    def not_after(self, m: Any, i: int, j: int) -> Any:
        r"""(29), right: :math:`h_i \le (j - \delta) F_{-i,j} + j F_{i,j} + |V| F_{+i,j}`."""
        at = self.count(j)
        return m.h[i] <= (at - 1) * m.F_minus[i, j] + at * m.F[i, j] + self.never * m.F_plus[i, j]

    def before_at_or_after(self, m: Any, i: int, j: int) -> Any:
        """(30): :math:`F_{-i,j} + F_{i,j} + F_{+i,j} = 1`."""
        return m.F_minus[i, j] + m.F[i, j] + m.F_plus[i, j] == 1

    # --------------------------------------------------------------- memory

    def memory(self, m: Any, t: int) -> Any:
        """(3): :math:`U_t = U_{t-1} + s_t^T mem_t + memRecomputed_t - memFreed_t`; (4): it begins with residents."""
        if t == self.first:
            before, freed = sum(self.bytes_of(i, m.s, (i,)) for i in range(self.first)), 0
        else:
            before, freed = m.U[t - 1] + self.kept(m, t - 1), self.memory_freed(m, t - 1)
        return m.U[t] == before + self.bytes_of(t, m.s, (t,)) + self.memory_recomputed(m, t) - freed

    def extra_memory(self, m: Any, t: int, k: int, n: int) -> Any:
        """(8) in a phase of ``k`` in which it holds an extra, where it runs in the step of ``t``.

        What is computed again in a step is so before its own operator, and beside all that (3) adds but its output.
        """
        extra = self.graph.extras_at[k][n]
        beside = m.U[t]
        if extra.phase is Phase.BEFORE or k != t:
            beside = beside - self.bytes_of(t, m.s, (t,))
        if extra.phase is Phase.AFTER:
            beside = beside - self.memory_freed(m, t)
        if k == t:
            return beside + self.of_first_run(m, extra) - self.freed(m, n, t, k) <= self.room
        if extra.phase is Phase.BEFORE:
            beside = beside - self.bytes_of(k, m.Ds, (k,))
        more = self.extra_bytes(extra, lambda q: m.Ms[k, q], lambda j, p, q: m.Me[k, j, p, q])
        return beside + more <= self.room

    def copied_if_gone(self, m: Any, t: int, k: int, n: int, j: int, p: int) -> Any:
        """Only what (7) frees after ``t``."""
        gone = m.F[j, t] if j in m.h else int(self.live(j) == self.count(t))
        if j in m.Z and self._last_forward_reader(j) == t:
            gone = gone + 1 - m.m[j]
        return m.copied[t, k, n, j, p] <= gone

    def memory_recomputed(self, m: Any, t: int) -> Any:
        r"""(5): :math:`\sum_{j \in X_t} (1 - m_j) s_j^T mem_j`, where ``t`` is the first to read ``j`` again."""
        return sum(self.bytes_of(j, m.Ms, (j,)) for j in m.Z if self.graph.first_backward_use[j] == t)

    def memory_freed(self, m: Any, t: int) -> Any:
        r"""(6), (7): what is freed after operator ``t``, over forward ``j``, dropped ones, and backward ones.

        :math:`\sum_j F_{j,t} s_j^T mem_j + \sum_{j \in L_t} z_j (1 - m_j) s_j^T mem_j + \sum_{j \in Y_t} s_j^T mem_j`.
        """
        for_good = sum(self.bytes_of(j, m.Fs, (j, t)) for j in m.h if j <= t)
        dropped = sum(self.bytes_of(j, m.Ds, (j,)) for j in m.Z if self._last_forward_reader(j) == t)
        backward = [j for j in m.V if self.graph.operators[j].kind is NodeKind.BACKWARD]
        return for_good + dropped + sum(self.bytes_of(j, m.s, (j,)) for j in backward if self.live(j) == self.count(t))

    # ------------------------------------------------------------- products

    def recomputed_so(self, m: Any, i: int, p: int) -> Any:
        r""":math:`(1 - m_i) s_{i,p} \ge s_{i,p} - m_i`."""
        return m.Ms[i, p] >= m.s[i, p] - m.m[i]

    def resharded_so(self, m: Any, i: int, j: int, p: int, q: int) -> Any:
        r""":math:`(1 - m_i) e_{ji,pq} \ge e_{ji,pq} - m_i`."""
        return m.Me[i, j, p, q] >= m.e[j, i, p, q] - m.m[i]

    def dropped_if_dropped(self, m: Any, i: int, p: int) -> Any:
        r""":math:`(1 - m_i) s_{i,p} \le 1 - m_i`."""
        return m.Ds[i, p] <= 1 - m.m[i]

    def dropped_so(self, m: Any, i: int, p: int) -> Any:
        r""":math:`(1 - m_i) s_{i,p} \le s_{i,p}`."""
        return m.Ds[i, p] <= m.s[i, p]

    def freed_if_free(self, m: Any, i: int, j: int, p: int) -> Any:
        r""":math:`F_{i,j} s_{i,p} \le F_{i,j}`."""
        return m.Fs[i, j, p] <= m.F[i, j]

    def freed_so(self, m: Any, i: int, j: int, p: int) -> Any:
        r""":math:`F_{i,j} s_{i,p} \le s_{i,p}`."""
        return m.Fs[i, j, p] <= m.s[i, p]

    # ------------------------------------------------------------ constants

    @property
    def never(self) -> int:
        """Later than any operator, counted; stands for the paper's :math:`|V|` where that is a big constant."""
        return self.graph.stages + 1

    def count(self, i: int) -> int:
        """The paper's number of an operator, from 1."""
        return i - self.first + 1

    def live(self, i: int) -> int:
        """:math:`live_i`, the last operator that reads ``i``, counted; that of a value that stays is never reached."""
        return self.never if self.graph.operators[i].stays else self.count(max(self.graph.children[i], default=i))

    def recomputed_at(self, j: int) -> int:
        """:math:`H_j`, counted."""
        return self.count(self.graph.first_backward_use[j])

    def _inputs(self, m: Any, j: int) -> list[int]:
        return [i for i in self.graph.parents[j] if i in m.Z]

    def _last_forward_reader(self, i: int) -> int:
        forward = [j for j in self.graph.children[i] if self.graph.operators[j].kind is NodeKind.FORWARD]
        return max(forward, default=i)
