"""Our own rules in DTensor's tables, registered by torch's public ``register_sharding`` for one query at a time.

So all rules, torch's, the user's and ours, are read in one way, from DTensor's tables
(:mod:`planner.torch_adapter.rules.dtensor_rules`).

A rule is registered for one query and then removed, for two reasons. First, our rules are right for *this* planner's
local operators only: a softmax over sharded classes that exchanges its sums, a bias that one rank adds, a lookup that
masks the rows of others. DTensor runs the plain operator on every rank, so a program that uses DTensor beside the
planner would get wrong numbers without any error. Second, ``register_sharding`` replaces earlier registrations: those
of the user or of torch would be lost.

Two kinds of rules cannot be registered:

- Operators without a tensor argument (``arange``, ``full``). ``register_sharding`` reads the mesh from a tensor
  argument, and DTensor never dispatches such calls. Their rules are called directly, see :func:`factory_rows`.
- Collectives inside the local operator. A row is placements only; they are added to every rule by
  :func:`planner.torch_adapter.local.operator_collectives.local_collectives`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpStrategy
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.utils._pytree import tree_map_only

from planner.graph.placement import REPLICATE, is_shard, shard_dim
from planner.torch_adapter.local.calls import OperatorCall, Slot
from planner.torch_adapter.rules.own_rules import OwnRule, Row, RuleRequest

_TABLES = ("op_single_dim_strategy_funcs", "op_strategy_funcs", "op_to_schema_info")
"""Tables in which DTensor looks an operator up, in this order; ``register_sharding`` leaves the first one alone."""


@contextmanager
def registered(target: torch._ops.OpOverload, rule: OwnRule) -> Iterator[None]:
    """Replace the entries for ``target`` in DTensor's tables by ``rule``, and restore them afterwards."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables: list[dict[Any, Any]] = [getattr(propagator, name, {}) for name in _TABLES]
    before = [(table, table.pop(target)) for table in tables if target in table]
    register_sharding(target)(_listing(target, rule))
    try:
        yield
    finally:
        for table in tables:
            table.pop(target, None)
        for table, entry in before:
            table[target] = entry


def _listing(target: torch._ops.OpOverload, rule: OwnRule) -> Any:
    """The rule in the form of ``register_sharding``: from arguments to (outputs, tensor arguments) placements."""

    def rows(*args: Any, **kwargs: Any) -> list[tuple[list[TorchPlacement], list[TorchPlacement]]]:
        request = _request(target, args, kwargs)
        replicated: Row = (REPLICATE,) * request.output_count, (REPLICATE,) * len(request.shapes)
        return [
            ([_placement(entry) for entry in outputs], [_placement(entry) for entry in inputs])
            for outputs, inputs in (replicated, *rule(request))
        ]

    return rows


def _request(target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RuleRequest:
    """Arguments with DTensor's descriptions of tensors (which it leaves bare in lists that hold None) as a request."""
    found: list[DTensorSpec | OpStrategy] = []

    def slot(tensor: DTensorSpec | OpStrategy) -> Slot:
        found.append(tensor)
        return Slot(len(found) - 1)

    args, kwargs = tree_map_only((DTensorSpec, OpStrategy), slot, (args, kwargs))
    call = OperatorCall.from_template(target, args, kwargs)
    return RuleRequest(call, tuple(tuple(tensor.shape) for tensor in found), found[0].mesh.size())


def _placement(entry: str) -> TorchPlacement:
    if is_shard(entry):
        return Shard(shard_dim(entry))
    return Replicate() if entry == REPLICATE else Partial(entry.removeprefix("P"))


def factory_rows(call: OperatorCall, rule: OwnRule, axis_size: int) -> tuple[Row, ...]:
    """Rows of an operator without tensor arguments, the all-replicate one left out."""
    return tuple(rule(RuleRequest(call, (), axis_size)))
