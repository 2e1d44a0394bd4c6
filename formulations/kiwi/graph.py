"""KIWI's instance as the paper has it: operators with strategies, and resharding on every edge.

Operators come in the order in which they first run: inputs and parameters, which are resident from the
start and cost nothing, then forward, then backward operators. Every strategy of an operator has a cost
``c + d`` (computation and communication) and the bytes of its output on one device; every edge has a table
of resharding costs ``R`` (equation 1). The resharded copy itself takes no memory in the paper; what does beside outputs
when a step is executed is in :mod:`formulations.kiwi.extras`, and counts where a graph has it.

A weight gradient has an edge *from* its parameter, whose table is the cost of bringing the gradient to the
parameter's layout: parameters are always resident, so that an edge from one is a cost and nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from formulations.kiwi.extras import Extra, Phase
from formulations.problem.strategy_problem import BoolArray, IntArray
from formulations.step.training_step import NodeKind

_RESIDENT = (NodeKind.INPUT, NodeKind.PARAMETER)
_ORDER = {NodeKind.INPUT: 0, NodeKind.PARAMETER: 0, NodeKind.FORWARD: 1, NodeKind.BACKWARD: 2}


class GraphError(ValueError):
    """A graph that is not well formed; the message names the operator or edge, the value and the remedy."""


@dataclass(frozen=True, slots=True, eq=False)
class KiwiOperator:
    """An operator, an input or a parameter.

    Parameters
    ----------
    name
        For messages.
    kind
        Inputs and parameters are resident; the others run once, in order, and may run again.
    cost
        Cost of one execution per strategy, shape ``(S,)``, in quanta; 0 for what is resident.
    output_bytes
        Bytes of the output on one device per strategy, shape ``(S,)``.
    stays
        Whether the output stays to the end of the step (weight gradients, results); it is never run again.
    """

    name: str
    kind: NodeKind
    cost: IntArray
    output_bytes: IntArray
    stays: bool = False

    @property
    def size(self) -> int:
        """Number of strategies."""
        return int(self.cost.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class KiwiEdge:
    """``consumer`` reads the output of ``producer``; ``cost`` has shape ``(S_producer, S_consumer)``, in quanta.

    ``forbidden``, of the same shape, flags pairs of strategies that cannot meet; None where all can.
    """

    producer: int
    consumer: int
    cost: IntArray
    forbidden: BoolArray | None = None


@dataclass(frozen=True, eq=False)
class KiwiGraph:
    """A training step as the paper's instance; see the module docstring.

    Parameters
    ----------
    name
        For messages and rows.
    operators, edges
        The step. Several edges may join the same two operators; their costs add up.
    seconds_per_cost
        Length of the cost quantum, or None where costs have no unit.
    rerunnable
        Operators that may run again, which they do in stages of backward operators only; None where all may in any
        stage, as in the paper.
    extras
        Bytes beside outputs; none in the paper.

    Raises
    ------
    GraphError
        On the first defect found.
    """

    name: str
    operators: tuple[KiwiOperator, ...]
    edges: tuple[KiwiEdge, ...]
    seconds_per_cost: float | None = None
    rerunnable: tuple[bool, ...] | None = None
    extras: tuple[Extra, ...] = ()

    def __post_init__(self) -> None:
        for i, operator in enumerate(self.operators):
            defect = _operator_defect(operator, self.operators[i - 1].kind if i else operator.kind)
            if defect:
                raise GraphError(f"operator {i} ({operator.name}): {defect}")
        if not self.stages:
            raise GraphError(f"graph {self.name}: nothing is computed; add a forward or backward operator")
        for k, edge in enumerate(self.edges):
            defect = self._edge_defect(edge)
            if defect:
                raise GraphError(f"edge {k} from {edge.producer} to {edge.consumer}: {defect}")
        for extra in self.extras:
            defect = self._extra_defect(extra)
            if defect:
                raise GraphError(f"extra bytes of operator {extra.operator}, {extra.phase}: {defect}")

    @cached_property
    def residents(self) -> int:
        """Number of inputs and parameters, which come first."""
        return sum(operator.kind in _RESIDENT for operator in self.operators)

    @property
    def stages(self) -> int:
        """Number of operators that run; stage ``t`` ends with operator ``residents + t``."""
        return len(self.operators) - self.residents

    @cached_property
    def byte_unit(self) -> int:
        """Greatest common divisor of all bytes; memory counted in it is exact and keeps numbers small."""
        tables = (
            *(operator.output_bytes for operator in self.operators),
            *(table for extra in self.extras for table in extra.tables),
        )
        return math.gcd(*(int(np.gcd.reduce(table, axis=None)) for table in tables)) or 1

    @property
    def most_bytes(self) -> int:
        """Bytes that no plan exceeds: every output and all extras at once, each in its largest layout."""
        extras = sum(max(0, int(table.max())) for extra in self.extras for table in extra.tables)
        return sum(int(operator.output_bytes.max()) for operator in self.operators) + extras

    @cached_property
    def extras_at(self) -> tuple[tuple[Extra, ...], ...]:
        """Extras that an operator holds while it runs, by operator."""
        return self._extras_by_operator(kept=False)

    @cached_property
    def kept_extras(self) -> tuple[tuple[Extra, ...], ...]:
        """Extras that are held to the end once an operator has run, by operator."""
        return self._extras_by_operator(kept=True)

    def counts_outputs_alone(self, operator: int) -> bool:
        """Whether nothing but outputs is held while an operator computes."""
        return all(extra.phase is not Phase.DURING for extra in self.extras_at[operator])

    def _extras_by_operator(self, *, kept: bool) -> tuple[tuple[Extra, ...], ...]:
        found: list[list[Extra]] = [[] for _ in self.operators]
        for extra in self.extras:
            if (extra.phase is Phase.KEPT) == kept:
                found[extra.operator].append(extra)
        return tuple(map(tuple, found))

    @cached_property
    def edges_into(self) -> tuple[tuple[KiwiEdge, ...], ...]:
        """Edges by consumer."""
        return tuple(tuple(e for e in self.edges if e.consumer == i) for i in range(len(self.operators)))

    @cached_property
    def edges_from(self) -> tuple[tuple[KiwiEdge, ...], ...]:
        """Edges by producer."""
        return tuple(tuple(e for e in self.edges if e.producer == i) for i in range(len(self.operators)))

    @cached_property
    def parents(self) -> tuple[tuple[int, ...], ...]:
        """Operators that each operator reads and that run themselves, ascending; residents are left out."""
        return tuple(
            tuple(sorted({e.producer for e in edges if e.producer >= self.residents})) for edges in self.edges_into
        )

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Operators that read each operator's output, ascending."""
        return tuple(tuple(sorted({e.consumer for e in edges})) for edges in self.edges_from)

    @cached_property
    def first_backward_use(self) -> tuple[int, ...]:
        """First backward operator that reads a forward operator (the paper's ``H``), else -1."""
        return tuple(
            next((j for j in children if self.operators[j].kind is NodeKind.BACKWARD), -1)
            if operator.kind is NodeKind.FORWARD
            else -1
            for operator, children in zip(self.operators, self.children, strict=True)
        )

    @cached_property
    def candidates(self) -> tuple[int, ...]:
        """Forward operators that the reduced problem may run again (``z = 1``), ascending."""
        return tuple(i for i, use in enumerate(self.first_backward_use) if use >= 0 and self.may_run_again(use, i))

    def may_run_again(self, stage: int, operator: int) -> bool:
        """Whether an earlier operator may run again in the stage of another one."""
        if self.operators[operator].stays:
            return False
        if self.rerunnable is None:
            return True
        return self.rerunnable[operator] and self.operators[stage].kind is NodeKind.BACKWARD

    def execution_cost(self, strategies: Sequence[int], operator: int) -> int:
        """Cost of running one operator once, resharding of its inputs included."""
        own = strategies[operator]
        resharding = sum(int(edge.cost[strategies[edge.producer], own]) for edge in self.edges_into[operator])
        return int(self.operators[operator].cost[own]) + resharding

    def to_json(self) -> str:
        """Return the graph as JSON text, from which :meth:`from_json` makes an equal one."""
        return json.dumps(
            {
                "name": self.name,
                "operators": [
                    [o.name, str(o.kind), o.cost.tolist(), o.output_bytes.tolist(), o.stays] for o in self.operators
                ],
                "edges": [
                    [e.producer, e.consumer, e.cost.tolist(), None if e.forbidden is None else e.forbidden.tolist()]
                    for e in self.edges
                ],
                "seconds_per_cost": self.seconds_per_cost,
                "rerunnable": self.rerunnable,
                "extras": [
                    [
                        [x.operator, str(x.phase), x.own.tolist()],
                        *([[j, table.tolist()] for j, table in of.items()] for of in (x.pairs, x.freed)),
                    ]
                    for x in self.extras
                ],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> KiwiGraph:
        """Read what :meth:`to_json` wrote."""
        document = json.loads(text)
        operators = tuple(
            KiwiOperator(name, NodeKind(kind), np.array(cost, np.int64), np.array(amount, np.int64), stays)
            for name, kind, cost, amount, stays in document["operators"]
        )
        edges = tuple(
            KiwiEdge(u, v, np.array(cost, np.int64), None if flags is None else np.array(flags, np.bool_))
            for u, v, cost, flags in document["edges"]
        )
        extras = tuple(
            Extra(
                i,
                Phase(phase),
                np.array(own, np.int64),
                {j: np.array(table, np.int64) for j, table in pairs},
                {j: np.array(table, np.bool_) for j, table in freed},
            )
            for (i, phase, own), pairs, freed in document["extras"]
        )
        again = document["rerunnable"]
        return cls(document["name"], operators, edges, document["seconds_per_cost"], again and tuple(again), extras)

    def _edge_defect(self, edge: KiwiEdge) -> str:
        u, v = edge.producer, edge.consumer
        if not 0 <= u < v < len(self.operators):
            return f"a producer comes before its consumer, and there are {len(self.operators)} operators"
        if self.operators[v].kind in _RESIDENT:
            return "inputs and parameters read nothing"
        shape = self.operators[u].size, self.operators[v].size
        if edge.cost.shape != shape or edge.cost.dtype != np.int64 or int(edge.cost.min()) < 0:
            return f"cost must be non-negative int64 of shape {shape}, got {edge.cost.dtype} of {edge.cost.shape}"
        return ""

    def _extra_defect(self, extra: Extra) -> str:
        size, producers = self.operators[extra.operator].size, {e.producer for e in self.edges_into[extra.operator]}
        if extra.own.shape != (size,):
            return f"give bytes for each of its {size} strategies, got shape {extra.own.shape}"
        for j, table in (*extra.pairs.items(), *extra.freed.items()):
            if j not in producers:
                return f"it reads nothing of operator {j}; give an edge"
            if table.shape != (self.operators[j].size, size):
                return f"tables of pairs with operator {j} have shape {table.shape}; give one per pair of strategies"
        if extra.phase in (Phase.AFTER, Phase.KEPT) and not self.operators[extra.operator].stays:
            return "only an operator whose output stays holds any once it has run"
        return ""


def _operator_defect(operator: KiwiOperator, kind_before: NodeKind) -> str:
    if _ORDER[operator.kind] < _ORDER[kind_before]:
        return f"{operator.kind} after {kind_before}; order them inputs and parameters, forward, backward"
    for field, values in (("cost", operator.cost), ("output_bytes", operator.output_bytes)):
        if values.ndim != 1 or not values.size or values.dtype != np.int64 or int(values.min()) < 0:
            return f"{field} must be a non-empty vector of non-negative int64, got {values!r:.60}"
    if operator.cost.shape != operator.output_bytes.shape:
        return f"{operator.cost.size} costs and {operator.output_bytes.size} bytes; give one of each per strategy"
    if operator.kind in _RESIDENT and operator.cost.any():
        return "inputs and parameters are not computed; their cost must be 0"
    return ""
