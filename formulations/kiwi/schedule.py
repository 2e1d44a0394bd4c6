"""Stages of KIWI's full problem, and their exact replay: cost, and bytes after every computation.

Stage ``t`` computes operator ``t`` for the first time; before it, in ascending order, it may run earlier
operators again (``A[t, i]``). Which values are carried from stage to stage (``B[t, i]``) follows: a value is
held from a computation to the last one that reads it before it is computed again, and to the end where it
stays. That is the smallest ``B`` that equations (12) and (13) allow, so no other one needs less memory.

After a computation the inputs, the output and everything held for later count; then inputs without a later
use are freed (equations 17-19, repaired: the value itself too). Extras count where a graph has them. The replay walks
computations one by one and shares no code with the linear models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from formulations.kiwi.extras import Phase
from formulations.kiwi.graph import KiwiGraph


class ScheduleError(ValueError):
    """Stages or strategies that do not belong to a graph; the message says where."""


@dataclass(frozen=True, slots=True)
class StagedDecision:
    """A solution of the full problem.

    Parameters
    ----------
    strategies
        One per operator.
    stages
        Per stage the operators that it computes, ascending; the last one is the stage's own.
    """

    strategies: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """What a decision costs and holds.

    Parameters
    ----------
    cost
        In quanta of the graph.
    memory
        Most bytes at every computation, resident ones included.
    moments
        Stage and operator of every computation.
    """

    cost: int
    memory: tuple[int, ...]
    moments: tuple[tuple[int, int], ...]

    @property
    def peak(self) -> int:
        """Most bytes at any moment."""
        return max(self.memory)

    def over(self, memory_limit: int) -> list[tuple[int, int]]:
        """Return the moments (stage, operator) at which more than the limit is held."""
        return [at for at, amount in zip(self.moments, self.memory, strict=True) if amount > memory_limit]


def replay(graph: KiwiGraph, decision: StagedDecision) -> Replay:
    """Replay a decision in exact integers.

    Raises
    ------
    ScheduleError
        If a strategy or a stage does not fit the graph, or a value that stays is computed twice. (Nothing can be
        read before it was computed: producers come before consumers.)
    """
    _validate(graph, decision)
    amounts = [int(o.output_bytes[s]) for o, s in zip(graph.operators, decision.strategies, strict=True)]
    costs = [graph.execution_cost(decision.strategies, i) for i in range(len(graph.operators))]
    moments = [(t, i) for t, stage in enumerate(decision.stages) for i in stage]
    freed = _freed_after(graph, [i for _, i in moments])
    held = sum(amounts[: graph.residents])
    memory, cost = [], 0
    for (_, i), values in zip(moments, freed, strict=True):
        during = held + amounts[i]
        after = during - sum(amounts[value] for value in values)
        beside = {Phase.BEFORE: held, Phase.DURING: during, Phase.AFTER: after}
        at_once = [during] if graph.counts_outputs_alone(i) else []
        for extra in graph.extras_at[i]:
            copied = [
                amounts[j]
                for j, table in extra.freed.items()
                if j in values and table[decision.strategies[j], decision.strategies[i]]
            ]
            at_once.append(beside[extra.phase] + extra.bytes_of(decision.strategies) - sum(copied))
        memory.append(max(at_once))
        held = after + sum(extra.bytes_of(decision.strategies) for extra in graph.kept_extras[i])
        cost += costs[i]
    return Replay(cost, tuple(memory), tuple(moments))


def in_order(graph: KiwiGraph) -> tuple[tuple[int, ...], ...]:
    """Return the stages that compute every operator once."""
    return tuple((i,) for i in range(graph.residents, len(graph.operators)))


def with_recomputed(graph: KiwiGraph, recomputed: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the stages that run each of ``recomputed`` again before its first backward reader."""
    stages = [list(stage) for stage in in_order(graph)]
    for i in sorted(recomputed):
        stages[graph.first_backward_use[i] - graph.residents].insert(-1, i)
    return tuple(map(tuple, stages))


def tidy(graph: KiwiGraph, stages: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Leave out computations that are not read before the value is computed again."""
    kept: list[tuple[int, ...]] = []
    needed = {i for i, operator in enumerate(graph.operators) if operator.stays}
    for t in range(len(stages) - 1, -1, -1):
        stage = []
        for i in reversed(stages[t]):
            if i == graph.residents + t or i in needed:
                stage.append(i)
                needed.discard(i)
                needed.update(graph.parents[i])
        kept.append(tuple(reversed(stage)))
    return tuple(reversed(kept))


def _freed_after(graph: KiwiGraph, order: list[int]) -> list[list[int]]:
    """Return the values that are freed after each computation: read here or made here, and not read again."""
    freed: list[list[int]] = [[] for _ in order]
    needed = {i for i, operator in enumerate(graph.operators) if operator.stays}
    for position in range(len(order) - 1, -1, -1):
        i = order[position]
        freed[position] = [value for value in (*graph.parents[i], i) if value not in needed]
        needed.discard(i)
        needed.update(graph.parents[i])
    return freed


def _validate(graph: KiwiGraph, decision: StagedDecision) -> None:
    if len(decision.strategies) != len(graph.operators):
        raise ScheduleError(f"{len(decision.strategies)} strategies for {len(graph.operators)} operators")
    for i, (operator, strategy) in enumerate(zip(graph.operators, decision.strategies, strict=True)):
        if not 0 <= strategy < operator.size:
            raise ScheduleError(
                f"operator {i} ({operator.name}): strategy {strategy} is not one of its {operator.size}"
            )
    if len(decision.stages) != graph.stages:
        raise ScheduleError(f"{len(decision.stages)} stages for {graph.stages} operators that run")
    for t, stage in enumerate(decision.stages):
        own = graph.residents + t
        if not stage or stage[-1] != own or list(stage) != sorted(set(stage)) or stage[0] < graph.residents:
            raise ScheduleError(f"stage {t}: {list(stage)} must ascend to operator {own} and compute no resident")
        twice = [i for i in stage[:-1] if graph.operators[i].stays]
        if twice:
            raise ScheduleError(f"stage {t}: operator {twice[0]} stays in memory and is computed again")
