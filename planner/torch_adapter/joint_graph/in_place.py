"""Results of a generated kernel that are written over one of its arguments.

The code generator writes an elementwise result over a tensor of the same size that nothing reads afterwards, if both
are read and written in one order. Whether something reads it afterwards, the schedule says; here is what one kernel
allows: every operator in it that reads the argument is needed for the result, and each takes the elements in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

_IN_ORDER = frozenset({"view", "_unsafe_view", "alias", "reshape", "squeeze", "unsqueeze", "detach"})
"""Views that keep the order of the elements."""


def overwritten(
    written: Sequence[Node], read: Sequence[Node], inside: Collection[Node], is_reduction: Callable[[Node], bool]
) -> Iterator[tuple[Node, Node]]:
    """Yield pairs of a result and the argument whose memory it may take, each argument at most once.

    Parameters
    ----------
    written, read
        Results and arguments of the kernel.
    inside
        Its operators.
    is_reduction
        Whether an operator reduces dimensions.
    """
    taken: set[Node] = set()
    for result in written:
        if is_reduction(result) or not _elementwise(result, result):
            continue
        before = _ancestors(result, inside)
        for argument in read:
            if argument in taken or not _alike(argument, result):
                continue
            users = list(_users(argument, inside))
            if users and all(
                user in before and (_elementwise(user, result) or (is_reduction(user) and _over_last(user)))
                for user in users
            ):
                taken.add(argument)
                yield result, argument
                break


def _users(node: Node, inside: Collection[Node]) -> Iterator[Node]:
    """Operators of the kernel that read a tensor, itself or by views; a view that changes the order is one as well."""
    for user in node.users:
        if _name(user) in _IN_ORDER:
            yield from _users(user, inside)
        elif user in inside or user.op != "call_function" or _is_other_view(user):
            yield user


def _ancestors(result: Node, inside: Collection[Node]) -> set[Node]:
    found, stack = {result}, [result]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in found and (source in inside or _name(source) in _IN_ORDER or _is_other_view(source)):
                found.add(source)
                stack.append(source)
    return found


def _elementwise(node: Node, result: Node) -> bool:
    """Whether an operator computes as many elements as the result, each from those at its place."""
    value, wanted = node.meta.get("val"), result.meta.get("val")
    if not isinstance(value, Tensor) or not isinstance(wanted, Tensor) or _is_other_view(node):
        return False
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    cast = _name(node) in ("convert_element_type", "_to_copy", "clone", "where")
    return (pointwise or cast) and value.numel() == wanted.numel() and value.is_contiguous()


def _over_last(node: Node) -> bool:
    """Whether a reduction is over the last dimensions, so that it reads rows one after the other."""
    source: Any = node.args[0]
    value = source.meta.get("val")
    dims: Any = node.args[1] if len(node.args) > 1 else None
    if not isinstance(value, Tensor) or dims is None:
        return False
    reduced = {dim % value.ndim for dim in (dims if isinstance(dims, (list, tuple)) else [dims])}
    return reduced == set(range(value.ndim - len(reduced), value.ndim))


def _alike(argument: Node, result: Node) -> bool:
    ours, theirs = argument.meta.get("val"), result.meta.get("val")
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return False
    return ours.numel() == theirs.numel() and ours.dtype == theirs.dtype and ours.is_contiguous()


def _is_other_view(node: Node) -> bool:
    return _name(node) in ("permute", "expand", "slice", "select", "as_strided", "t", "split", "broadcast_in_dim")


def _name(node: Node) -> str:
    return str(node.target).split(".")[1] if node.op == "call_function" and "." in str(node.target) else ""
