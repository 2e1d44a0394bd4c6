"""Sharding rules of a traced step: per operator and mesh axis, and composed over several axes.

Rules come from DTensor's tables and our own (:mod:`planner.torch_adapter`), are checked numerically
before they are used, and are shared by operators with equal shapes and constants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from planner.graph.axis_rule import AxisRule
from planner.graph.operator_graph import Operator, OperatorGraph, TensorSpec
from planner.graph.placement import AxisPlacement, Placement, divides, is_partial, is_shard
from planner.strategies.traced_step import TracedStep
from planner.torch_adapter.rules.cache import OperatorRules
from planner.torch_adapter.rules.table import rule_table

__all__ = ["AxisRule", "RuleReport", "Strategy", "axis_rules", "compose"]


@dataclass(frozen=True)
class RuleReport:
    """Counts of operators without a sharding rule, or with rules left out, by target name.

    Parameters
    ----------
    without_rule
        Operators without any sharding rule: they run replicated.
    not_dividing
        Operators that lost a rule because a dimension is not divided by the axis.
    dropped
        Wrong rules that verification removed, counted once per distinct operator.
    undivided
        Indices of the operators counted in ``not_dividing``.
    """

    without_rule: dict[str, int]
    not_dividing: dict[str, int]
    dropped: dict[str, int]
    undivided: frozenset[int] = frozenset()

    @classmethod
    def merged(cls, reports: Sequence[RuleReport]) -> RuleReport:
        """Reports of several axis sizes as one: the larger count of each target."""
        found: tuple[dict[str, int], dict[str, int], dict[str, int]] = ({}, {}, {})
        for report in reports:
            for counts, more in zip(found, (report.without_rule, report.not_dividing, report.dropped), strict=True):
                for target, count in more.items():
                    counts[target] = max(counts.get(target, 0), count)
        undivided: frozenset[int] = frozenset().union(*(report.undivided for report in reports))
        return cls(*found, undivided)


class InnerCollective(NamedTuple):
    """A collective inside a local operator: mesh axis, kind, bytes of its buffer on one rank."""

    axis: int
    kind: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Strategy:
    """Placements of an operator's tensors on the whole mesh.

    ``collectives`` are those inside the local operator.
    """

    outputs: tuple[Placement | None, ...]
    inputs: tuple[Placement, ...]
    collectives: tuple[InnerCollective, ...]


def axis_rules(traced: TracedStep, axis_size: int) -> tuple[tuple[tuple[AxisRule, ...], ...], RuleReport]:
    """Verified rules of every operator on a mesh axis of ``axis_size`` ranks.

    Rules whose pending reduction on an input no producer can deliver are left out.

    Parameters
    ----------
    traced
        The step.
    axis_size
        Ranks on the axis; with one rank there is only replication.

    Returns
    -------
    tuple
        Per operator index its rules, sorted, the all-replicate rule first; and the report of rules left out.

    Raises
    ------
    ValueError
        If ``axis_size`` is not positive.
    """
    if axis_size < 1:
        raise ValueError(f"axis size is {axis_size}: give the number of ranks on the mesh axis, at least 1")
    graph, table = traced.graph, rule_table(axis_size)
    without_rule: Counter[str] = Counter()
    not_dividing: Counter[str] = Counter()
    undivided: list[int] = []
    dropped: dict[int, tuple[str, int]] = {}
    entries: list[OperatorRules] = []
    for operator, call in zip(graph.operators, traced.calls, strict=True):
        inputs = tuple(graph.values[index].spec for index in operator.inputs)
        outputs = tuple(None if index is None else graph.values[index].spec for index in operator.outputs)
        entry = table.rules(call, inputs, outputs)
        entries.append(entry)
        without_rule[operator.target] += not entry.in_table
        if entry.not_dividing > 0:
            not_dividing[operator.target] += 1
            undivided.append(operator.index)
        dropped[id(entry)] = (operator.target, entry.dropped)
    table.save()
    wrong: Counter[str] = Counter()
    for target, count in dropped.values():
        wrong[target] += count
    report = RuleReport(_positive(without_rule), _positive(not_dividing), _positive(wrong), frozenset(undivided))
    return _deliverable(graph, entries), report


def _positive(counts: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in sorted(counts.items()) if count > 0}


def _deliverable(graph: OperatorGraph, entries: Sequence[OperatorRules]) -> tuple[tuple[AxisRule, ...], ...]:
    """Rules whose partial inputs some remaining rule of the producer delivers; inputs of the step are never partial."""
    partial: dict[int, set[str]] = {}
    filtered: dict[tuple[int, tuple[frozenset[str], ...]], tuple[AxisRule, ...]] = {}
    result = []
    for operator, entry in zip(graph.operators, entries, strict=True):
        available = tuple(frozenset(partial.get(index, ())) for index in operator.inputs)
        key = (id(entry), available)
        if key not in filtered:
            filtered[key] = tuple(
                rule
                for rule in entry.rules
                if all(not is_partial(old) or old in made for old, made in zip(rule.inputs, available, strict=True))
            )
        rules = filtered[key]
        for position, index in enumerate(operator.outputs):
            if index is not None:
                made = {rule.outputs[position] for rule in rules}
                partial[index] = {new for new in made if new is not None and is_partial(new)}
        result.append(rules)
    return tuple(result)


def compose(
    operator: Operator, graph: OperatorGraph, rules_per_axis: Sequence[Sequence[AxisRule]], mesh: Sequence[int]
) -> tuple[Strategy, ...]:
    """Strategies of an operator on a mesh: one rule per axis, every tensor dividing jointly.

    Parameters
    ----------
    operator, graph
        The operator.
    rules_per_axis
        Its rules on each axis.
    mesh
        Size of each axis.

    Returns
    -------
    tuple
        In the order of the product of the rules, so that all-replicate comes first.
    """
    inputs = tuple(graph.values[index].spec for index in operator.inputs)
    outputs = tuple(None if index is None else graph.values[index].spec for index in operator.outputs)
    groups = _groups(operator.target, inputs, outputs)
    return _compose(inputs, outputs, groups, tuple(map(tuple, rules_per_axis)), tuple(mesh))


@lru_cache(maxsize=4096)
def _compose(
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec | None, ...],
    groups: int,
    rules_per_axis: tuple[tuple[AxisRule, ...], ...],
    mesh: tuple[int, ...],
) -> tuple[Strategy, ...]:
    """Strategies by shapes and rules, cached: equal operators of different layers share them."""
    strategies: dict[Strategy, None] = {}
    for rules in product(*rules_per_axis):
        placed_in = tuple(zip(*(rule.inputs for rule in rules), strict=True)) if inputs else ()
        placed_out = tuple(_placement([rule.outputs[at] for rule in rules]) for at in range(len(outputs)))
        fits = all(divides(spec.shape, placement, mesh) for spec, placement in zip(inputs, placed_in, strict=True))
        fits = fits and all(_fits(spec, placed, mesh) for spec, placed in zip(outputs, placed_out, strict=True))
        if fits and (groups == 1 or groups % _parts(rules, mesh) == 0):
            strategies[Strategy(placed_out, placed_in, _collectives(rules, mesh))] = None
    return tuple(strategies)


def _groups(target: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec | None]) -> int:
    """Groups of a convolution, from its shapes; 1 for other operators."""
    if target == "aten.convolution.default" and outputs[0] is not None:
        made, source, weight = outputs[0].shape, inputs[0].shape, inputs[1].shape
    elif target == "aten.convolution_backward.default":
        made, source, weight = inputs[0].shape, inputs[1].shape, inputs[2].shape
    else:
        return 1
    return (source[1] if weight[0] == made[1] else made[1]) // weight[1]


def _parts(rules: Sequence[AxisRule], mesh: Sequence[int]) -> int:
    """Number of parts that channels are split into; a grouped convolution needs whole groups in each."""
    return prod(count for rule, count in zip(rules, mesh, strict=True) if "S1" in rule.inputs)


def _placement(entries: Sequence[AxisPlacement | None]) -> Placement | None:
    known = tuple(entry for entry in entries if entry is not None)
    return known if len(known) == len(entries) else None


def _fits(spec: TensorSpec | None, placement: Placement | None, mesh: Sequence[int]) -> bool:
    if spec is None or placement is None:
        return spec is None and placement is None
    return divides(spec.shape, placement, mesh)


def _collectives(rules: Sequence[AxisRule], mesh: Sequence[int]) -> tuple[InnerCollective, ...]:
    """Collectives inside the local operator; axes that shard other dimensions divide their buffers.

    A buffer holds one number per row of the first input.
    """
    result: list[InnerCollective] = []
    for axis, rule in enumerate(rules):
        if not rule.collectives:
            continue
        parts = 1
        for other, (other_rule, count) in enumerate(zip(rules, mesh, strict=True)):
            if other != axis and is_shard(other_rule.inputs[0]) and other_rule.inputs[0] != rule.inputs[0]:
                parts *= count
        result.extend(InnerCollective(axis, kind, max(size // parts, min(size, 8))) for kind, size in rule.collectives)
    return tuple(result)
