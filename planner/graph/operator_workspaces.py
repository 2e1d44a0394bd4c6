"""Workspace: bytes that an operator holds while it runs, beyond its arguments and results.

Counted are allocations of the executor's own local operators (:mod:`planner.torch_adapter.local.losses`), which
were measured. They are in the softmax family with the reduced dimension sharded: between the sums over the mesh axis
its rows are held in the type of the sums. Where a tensor has 32 bits already, this type is its own and nothing is
held.

Not counted:

- One number or label per row: sharded losses and lookups hold a few, a thousandth of what they read.
- Random operators hold 32 bytes per element of a chunk of 2**18 elements, 8 MiB, before their result exists.
- What other kernels of a device's libraries allocate inside themselves (convolution, layer normalisation backward): it
  differs per library version, and no figure was checked on a device. Workspaces of cuBLAS are part of the reserve.

On CUDA the kernels of attention are counted as well (:mod:`planner.graph.attention_kernels`).
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.graph.attention_kernels import AttentionShapes
from planner.graph.operator_classes import OperatorClass, operator_class
from planner.graph.operator_graph import ITEM_BYTES, Operator, OperatorGraph, TensorSpec
from planner.graph.placement import Placement, shard

_SUMS_ITEM_BYTES = 4
_FORWARD = frozenset({"aten._softmax.default", "aten._log_softmax.default"})
_LOG_BACKWARD = "aten._log_softmax_backward_data.default"
_BACKWARD = "aten._softmax_backward_data.default"


def workspace_item_bytes(
    graph: OperatorGraph, operator: Operator, placement: Placement | None, device: str = "cpu"
) -> int:
    """Bytes that ``operator`` holds beyond arguments and results while it runs, per local element of its result.

    Parameters
    ----------
    graph, operator
        The operator and the graph that holds its tensors.
    placement
        Placement of its first result.
    device
        Kind of device, ``cpu`` or ``cuda``.

    Returns
    -------
    int
        0 for an operator whose workspace is not known.
    """
    result = operator.outputs[0] if operator.outputs else None
    given = tuple(graph.values[value].spec for value in operator.inputs)
    if device == "cuda" and (shapes := attention_shapes(operator.target, given)) is not None:
        return shapes.workspace_item_bytes(operator_class(operator.target) is OperatorClass.ATTENTION_BACKWARD)
    if operator.softmax_dim is None or placement is None or result is None:
        return 0
    if shard(operator.softmax_dim) not in placement:  # whole rows on every rank: torch's own kernel runs
        return 0
    return _bytes_per_element(operator.target, given, graph.values[result].spec)


def attention_shapes(target: str, given: Sequence[TensorSpec]) -> AttentionShapes | None:
    """What the kernel of a traced attention with these arguments depends on; None for other operators."""
    first = {OperatorClass.ATTENTION_FORWARD: 0, OperatorClass.ATTENTION_BACKWARD: 1}.get(operator_class(target))
    if first is None:
        return None
    query, key, value = given[first : first + 3]
    masked = len(given) > (6 if first else 3)
    # Whether it is causal is not known; it decides only where there are more keys than queries.
    return AttentionShapes(query.dtype, query.shape, key.shape, value.shape, masked)


def _bytes_per_element(target: str, given: tuple[TensorSpec, ...], made: TensorSpec) -> int:
    """Most bytes alive per element of the result, without the result; a cast to the type at hand copies nothing."""
    out = made.item_bytes
    sums = max(_SUMS_ITEM_BYTES, *(ITEM_BYTES[spec.dtype] for spec in given))
    cast_out = out if out != sums else 0
    if target in _FORWARD:
        cast_in = sums if given[0].item_bytes != sums else 0
        return cast_in + sums + cast_out - out
    if target == _LOG_BACKWARD:
        cast_in = sums if given[1].item_bytes != sums else 0
        return max(cast_in + sums, sums + cast_out) - out
    if target == _BACKWARD:
        return sums + cast_out - out
    return 0
