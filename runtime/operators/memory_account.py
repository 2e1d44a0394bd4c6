"""Memory of a schedule on one rank at the instruction at which memory ran out, found and planned, tensor by tensor."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import walk_tb

import torch
from torch import Tensor

from planner.common.root_name import shown
from planner.graph.operator_graph import OperatorGraph
from planner.graph.optimizers import OptimizerSpec
from planner.replay.checker import OptimizerMemory, lifetimes_of_tensors, replay
from planner.replay.order import OrderedReplay
from planner.replay.report import Category
from planner.replay.wording import Wording
from planner.schedule.instructions import Schedule
from runtime.measure.out_of_memory import MemoryRow, is_out_of_memory, note_memory, storage_bytes
from runtime.operators.executor import LoweredStep
from runtime.operators.step_end import StepEnd

_ASSIGNED = re.compile(r"\s*(\w+)")


@contextmanager
def memory_noted(
    graph: OperatorGraph,
    schedule: Schedule,
    lowered: LoweredStep,
    spec: OptimizerSpec,
    resident: Callable[[], tuple[Mapping[int, Tensor], list[Tensor]]],
    device: torch.device,
    inputs: Sequence[Tensor | None] = (),
) -> Iterator[None]:
    """Note on an allocator's error, raised inside, what was alive beside what the plan said.

    Parameters
    ----------
    graph, schedule, lowered
        The step, its schedule, and that on local tensors.
    spec
        The plan's optimizer.
    resident
        Returns the parameters and module buffers of this rank by their buffer, and the optimizer's state.
    device
        Of this rank.
    inputs
        Local inputs of the graph that are held, in its order; None where the graph took one.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            kept, state = resident()
            given = {buffer: t for buffer, t in zip(schedule.inputs, inputs, strict=False) if t is not None}
            at, found = _alive(error, lowered)
            _note(error, graph, schedule, at, {**kept, **given, **found}, spec, state, device)
        raise


def _alive(error: BaseException, lowered: LoweredStep) -> tuple[int, dict[int, Tensor]]:
    """Position of the instruction that failed, -1 before the first, and the tensors that its frame holds, by buffer."""
    at, found = -1, dict[int, Tensor]()
    for frame, line in walk_tb(error.__traceback__):
        held = frame.f_locals
        if frame.f_code is lowered.module.forward.__func__.__code__:  # type: ignore[attr-defined]
            name = _ASSIGNED.match(linecache.getline(frame.f_code.co_filename, line))
            at = -1 if name is None else lowered.places.get(name[1], -1)
            for name_held, tensor in held.items():
                if isinstance(tensor, Tensor) and name_held in lowered.buffers:
                    found[lowered.buffers[name_held]] = tensor
        elif frame.f_code is StepEnd.run.__code__:
            at = lowered.end.first + held.get("at", 0)
            found |= {buffer: tensor for buffer, tensor in held["carried"].items() if isinstance(tensor, Tensor)}
    return at, found


def _note(
    error: BaseException,
    graph: OperatorGraph,
    schedule: Schedule,
    at: int,
    found: Mapping[int, Tensor],
    spec: OptimizerSpec,
    state: list[Tensor],
    device: torch.device,
) -> None:
    optimizer = OptimizerMemory(spec)
    alive = [t for t, created, freed in lifetimes_of_tensors(graph, schedule, optimizer) if created <= at < freed]
    planned = {tensor.buffer: tensor for tensor in alive if tensor.buffer is not None}
    of_optimizer = sum(tensor.nbytes for tensor in alive if tensor.category is Category.OPTIMIZER)
    rows = [MemoryRow("state", Category.OPTIMIZER, of_optimizer, storage_bytes(state))]
    root = OrderedReplay(graph, schedule, counter_based_random=True).run().root
    seen = {int(root[buffer]): tensor.untyped_storage().nbytes() for buffer, tensor in found.items()}
    for buffer in planned.keys() | seen.keys():
        entry, owner = planned.get(buffer), schedule.buffers[buffer]
        name = f"{shown(graph.values[owner.value].name)} ({','.join(owner.placement)})"
        purpose, expected = ("not planned", 0) if entry is None else (str(entry.category), entry.nbytes)
        rows.append(MemoryRow(name, purpose, expected, seen.get(buffer, 0)))
    during = replay(graph, schedule, optimizer=optimizer).profile.total_during
    instruction = Wording(graph, schedule).instruction(schedule.instructions[at]) if at >= 0 else "before the first"
    where = f"instruction {at} of {len(schedule.instructions)} ({instruction})"
    total = int(during[max(at, 0)])
    note_memory(error, where, total, storage_bytes([*found.values(), *state]), rows, device)
