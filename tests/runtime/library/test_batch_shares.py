"""The share of a batch that a rank reads, and batches that are refused."""

from __future__ import annotations

import pytest
import torch

from planner.graph.operator_graph import OperatorGraph, TensorSpec, Value, ValueRole
from planner.schedule.instructions import Buffer, Schedule
from runtime.library.batch import BatchShares
from runtime.library.errors import BatchError

SHAPES = {"tokens": ((8, 6), "int64"), "labels": ((8, 6), "int64")}


def shares(placements, mesh, coordinate, shapes=SHAPES):
    values = [
        Value(k, name, TensorSpec(shape, (1,) * len(shape), dtype), ValueRole.INPUT)
        for k, (name, (shape, dtype)) in enumerate(shapes.items())
    ]
    graph = OperatorGraph(tuple(values), (), tuple(range(len(values))), (), ())
    buffers = tuple(Buffer(k, placement) for k, placement in enumerate(placements))
    schedule = Schedule(mesh, buffers, tuple(range(len(values))), (), ())
    return BatchShares.of_schedule(graph, schedule, tuple(shapes), coordinate)


def batch():
    tokens = torch.arange(48).view(8, 6)
    return {"tokens": tokens, "labels": tokens + 100}


def test_rows_that_every_tensor_is_sharded_by():
    found = shares([("S0", "S0"), ("S0", "S0")], (2, 2), (1, 0))
    assert found.rows == range(4, 6)
    whole = found.blocks(batch())
    part = found.blocks({name: tensor[4:6] for name, tensor in batch().items()})
    for name, tensor in batch().items():
        assert torch.equal(whole[name], tensor[4:6])
        assert torch.equal(part[name], tensor[4:6])


def test_a_second_axis_that_shards_columns_is_cut_from_the_rows():
    found = shares([("S0", "S1"), ("S0", "S1")], (2, 2), (0, 1))
    assert found.rows == range(4)
    for name, tensor in batch().items():
        given = {key: value[:4] for key, value in batch().items()}
        assert torch.equal(found.blocks(given)[name], tensor[:4, 3:])
        local = {key: value[:4, 3:] for key, value in batch().items()}
        assert torch.equal(found.blocks(local)[name], tensor[:4, 3:])


def test_every_row_is_read_where_one_tensor_is_replicated():
    found = shares([("S0",), ("R",)], (2,), (1,))
    assert found.rows == range(8)
    blocks = found.blocks(batch())
    assert torch.equal(blocks["tokens"], batch()["tokens"][4:])
    assert torch.equal(blocks["labels"], batch()["labels"])


def test_tensors_in_order_and_a_single_one():
    found = shares([("S0",), ("S0",)], (2,), (0,))
    assert torch.equal(found.blocks(list(batch().values()))["labels"], batch()["labels"][:4])
    single = shares([("S0",)], (2,), (0,), {"images": ((8, 6), "int64")})
    assert torch.equal(single.blocks(batch()["tokens"])["images"], batch()["tokens"][:4])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": batch()["tokens"]}, "the batch lacks labels: it takes tokens, labels"),
        ({**batch(), "mask": torch.ones(8, 6)}, "the batch has mask, which the step does not take"),
        ([batch()["tokens"]], "the batch has 1 tensors, the step takes 2: tokens, labels"),
        ({**batch(), "tokens": torch.zeros(8, 6)}, "tokens of the batch has torch.float32, planned is torch.int64"),
        ({**batch(), "tokens": [1]}, "tokens of the batch is a list: give a tensor"),
        (
            {**batch(), "tokens": torch.zeros(3, 6, dtype=torch.int64)},
            r"tokens of the batch has shape \(3, 6\), planned is \(8, 6\), or this rank's share of \(4, 6\): plan with",
        ),
    ],
)
def test_a_batch_that_is_not_the_planned_one(given, message):
    with pytest.raises(BatchError, match=message):
        shares([("S0",), ("S0",)], (2,), (0,)).blocks(given)
