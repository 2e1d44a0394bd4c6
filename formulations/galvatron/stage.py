r"""Galvatron-BMW's problem of one pipeline stage, exactly: one strategy per layer, the true peak under a limit.

Layer ``l`` of a stage computes by a strategy ``s_l``. Forward leaves ``O_f(l, s_l)`` bytes, of every micro-batch that
the schedule holds at this stage; backward of the layer needs ``O_b(l, s_l)`` besides; ``O_ms(l, s_l)`` of parameters,
gradients and optimizer states stay. The peak (Eq. 2) is the worst backward step:

.. math:: \sum_l O_{ms}(l, s_l) + \max_l \Bigl(\sum_{k \le l} O_f(k, s_k) + O_b(l, s_l)\Bigr) \le E .

The cost is the sum over layers of ``c(l, s_l)`` and of the cost of changing the layout of samples between layers,
``R(l, s_{l-1}, s_l)``, which depends on strategies only through their layouts (Eq. 4; zero for the first layer).

In the canonical problem a layer is a node, ``R`` is a factor between neighbours, and time is the backward step of a
layer: ``O_f`` is in use from the layer's own step on, ``O_b`` at that step, ``O_ms`` always
(:func:`build_galvatron_stage`). A pipeline repeats micro-batches that do not synchronise gradients; their time, where
it is limited, is a second resource whose usage is the same at all times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from formulations.problem.strategy_problem import (
    BoolArray,
    Factor,
    IntArray,
    Node,
    Resource,
    StrategyProblem,
    UsageTerm,
)

__all__ = ["StageProblem", "build_galvatron_stage"]

MEMORY, MICRO_BATCH = 0, 1
"""Indices of the resources of the canonical problem; the second is there only where it is limited."""


@dataclass(frozen=True, slots=True, eq=False)
class StageProblem:
    """Layers of one stage with time and memory of their strategies; times in quanta, memory in bytes.

    Parameters
    ----------
    cost
        Cost to minimise per layer and strategy, shape ``(L, S)``.
    repeated
        Time of a micro-batch without synchronisation, shape ``(L, S)``.
    forward, backward, states
        ``O_f`` of all micro-batches in flight, ``O_b`` and ``O_ms``, shape ``(L, S)``.
    allowed
        Flags of the possible strategies, shape ``(L, S)``.
    layouts
        Number of the layout of every strategy, shape ``(S,)``.
    transformation
        Cost from the layout of the layer before to that of this one, shape ``(L, C, C)``; it is added to `cost` and
        to `repeated`, times `repeats` to the former. That of the first layer is not used.
    memory_limit
        Bytes on one device.
    repeats
        How often `cost` counts a transformation.
    seconds_per_cost
        Length of a quantum, or None.
    """

    cost: IntArray
    repeated: IntArray
    forward: IntArray
    backward: IntArray
    states: IntArray
    allowed: BoolArray
    layouts: IntArray
    transformation: IntArray
    memory_limit: int
    repeats: int = 1
    seconds_per_cost: float | None = None

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.cost)

    def peak(self, choices: Sequence[int]) -> int:
        """Return the largest number of bytes over all backward steps (Eq. 2).

        Parameters
        ----------
        choices
            One strategy per layer.
        """
        return int(self.step_bytes(choices).max())

    def step_bytes(self, choices: Sequence[int]) -> IntArray:
        """Return the bytes in use at the backward step of every layer, shape ``(L,)``; as for :meth:`peak`."""
        rows = np.arange(self.layers)
        chosen = np.asarray(choices)
        forward = np.cumsum(self.forward[rows, chosen])
        used: IntArray = self.states[rows, chosen].sum() + forward + self.backward[rows, chosen]
        return used

    def cost_of(self, choices: Sequence[int]) -> int:
        """Return the cost of a plan, transformations included."""
        return self._sum(self.cost, choices) + self.repeats * self._transformations(choices)

    def repeated_of(self, choices: Sequence[int]) -> int:
        """Return the time of a micro-batch without synchronisation, transformations included."""
        return self._sum(self.repeated, choices) + self._transformations(choices)

    def is_feasible(self, choices: Sequence[int], repeated_limit: int | None = None) -> bool:
        """Whether a plan uses possible strategies within the limits."""
        if not all(self.allowed[layer, s] for layer, s in enumerate(choices)):
            return False
        if repeated_limit is not None and self.repeated_of(choices) > repeated_limit:
            return False
        return self.peak(choices) <= self.memory_limit

    def _sum(self, table: IntArray, choices: Sequence[int]) -> int:
        return sum(int(table[layer, s]) for layer, s in enumerate(choices))

    def _transformations(self, choices: Sequence[int]) -> int:
        layouts = [int(self.layouts[s]) for s in choices]
        pairs = enumerate(pairwise(layouts), start=1)
        return sum(int(self.transformation[layer, before, after]) for layer, (before, after) in pairs)


def build_galvatron_stage(stage: StageProblem, repeated_limit: int | None = None) -> StrategyProblem:
    """Build the canonical problem of a stage.

    Parameters
    ----------
    stage
        Layers and strategies.
    repeated_limit
        Quanta that a micro-batch without synchronisation may take, or None.

    Returns
    -------
    StrategyProblem
        Node ``l`` is layer ``l``, its strategies those of the stage; the horizon is the number of layers.
    """
    limited = repeated_limit is not None
    transformations = [_transformation(stage, layer) for layer in range(stage.layers)]
    resources = [Resource("memory", stage.memory_limit)]
    if limited:
        resources.append(Resource("micro-batch without synchronisation", repeated_limit))
    factors = []
    for layer in range(1, stage.layers):
        table = transformations[layer]
        if table.any():
            usage = (UsageTerm(MICRO_BATCH, 0, stage.layers, table),) if limited else ()
            factors.append(Factor((layer - 1, layer), stage.repeats * table, None, usage))
    return StrategyProblem(
        name=f"galvatron stage of {stage.layers} layers",
        nodes=tuple(_node(stage, layer, limited) for layer in range(stage.layers)),
        factors=tuple(factors),
        resources=tuple(resources),
        horizon=stage.layers,
        seconds_per_cost=stage.seconds_per_cost,
        time_names=tuple(f"backward of layer {layer}" for layer in range(stage.layers)),
    )


def _node(stage: StageProblem, layer: int, limited: bool) -> Node:
    usage = [
        UsageTerm(MEMORY, layer, stage.layers, stage.forward[layer]),
        UsageTerm(MEMORY, layer, layer + 1, stage.backward[layer]),
        UsageTerm(MEMORY, 0, stage.layers, stage.states[layer]),
    ]
    if limited:
        usage.append(UsageTerm(MICRO_BATCH, 0, stage.layers, stage.repeated[layer]))
    forbidden = None if stage.allowed[layer].all() else ~stage.allowed[layer]
    return Node(f"layer {layer}", stage.cost[layer], forbidden, tuple(usage))


def _transformation(stage: StageProblem, layer: int) -> IntArray:
    """Cost of every pair of strategies, that of the layer before first."""
    return np.ascontiguousarray(stage.transformation[layer][np.ix_(stage.layouts, stage.layouts)])
