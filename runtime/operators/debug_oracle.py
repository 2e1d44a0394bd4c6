"""Search for the first wrong operator of a schedule: every output's full tensor is compared with one process.

The schedule is run instruction by instruction, not as a graph. After each computation and each resharding
the full tensor is gathered and compared with the value that every rank computes for itself from the same
graph without any sharding. Slow, and it holds every value of the step twice: for small models only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from planner.common.root_name import shown
from planner.graph.placement import Placement
from planner.schedule.instructions import Compute, Free, Offload, Prefetch, Reshard, Schedule, Wait
from planner.strategies.traced_step import TracedStep
from planner.torch_adapter.local.collectives import MeshGroups, reshard_step
from planner.torch_adapter.local.operators import build_local
from runtime.measure.local_shards import gather_full, local_block


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first instruction whose result differs from one process.

    Parameters
    ----------
    instruction
        Position in the schedule.
    description
        The operator with its placements, or the path of the resharding.
    value
        Name of the value that differs.
    relative_error
        ``max|a - b| / max|b|``.
    """

    instruction: int
    description: str
    value: str
    relative_error: float

    def __str__(self) -> str:
        return (
            f"instruction {self.instruction}, {self.description}: {self.value} differs from one process by "
            f"{self.relative_error:.1e}"
        )


def compare_with_reference(
    schedule: Schedule,
    traced: TracedStep,
    groups: MeshGroups,
    inputs: Sequence[Tensor],
    seed: int = 0,
    tolerance: float = 1e-4,
) -> Mismatch | None:
    """Run a schedule and compare all of its values; a collective of all ranks, with the same result on each.

    Parameters
    ----------
    schedule, traced, groups, seed
        As for :func:`runtime.operators.executor.lower`.
    inputs
        Global tensors of the graph's inputs, in order.
    tolerance
        Largest relative error that passes.

    Returns
    -------
    Mismatch or None
        The first difference in the order of the schedule.
    """
    with torch.no_grad():
        return _Oracle(schedule, traced, groups, inputs, seed, tolerance).run()


class _Oracle:
    def __init__(
        self,
        schedule: Schedule,
        traced: TracedStep,
        groups: MeshGroups,
        inputs: Sequence[Tensor],
        seed: int,
        tolerance: float,
    ) -> None:
        self._schedule, self._traced, self._groups = schedule, traced, groups
        self._seed, self._tolerance = seed, tolerance
        self._expected = self._one_process(inputs)
        self._local = {
            buffer: local_block(
                self._expected[value], schedule.buffers[buffer].placement, groups.shape, groups.coordinate
            ).contiguous()
            for value, buffer in zip(traced.graph.inputs, schedule.inputs, strict=True)
        }

    def run(self) -> Mismatch | None:
        for position, instruction in enumerate(self._schedule.instructions):
            created: tuple[int | None, ...] = ()
            match instruction:
                case Compute():
                    created = instruction.outputs
                    self._compute(instruction)
                case Reshard(source, target, path):
                    created = (target,)
                    tensor = self._local[source]
                    for before, after in pairwise(path):
                        tensor = reshard_step(before, after, self._groups)(tensor)
                    self._local[target] = tensor
                case Offload(source, target) | Prefetch(source, target):
                    self._local[target] = self._local[source].clone()
                case Wait():
                    pass  # nothing is overlapped here
                case Free(buffers):
                    for freed in buffers:
                        del self._local[freed]
            for made in created:
                if made is not None:
                    error = self._error(made)
                    if not error <= self._tolerance:
                        name = shown(self._traced.graph.values[self._schedule.buffers[made].value].name)
                        return Mismatch(position, self._describe(instruction), name, error)
        return None

    def _one_process(self, inputs: Sequence[Tensor]) -> dict[int, Tensor]:
        """Every value of the graph, computed on one rank."""
        graph = self._traced.graph
        values = dict(zip(graph.inputs, inputs, strict=True))
        for operator, call in zip(graph.operators, self._traced.calls, strict=True):
            whole: Placement = ("R",)
            function = build_local(
                call,
                operator,
                graph,
                tuple(None if value is None else whole for value in operator.outputs),
                (whole,) * len(operator.inputs),
                (1,),
                (0,),
                None,
                self._seed,
            )
            results = _as_tuple(function(*(values[value] for value in operator.inputs)))
            values.update(
                (value, tensor) for value, tensor in zip(operator.outputs, results, strict=True) if value is not None
            )
        return values

    def _compute(self, instruction: Compute) -> None:
        buffers = self._schedule.buffers
        function = build_local(
            self._traced.calls[instruction.operator],
            self._traced.graph.operators[instruction.operator],
            self._traced.graph,
            tuple(None if buffer is None else buffers[buffer].placement for buffer in instruction.outputs),
            tuple(buffers[buffer].placement for buffer in instruction.inputs),
            self._groups.shape,
            self._groups.coordinate,
            self._groups,
            self._seed,
        )
        results = _as_tuple(function(*(self._local[buffer] for buffer in instruction.inputs)))
        for buffer, tensor in zip(instruction.outputs, results, strict=True):
            if buffer is not None:
                self._local[buffer] = tensor

    def _error(self, buffer: int) -> float:
        """Relative error of a buffer's full tensor, the largest over all ranks."""
        described = self._schedule.buffers[buffer]
        expected = self._expected[described.value]
        full = gather_full(self._local[buffer], described.placement, self._groups)
        if full.shape != expected.shape or full.dtype != expected.dtype:
            error = float("inf")
        elif not expected.numel():
            error = 0.0
        else:
            wanted, found = expected.to(torch.float64), full.to(torch.float64)
            same = (found == wanted) | (found.isnan() & wanted.isnan())  # infinite masks are equal, not far
            difference = torch.where(same, 0.0, (found - wanted).abs())
            finite = wanted.abs()[wanted.isfinite()]
            scale = float(finite.max()) if finite.numel() else 1.0
            error = float(difference.nan_to_num(nan=float("inf")).max()) / (scale or 1.0)
        worst = torch.tensor(error, dtype=torch.float64)
        for axis in range(len(self._groups.shape)):
            worst = self._groups.all_reduce(worst, "max", axis)
        return float(worst)

    def _describe(self, instruction: object) -> str:
        buffers = self._schedule.buffers
        if isinstance(instruction, Compute):
            operator = self._traced.graph.operators[instruction.operator]
            inputs = " ".join(",".join(buffers[buffer].placement) for buffer in instruction.inputs)
            outputs = " ".join("-" if b is None else ",".join(buffers[b].placement) for b in instruction.outputs)
            return f"{shown(operator.identity)} ({inputs} -> {outputs})"
        assert isinstance(instruction, Reshard)
        return "resharding " + " -> ".join(",".join(placement) for placement in instruction.path)


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
