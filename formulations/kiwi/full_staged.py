r"""KIWI's full problem (equations 1, 12-23) as an exact model that is small enough to prove.

Columns are one-hot classes ``s`` of strategies, one configuration ``x`` per operator
(:mod:`formulations.kiwi.configurations`), and for stages ``t`` and operators ``i < t``

.. math:: A_{t,i} = 1 \text{ if } i \text{ is computed again in stage } t, \qquad
          B_{t,i} = 1 \text{ if } i \text{ is carried into stage } t .

======================================================  =========================================
(1) cost, recomputations counted                        :meth:`StagedModel.total_cost`
(21)-(23) one class per operator, its configuration     :meth:`StagedModel.one_class` and following
(12), (14) inputs are computed or carried               :meth:`StagedModel.inputs_are_there`
(13) what is carried was there before                   :meth:`StagedModel.carried_was_there`
(16)-(20) memory at each stage's own operator           :meth:`StagedModel.own_memory`
(16)-(20) memory at a computation before it             :meth:`StagedModel.build_moment`
(16) with extras, where a graph has them                :meth:`StagedModel.extra_memory`
======================================================  =========================================

Both are split by the bytes of ``i``: one column per *level*, an amount that occurs among its classes, at most
the sum of the classes of that amount. So the bytes of what is there are a sum of columns, where a product of a
binary and a class would have to be linearised, and costs, too, follow classes: the relaxation is tighter.

Counted recompute: with ``R_i`` computations of ``i`` beyond the first, the cost is ``(1 + R_i)`` times that of its
configuration ``x``. One more copy of the configuration columns, ``a <= x``, pays the first recomputation, and
``w <= T a`` with an integer ``n``, the sum of ``w`` and ``R_i - 1``, pays all further ones; both level by level.

At a stage's own moment nothing more is needed: what is there besides inputs and output is carried on, ``B_{t+1,i}``.
Moments of recomputations get rows only where a replay finds too much. So the model is a relaxation until
:meth:`StagedModel.refine` finds nothing to add: its bound holds at any time, and its optimum is optimal once its
replay fits.

Repairs of open points: equality in (22)-(23), here by configurations; a value frees itself in (19);
parameters are a constant block (15); nothing is carried and computed at once (17); values that stay are
carried beyond the last stage (20); (16) is <=.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from formulations.encodings.pyomo_program import add_rows
from formulations.kiwi.configurations import configurations
from formulations.kiwi.extras import Extra, Phase
from formulations.kiwi.graph import KiwiGraph
from formulations.kiwi.program import KiwiProgram, Moment
from formulations.kiwi.schedule import StagedDecision, tidy


class StagedModel(KiwiProgram):
    """The full problem of a graph under a memory limit; stages have the numbers of their own operators.

    Parameters
    ----------
    graph
        The instance.
    memory_limit
        Bytes on one device.

    Raises
    ------
    GraphError
        If an operator has too many configurations.
    """

    def __init__(self, graph: KiwiGraph, memory_limit: int) -> None:
        self.configurations = configurations(graph)
        self.units = [[amount // graph.byte_unit for amount in of] for of in self.configurations.class_bytes]
        self.levels = [sorted(set(amounts)) for amounts in self.units]
        super().__init__(graph, memory_limit)

    def build(self, m: Any) -> None:
        """Add ``s``, ``x``, ``A``, ``B``, ``a``, ``n``, ``w``, (1) and (12)-(23)."""
        from pyomo.core import Any as AnyIndex
        from pyomo.core import Binary, Block, NonNegativeIntegers, Objective, Set, Var

        count, tables = len(self.graph.operators), self.configurations.tables
        m.V = Set(initialize=range(self.first, count))
        passing = [(t, i) for t in m.V for i in self._passing(t)]
        self._again: dict[int, list[int]] = {i: [] for i in m.V}
        for t, i in passing:
            if self.may_compute_again(t, i):
                self._again[i].append(t)
        again = [(t, i) for t, i in passing if t in self._again[i]]
        repeated = [i for i in m.V if self._again[i]]
        often = [i for i in repeated if len(self._again[i]) > 1]
        m.s = Var([(i, c) for i in range(count) for c in range(len(self.units[i]))], domain=Binary)
        m.x = Var([(i, k) for i in m.V for k in range(len(tables[i].entries))], bounds=(0, 1))
        m.A = Var(self._by_level(again), domain=Binary)
        m.B = Var(self._by_level(passing), domain=Binary)
        m.a = Var([(i, k) for i in repeated for k in range(len(tables[i].entries))], bounds=(0, 1))
        m.n = Var(
            [(i, u) for i in often for u in self.levels[i]],
            domain=NonNegativeIntegers,
            bounds=lambda m, i, u: (0, self._further(i)),
        )
        m.w = Var(
            [(i, k) for i in often for k in range(len(tables[i].entries))],
            bounds=lambda m, i, k: (0, self._further(i)),
        )
        m.total_cost = Objective(rule=self.total_cost)
        # In the order of the equations. HiGHS's time varies with it by chance, twofold on the perceptron.
        add_rows(m, self.pays_if_so, m.a)
        add_rows(m, self.first_is_paid, self._by_level((t, i) for i in repeated for t in self._again[i]))
        add_rows(m, self.pays_more_if_so, m.w)
        add_rows(m, self.further_are_paid, m.n)
        add_rows(m, self.all_are_counted, m.n)
        add_rows(m, self.there_at_most_once, self._by_level(passing))
        add_rows(m, self.own_inputs_are_there, self._by_level((t, i) for t in m.V for i in self._inputs(t)))
        add_rows(m, self.inputs_are_there, [(t, i, j) for t, j in again for i in self._inputs(j)])
        add_rows(m, self.carried_was_there, self._by_level((t + 1, i) for t, i in passing if t + 1 in m.V))
        add_rows(m, self.own_memory, [t for t in m.V if self.graph.counts_outputs_alone(t)])
        extras = [(t, n) for t in m.V for n in range(len(self.graph.extras_at[t]))]
        m.copied = Var([(t, n, i, u) for t, n in extras for i, u in self._freed(t, n, self._inputs(t))], bounds=(0, 1))
        add_rows(m, self.copied_so, m.copied)
        add_rows(m, self.copied_if_not_carried, m.copied)
        add_rows(m, self.extra_memory, extras)
        add_rows(m, self.one_class, range(count))
        add_rows(m, self.own_marginal, [(i, c) for i in m.V for c in range(len(self.units[i]))])
        add_rows(
            m,
            self.input_marginal,
            [(i, j, c) for i in m.V for j in tables[i].neighbours for c in range(len(self.units[j]))],
        )
        m.moment = Block(AnyIndex, rule=self.build_moment, dense=False)

    def read(self, m: Any) -> StagedDecision:
        """Read strategies and stages."""
        chosen = tuple(
            max(range(len(units)), key=lambda c: float(m.s[i, c].value)) for i, units in enumerate(self.units)
        )
        stages = [
            [*(i for i in self._repeated(t) if sum(m.A[t, i, u].value for u in self.levels[i]) > 0.5), t] for t in m.V
        ]
        return StagedDecision(self.configurations.strategies(chosen), tidy(self.graph, stages))

    def refine(self, over: Iterable[Moment]) -> bool:
        """Add rows for moments that the replay of a decision found over the limit; whether any was new."""
        moments = {(self.first + t, k) for t, k in over if k != self.first + t} - set(self.model.moment)
        for moment in sorted(moments):
            _ = self.model.moment[moment]  # looking it up builds it
        return bool(moments)

    def may_compute_again(self, t: int, i: int) -> bool:
        """Whether an earlier operator, whose value does not stay, may be computed again in a stage."""
        return self.graph.may_run_again(t, i)

    # ----------------------------------------------------------- strategies

    def one_class(self, m: Any, i: int) -> Any:
        r"""(21): :math:`\sum_c s_{i,c} = 1`."""
        return sum(m.s[i, c] for c in range(len(self.units[i]))) == 1

    def own_marginal(self, m: Any, i: int, c: int) -> Any:
        r"""(22) with equality, for configurations: those of class ``c`` sum up to :math:`s_{i,c}`."""
        entries = self.configurations.tables[i].entries
        return sum(m.x[i, k] for k, entry in enumerate(entries) if entry.own == c) == m.s[i, c]

    def input_marginal(self, m: Any, i: int, j: int, c: int) -> Any:
        r"""(23) with equality, for configurations: those that read ``j`` in class ``c`` sum up to :math:`s_{j,c}`."""
        table = self.configurations.tables[i]
        axis = table.neighbours.index(j)
        return sum(m.x[i, k] for k, entry in enumerate(table.entries) if entry.others[axis] == c) == m.s[j, c]

    # --------------------------------------------------------- dependencies

    def there_at_most_once(self, m: Any, t: int, i: int, u: int) -> Any:
        r""":math:`A_{t,i} + B_{t,i} \le 1`, level by level: only of bytes that the value has."""
        return self.there(m, t, i, u) <= self.has_bytes(m, i, u)

    def own_inputs_are_there(self, m: Any, t: int, i: int, u: int) -> Any:
        r"""(12) for ``j = t``, where (14) has :math:`A_{t,t} = 1`: :math:`A_{t,i} + B_{t,i} = 1`, level by level."""
        return self.there(m, t, i, u) == self.has_bytes(m, i, u)

    def inputs_are_there(self, m: Any, t: int, i: int, j: int) -> Any:
        r"""(12): :math:`A_{t,j} \le A_{t,i} + B_{t,i}` for every edge :math:`(v_i, v_j)`."""
        return sum(m.A[t, j, u] for u in self.levels[j]) <= sum(self.there(m, t, i, u) for u in self.levels[i])

    def carried_was_there(self, m: Any, t: int, i: int, u: int) -> Any:
        r"""(13): :math:`B_{t,i} \le A_{t-1,i} + B_{t-1,i}`, level by level."""
        return m.B[t, i, u] <= self.there(m, t - 1, i, u)

    # ----------------------------------------------------------------- cost

    def total_cost(self, m: Any) -> Any:
        r"""(1): :math:`\sum_t \sum_{i \le t} A_{t,i} [s_i^T (c_i + d_i) + \sum_{(v_j, v_i) \in E} e_{ji}^T R_{ji}]`.

        ``x`` pays the first computation, ``a`` the second, ``w`` the others.
        """
        tables = self.configurations.tables
        return sum(tables[i].entries[k].cost * column for of in (m.x, m.a, m.w) for (i, k), column in of.items())

    def pays_if_so(self, m: Any, i: int, k: int) -> Any:
        r""":math:`a_{i,k} \le x_{i,k}`: a recomputation is paid as the configuration is."""
        return m.a[i, k] <= m.x[i, k]

    def first_is_paid(self, m: Any, t: int, i: int, u: int) -> Any:
        r""":math:`A_{t,i} \le \sum_k a_{i,k}`, level by level."""
        return m.A[t, i, u] <= sum(m.a[i, k] for k in self._entries(i, u))

    def pays_more_if_so(self, m: Any, i: int, k: int) -> Any:
        r""":math:`w_{i,k} \le T a_{i,k}`, with ``T`` one less than the stages that may compute ``i`` again."""
        return m.w[i, k] <= self._further(i) * m.a[i, k]

    def further_are_paid(self, m: Any, i: int, u: int) -> Any:
        r""":math:`\sum_k w_{i,k} = n_i`, level by level."""
        return sum(m.w[i, k] for k in self._entries(i, u)) == m.n[i, u]

    def all_are_counted(self, m: Any, i: int, u: int) -> Any:
        r""":math:`\sum_t A_{t,i} \le \sum_k a_{i,k} + n_i`, level by level."""
        return sum(m.A[t, i, u] for t in self._again[i]) <= sum(m.a[i, k] for k in self._entries(i, u)) + m.n[i, u]

    # --------------------------------------------------------------- memory

    def own_memory(self, m: Any, t: int) -> Any:
        r"""(16)-(20) right after ``t``: :math:`U_{t,t}`, inputs, output and what is carried on, fits on the device."""
        return self._fits(m, *self._own_moment(m, t, Phase.DURING))

    def extra_memory(self, m: Any, t: int, n: int) -> Any:
        """(16) in a phase of ``t`` in which it holds an extra."""
        extra = self.graph.extras_at[t][n]
        certain, others = self._own_moment(m, t, extra.phase)
        freed = sum(u * m.copied[t, n, i, u] for i, u in self._freed(t, n, self._inputs(t)))
        return self._fits(m, certain, others + self._extra_bytes(extra, m.x) - freed)

    def copied_so(self, m: Any, t: int, n: int, i: int, u: int) -> Any:
        """(19): an input is freed while ``t`` runs only in configurations that copy it, level by level."""
        return m.copied[t, n, i, u] <= self._copying(self.graph.extras_at[t][n], i, u, m.x)

    def copied_if_not_carried(self, m: Any, t: int, n: int, i: int, u: int) -> Any:
        r"""(20): and only if :math:`B_{t+1,i} = 0`."""
        kept = sum(m.B[t + 1, i, level] for level in self.levels[i]) if t + 1 in m.V else 0
        return m.copied[t, n, i, u] <= 1 - kept

    def _own_moment(self, m: Any, t: int, phase: Phase) -> tuple[list[int], Any]:
        """Values that are there in a phase of ``t`` whatever is decided, and the bytes of others and of kept extras."""
        inputs = [] if phase is Phase.AFTER else self._inputs(t)
        others = [i for i in self._passing(t) if i not in inputs] if t + 1 in m.V else []
        carried = sum(u * m.B[t + 1, i, u] for i in others for u in self.levels[i])
        own = [] if phase is Phase.BEFORE else [t]
        return [*range(self.first), *self._staying(t), *own, *inputs], carried + self._kept(m, t)

    def build_moment(self, b: Any, t: int, k: int) -> None:
        """Add memory at ``k`` in stage ``t``; where ``k`` is not computed there, this much is held later as well.

        ``held`` says that a value is still there after ``k`` has run: it is what (18) has not yet freed by (20).
        """
        from pyomo.core import Binary, Var

        m = b.model()
        unsure = [i for i in self._passing(t) if i <= k and i not in self.graph.parents[t]]
        readers = [
            (i, j) for i in unsure for j in self._repeated(t) if (j >= k and i in self.graph.parents[j]) or j == i == k
        ]
        b.held = Var([(i, u) for i in unsure for u in self.levels[i]], domain=Binary)
        extras = self.graph.extras_at[k] if t in self._again[k] else ()
        inputs = [i for i in self.graph.parents[k] if i in unsure]
        freed = [(n, i, u) for n in range(len(extras)) for i, u in self._freed(k, n, inputs)]
        b.copied = Var(freed, bounds=(0, 1))
        b.y = Var([(k, e) for e in range(len(self.configurations.tables[k].entries)) if extras], bounds=(0, 1))

        def held_of_bytes(b: Any, i: int, u: int) -> Any:
            """Only of bytes that the value has."""
            return b.held[i, u] <= self.has_bytes(m, i, u)

        def held_if_carried(b: Any, i: int, u: int) -> Any:
            r"""(20): not freed if :math:`B_{t+1,i} = 1`."""
            return b.held[i, u] >= m.B[t + 1, i, u]

        def held_if_read(b: Any, i: int, j: int) -> Any:
            r"""(20): not freed if :math:`A_{t,j} = 1` for a reader from ``k`` on; and there if made by ``k`` itself."""
            return sum(b.held[i, u] for u in self.levels[i]) >= sum(m.A[t, j, u] for u in self.levels[j])

        def beside(b: Any, more: Any) -> Any:
            """What is there after ``k``, and more, fits on the device."""
            certain = [i for i in self._passing(t) if i <= k and i in self.graph.parents[t]]
            carried = sum(u * m.B[t, i, u] for i in self._passing(t) if i > k for u in self.levels[i])
            held = sum(u * b.held[i, u] for i, u in b.held)
            others = carried + held + self._kept(m, t) + more
            return self._fits(m, [*range(self.first), *self._staying(t), *certain], others)

        def memory(b: Any) -> Any:
            r"""(16): :math:`U_{t,k}` fits on the device."""
            return beside(b, 0)

        def same_configuration(b: Any, e: int) -> Any:
            r""":math:`y_e \le x_{k,e}`: the extras of ``k`` are those of its configuration."""
            return b.y[k, e] <= m.x[k, e]

        def computed_again(b: Any, u: int) -> Any:
            r""":math:`\sum_e y_e \ge A_{t,k}`, level by level."""
            return sum(b.y[k, e] for e in self._entries(k, u)) >= m.A[t, k, u]

        def extra_memory(b: Any, n: int) -> Any:
            r"""(16) in a phase of ``k`` in which it holds an extra, if it is computed again."""
            not_yet = self.levels[k] if extras[n].phase is Phase.BEFORE else []
            gone = [u * b.copied[n, i, u] for i, u in self._freed(k, n, inputs)]
            return beside(b, self._extra_bytes(extras[n], b.y) - sum(u * m.A[t, k, u] for u in not_yet) - sum(gone))

        def copied_so(b: Any, n: int, i: int, u: int) -> Any:
            """(19): an input is freed while ``k`` runs only in configurations that copy it, level by level."""
            return b.copied[n, i, u] <= self._copying(extras[n], i, u, b.y)

        def copied_if_not_carried(b: Any, n: int, i: int, u: int) -> Any:
            r"""(20): and only if :math:`B_{t+1,i} = 0`."""
            return b.copied[n, i, u] <= 1 - sum(m.B[t + 1, i, level] for level in self.levels[i])

        def copied_if_not_read(b: Any, n: int, i: int, u: int, j: int) -> Any:
            r"""(20): and only if :math:`A_{t,j} = 0` for a reader after ``k``."""
            return b.copied[n, i, u] <= 1 - sum(m.A[t, j, level] for level in self.levels[j])

        add_rows(b, held_of_bytes, b.held)
        add_rows(b, held_if_carried, b.held if t + 1 in m.V else [])
        add_rows(b, held_if_read, readers)
        if not extras or self.graph.counts_outputs_alone(k):
            add_rows(b, memory)
        add_rows(b, same_configuration, [e for _, e in b.y])
        add_rows(b, copied_so, freed)
        add_rows(b, copied_if_not_carried, freed if t + 1 in m.V else [])
        later = [(*at, j) for at in freed for i, j in readers if i == at[1] and j > k]
        add_rows(b, copied_if_not_read, later)
        add_rows(b, computed_again, self.levels[k] if extras else [])
        add_rows(b, extra_memory, range(len(extras)))

    def _fits(self, m: Any, certain: Sequence[int], others: Any) -> Any:
        """One knapsack row: values that are there whatever is decided, and the bytes of others."""
        least = sum(min(self.units[i]) for i in certain)
        more = sum((u - min(self.units[i])) * m.s[i, c] for i in certain for c, u in enumerate(self.units[i]))
        return others + more <= self.room - least

    # --------------------------------------------------------------- pieces

    def _extra_bytes(self, extra: Extra, columns: Any) -> Any:
        """Bytes of an extra, where ``columns[i, e]`` says whether its operator has a configuration."""
        i, classes = extra.operator, self.configurations.classes
        neighbours, entries = self.configurations.tables[i].neighbours, self.configurations.tables[i].entries
        found = 0
        for e, entry in enumerate(entries):
            amount = int(extra.own[entry.strategy])
            for j, c in zip(neighbours, entry.others, strict=True):
                if j in extra.pairs:
                    amount += int(extra.pairs[j][classes[j][c][0], entry.strategy])
            if amount:
                found += amount // self.graph.byte_unit * columns[i, e]
        return found

    def _freed(self, k: int, n: int, inputs: Iterable[int]) -> list[Moment]:
        """Inputs of ``k`` that its extra ``n`` may free, and their levels."""
        return [(i, u) for i in inputs if i in self.graph.extras_at[k][n].freed for u in self.levels[i]]

    def _copying(self, extra: Extra, i: int, u: int, columns: Any) -> Any:
        """Whether the operator has a configuration in which it copies ``i``, whose class has the bytes of a level."""
        k, classes = extra.operator, self.configurations.classes[i]
        table = self.configurations.tables[k]
        axis = table.neighbours.index(i)
        return sum(
            columns[k, e]
            for e, entry in enumerate(table.entries)
            if self.units[i][entry.others[axis]] == u and extra.freed[i][classes[entry.others[axis]][0], entry.strategy]
        )

    def _kept(self, m: Any, t: int) -> Any:
        """Extras that operators before a stage's own hold to the end."""
        return sum(self._extra_bytes(extra, m.x) for i in self._staying(t) for extra in self.graph.kept_extras[i])

    def there(self, m: Any, t: int, i: int, u: int) -> Any:
        """:math:`A_{t,i} + B_{t,i}` of a level; without ``A`` where ``i`` may not be computed again in ``t``."""
        return m.B[t, i, u] + m.A[t, i, u] if t in self._again[i] else m.B[t, i, u]

    def has_bytes(self, m: Any, i: int, u: int) -> Any:
        """Whether a value's class has the bytes of a level."""
        return sum(m.s[i, c] for c, amount in enumerate(self.units[i]) if amount == u)

    def _entries(self, i: int, u: int) -> list[int]:
        """Configurations in which a value has the bytes of a level."""
        return [k for k, entry in enumerate(self.configurations.tables[i].entries) if self.units[i][entry.own] == u]

    def _by_level(self, indices: Iterable[Moment]) -> list[tuple[int, int, int]]:
        return [(t, i, u) for t, i in indices for u in self.levels[i]]

    def _further(self, i: int) -> int:
        return len(self._again[i]) - 1

    def _repeated(self, t: int) -> list[int]:
        """Operators that a stage may compute again."""
        return [i for i in self._passing(t) if t in self._again[i]]

    def _passing(self, t: int) -> list[int]:
        """Values of earlier operators that do not stay."""
        return [i for i in range(self.first, t) if not self.graph.operators[i].stays]

    def _staying(self, t: int) -> list[int]:
        """Values that stay, of operators before a stage's own."""
        return [i for i in range(self.first, t) if self.graph.operators[i].stays]

    def _inputs(self, i: int) -> list[int]:
        """Values that an operator reads and that do not stay anyway."""
        return [j for j in self.graph.parents[i] if not self.graph.operators[j].stays]
