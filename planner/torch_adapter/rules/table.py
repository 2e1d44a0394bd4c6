"""Rules of one operator on one mesh axis: candidates, divisibility, verification, cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from planner.graph.axis_rule import AxisRule
from planner.graph.operator_graph import TensorSpec
from planner.graph.placement import REPLICATE, divides, is_partial
from planner.torch_adapter.local.calls import OperatorCall
from planner.torch_adapter.rules.cache import OperatorRules, RuleCache, cache_path
from planner.torch_adapter.rules.dtensor_rules import dtensor_candidates, registered_by_user
from planner.torch_adapter.rules.own_rules import own_rule
from planner.torch_adapter.rules.registration import factory_rows, registered
from planner.torch_adapter.rules.verification import verified_rules

Specs = Sequence[TensorSpec | None]


class RuleTable:
    """Rules on an axis of ``axis_size`` ranks, computed once per distinct operator."""

    def __init__(self, axis_size: int, stored: RuleCache) -> None:
        self.axis_size = axis_size
        self._stored = stored
        self._known: dict[tuple[str, object], OperatorRules] = {}

    def rules(self, call: OperatorCall, inputs: Sequence[TensorSpec], outputs: Specs) -> OperatorRules:
        """Rules of one operator; equal operators share one object.

        The cache on disk holds rules from torch's tables and ours; a user's rule is kept in this process only.
        """
        users = registered_by_user(call.target)
        key = signature(call, inputs, outputs), users
        known = self._known.get(key)
        if known is None:
            stored_key = f"{self.axis_size}|{key[0]}"
            known = self._stored.get(stored_key) if users is None else None
            if known is None:
                known = _compute(call, tuple(inputs), tuple(outputs), self.axis_size)
                if users is None:
                    self._stored.put(stored_key, known)
            self._known[key] = known
        return known

    def save(self) -> None:
        """Write new rules to the cache on disk."""
        self._stored.save()


def rule_table(axis_size: int) -> RuleTable:
    """The table of this process for an axis size."""
    return _table(axis_size, cache_path())


@cache
def _table(axis_size: int, path: Path) -> RuleTable:
    return RuleTable(axis_size, _stored(path))


@cache
def _stored(path: Path) -> RuleCache:
    return RuleCache(path)


def signature(call: OperatorCall, inputs: Sequence[TensorSpec], outputs: Specs) -> str:
    """Text that is equal for calls with equal target, constants, shapes, strides and dtypes."""
    tensors = [None if spec is None else (spec.shape, spec.stride, spec.dtype) for spec in (*inputs, *outputs)]
    return f"{call.target}|{call.leaves}|{call.treespec}|{tensors}"


def _compute(
    call: OperatorCall, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec | None, ...], axis_size: int
) -> OperatorRules:
    replicate = AxisRule(tuple(None if spec is None else REPLICATE for spec in outputs), (REPLICATE,) * len(inputs))
    if axis_size == 1:  # nothing to shard, and torch's tables fail on such an axis
        return OperatorRules((replicate,), True, 0, 0)
    tables = candidate_rules(call, inputs, outputs, axis_size)
    candidates = [rule for rule in tables or () if rule != replicate and _expressible(rule, inputs, outputs)]
    dividing = [rule for rule in candidates if _divides(rule, inputs, outputs, axis_size)]
    right = verified_rules(call, inputs, outputs, dividing, axis_size) if dividing else ()
    return OperatorRules(
        (replicate, *right), tables is not None, len(candidates) - len(dividing), len(dividing) - len(right)
    )


def candidate_rules(
    call: OperatorCall, inputs: Sequence[TensorSpec], outputs: Specs, axis_size: int
) -> tuple[AxisRule, ...] | None:
    """Rules that DTensor's tables list for one operator, as they are and with our own rule registered.

    Sorted and not verified yet; None if no table has the operator.
    """
    own = own_rule(call.target)
    if not inputs:
        if own is None:
            return None
        return tuple(AxisRule(made, ()) for made, _ in factory_rows(call, own, axis_size))
    known = dtensor_candidates(call, inputs, outputs, axis_size)
    if own is not None:
        with registered(call.target, own):
            added = dtensor_candidates(call, inputs, outputs, axis_size)
        assert added, f"{call.target}: DTensor refused the rule that was registered for it"
        known = (*(known or ()), *added)
    return None if known is None else tuple(sorted(set(known), key=lambda rule: rule.sort_key))


def _placed(rule: AxisRule, inputs: Sequence[TensorSpec], outputs: Specs) -> Iterator[tuple[str, TensorSpec]]:
    yield from zip(rule.inputs, inputs, strict=True)
    for entry, spec in zip(rule.outputs, outputs, strict=True):
        if entry is not None and spec is not None:
            yield entry, spec


def _divides(rule: AxisRule, inputs: Sequence[TensorSpec], outputs: Specs, axis_size: int) -> bool:
    return all(divides(spec.shape, (entry,), (axis_size,)) for entry, spec in _placed(rule, inputs, outputs))


def _expressible(rule: AxisRule, inputs: Sequence[TensorSpec], outputs: Specs) -> bool:
    """Whether collectives exist for the pending reductions: none on truth values, no average of integers."""
    return not any(
        is_partial(entry) and (spec.dtype == "bool" or (entry == "Pavg" and "int" in spec.dtype))
        for entry, spec in _placed(rule, inputs, outputs)
    )
