"""Collectives inside local operators: kinds and bytes, by the placements of a rule.

The counterpart of :mod:`planner.torch_adapter.local.losses`, which runs these collectives. DTensor's rules
do not list them, so they follow from the operator and its placements, whichever table the rule is from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.graph.operator_graph import TensorSpec
from planner.graph.placement import is_shard
from planner.torch_adapter.local.calls import OperatorCall, Slot
from planner.torch_adapter.local.context import bind

Collectives = tuple[tuple[str, int], ...]
"""(kind, bytes of the buffer on one rank if no other axis shards anything) per collective."""

_ACCUMULATED_BYTES = 4
_MEAN = 1


class _Operator:
    """One operator with an axis placement per tensor argument."""

    def __init__(
        self,
        call: OperatorCall,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec | None],
        placements: Sequence[str],
    ) -> None:
        self.named = bind(call, len(inputs))
        self.inputs, self.outputs, self.placements = inputs, outputs, placements

    def position(self, name: str) -> int:
        slot = self.named[name]
        assert isinstance(slot, Slot)
        return slot.position


def _softmax(operator: _Operator) -> Collectives:
    """One maximum and one sum per row."""
    return _per_row(operator, "self") * 2


def _softmax_backward(operator: _Operator) -> Collectives:
    """One sum per row."""
    return _per_row(operator, "output")


def _per_row(operator: _Operator, name: str) -> Collectives:
    """An all-reduce of one number per row where the reduced dimension is sharded."""
    spec, result = operator.inputs[operator.position(name)], operator.outputs[0]
    assert result is not None
    if not spec.shape:
        return ()
    dim = int(operator.named["dim"]) % len(spec.shape)
    if operator.placements[operator.position(name)] != f"S{dim}":
        return ()
    rows = spec.numel // max(spec.shape[dim], 1)
    return (("all_reduce", rows * max(result.item_bytes, _ACCUMULATED_BYTES)),)


def _nll_loss(operator: _Operator) -> Collectives:
    """The number of counted rows, where a mean is taken over rows of several ranks."""
    if int(operator.named["reduction"]) != _MEAN or not is_shard(operator.placements[operator.position("target")]):
        return ()
    return (("all_reduce", operator.inputs[operator.position("self")].item_bytes),)


_COLLECTIVES: dict[str, Callable[[_Operator], Collectives]] = {
    "aten._softmax.default": _softmax,
    "aten._log_softmax.default": _softmax,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten._log_softmax_backward_data.default": _softmax_backward,
    "aten.nll_loss_forward.default": _nll_loss,
    "aten.nll_loss2d_forward.default": _nll_loss,
}


def local_collectives(
    call: OperatorCall, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec | None], placements: Sequence[str]
) -> Collectives:
    """Collectives of a local operator on one mesh axis.

    Parameters
    ----------
    call, inputs, outputs
        The operator and its global tensors.
    placements
        Placement of each tensor argument on the axis.

    Returns
    -------
    tuple
        In the order of execution; empty for operators that communicate nothing.
    """
    found = _COLLECTIVES.get(str(call.target))
    return () if found is None else found(_Operator(call, inputs, outputs, placements))
