"""Transposed tensors: collectives work on the dimension that is outermost in memory, and are charged so."""

from __future__ import annotations

import itertools

import pytest
import torch

from planner.graph.operator_graph import TensorSpec
from planner.graph.placement import reordered, restored
from planner.machine.cluster import LinkSpec
from planner.machine.resharding import ReshardPlanner

PLANNER = ReshardPlanner([LinkSpec(latency_seconds=1e-6, bandwidth=1e9)], (2,), 1e10, 1e-6)


def spec_of(tensor):
    return TensorSpec(tuple(tensor.shape), tensor.stride(), "float32")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_order_of_a_permuted_tensor(order):
    lying = torch.empty(2, 3, 4)
    tensor = lying.permute([order.index(dim) for dim in range(3)])
    assert spec_of(tensor).memory_order == order
    assert tensor.permute(order).is_contiguous()


def test_dimensions_of_size_one_lie_anywhere():
    assert TensorSpec((4, 1, 3), (3, 1, 1), "float32").memory_order == (0, 1, 2)
    assert TensorSpec((1, 4, 1), (1, 1, 99), "float32").memory_order == (0, 1, 2)
    assert TensorSpec((), (), "float32").memory_order == ()


def test_placements_are_renamed_and_back():
    order = (2, 0, 1)
    assert reordered(("S2", "S0", "R", "Psum"), order) == ("S0", "S1", "R", "Psum")
    for placement in itertools.product(("R", "S0", "S1", "S2", "Pmax"), repeat=2):
        assert restored(reordered(placement, order), order) == placement


def test_a_transposed_tensor_is_gathered_without_a_copy_along_its_outermost_dimension():
    shape, transposed = (64, 32), (1, 0)
    whole = 64 * 32 * 4
    assert PLANNER.path(shape, 4, ("S0",), ("R",)).peak_bytes == whole
    assert PLANNER.path(shape, 4, ("S1",), ("R",)).peak_bytes == 2 * whole
    assert PLANNER.path(shape, 4, ("S0",), ("R",), transposed).peak_bytes == 2 * whole
    found = PLANNER.path(shape, 4, ("S1",), ("R",), transposed)
    assert found.peak_bytes == whole
    assert found.placements == (("S1",), ("R",))
    assert found.seconds == PLANNER.path(shape, 4, ("S0",), ("R",)).seconds
