"""Lowering of a schedule to one local fx graph that runs it.

Every instruction becomes one node: an operator on local tensors with its constants localised, one
collective per step of a resharding path, or the start of a copy to or from the host; waits for copies are nodes
of their own, where the schedule's semantics require them. An overlapped collective is one node where it starts and one
where the schedule waits for it. Nothing is traced, so each operator runs exactly under the
placements of the schedule. The graph's generated code drops each value after its last use, which
:func:`~runtime.operators.schedule_lifetimes.check_schedule` holds equal to the schedule's frees (only the source of a
path of several steps may go earlier, after the first of them). What begins with the first update follows after the
graph, instruction by instruction: updates, and between them what is left of the way of other gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from planner.graph.operator_graph import GraphOutput, OutputRole
from planner.schedule.instructions import (
    Compute,
    Free,
    Offload,
    Prefetch,
    Reshard,
    Schedule,
    Update,
    Wait,
    bucket_ends,
    buckets,
    creates,
    reads,
)
from planner.strategies.traced_step import TracedStep
from planner.torch_adapter.local.buckets import PartInFlight, start_bucket
from planner.torch_adapter.local.collectives import InFlight, LocalFunction, MeshGroups, reshard_step, start_step
from planner.torch_adapter.local.context import LocalOperator
from planner.torch_adapter.local.operators import build_local
from runtime.measure.host_arena import HostArena, host_lifetimes, plan_arena
from runtime.measure.host_copies import HostCopies
from runtime.operators.instruction_clock import InstructionClock
from runtime.operators.schedule_lifetimes import ScheduleError, check_schedule
from runtime.operators.step_end import Carried, StepEnd


@dataclass(slots=True)
class StepBegun:
    """What forward and backward leave on one rank.

    Parameters
    ----------
    loss, buffer_updates
        As in :class:`StepResult`.
    carried
        Tensors and collectives under way by buffer, for :class:`~runtime.operators.step_end.StepEnd`.
    """

    loss: Tensor
    buffer_updates: dict[str, Tensor]
    carried: Carried


@dataclass(slots=True)
class StepResult:
    """Results of forward and backward on one rank.

    Parameters
    ----------
    loss
        The loss, the same on every rank.
    gradients
        Local gradient by parameter name, under the parameter's placement.
    buffer_updates
        New value by name of the module's buffer, replicated.
    """

    loss: Tensor
    gradients: dict[str, Tensor]
    buffer_updates: dict[str, Tensor]


@dataclass(frozen=True)
class LoweredStep:
    """A schedule as a graph on local tensors.

    Parameters
    ----------
    module
        Takes a list of the local inputs in the graph's order. Returns the results other than gradients, in order, and
        a list of the buffers that the end of the step takes over. An input that the schedule frees is taken out of the
        list.
    outputs, names
        Role of each result other than gradients, and the name of its module's buffer (empty for the loss).
    end
        The end of the step, from the first update on.
    places, buffers
        Position of the instruction of each variable of the generated code, and the buffer that it holds, by its name.
    copies
        What copies to and from the host.
    """

    module: GraphModule
    outputs: tuple[GraphOutput, ...]
    names: tuple[str, ...]
    end: StepEnd
    places: Mapping[str, int]
    buffers: Mapping[str, int]
    copies: HostCopies

    def run(self, local_inputs: list[Tensor]) -> StepResult:
        """Results of a step on one rank without its updates; arguments as for :meth:`begin`."""
        begun = self.begin(local_inputs)
        return StepResult(begun.loss, self.end.gradients(begun.carried), begun.buffer_updates)

    def begin(self, local_inputs: list[Tensor]) -> StepBegun:
        """Forward and backward on one rank; all ranks of the mesh must call it.

        Parameters
        ----------
        local_inputs
            This rank's blocks of the graph's inputs, in the graph's order.
        """
        try:
            with torch.no_grad():
                results, carried = self.module.forward(local_inputs)
        except BaseException:
            self.copies.join()  # while the variables of the generated code still hold what is copied
            raise
        named = list(zip(self.outputs, self.names, results, strict=True))
        loss = next(tensor for output, _, tensor in named if output.role is OutputRole.LOSS)
        updates = {name: tensor for output, name, tensor in named if output.role is OutputRole.BUFFER_UPDATE}
        return StepBegun(loss, updates, dict(zip(self.end.carried, carried, strict=True)))


def lower(
    schedule: Schedule,
    traced: TracedStep,
    groups: MeshGroups,
    seed: int | Tensor,
    device: torch.device,
    clock: InstructionClock | None = None,
) -> LoweredStep:
    """Lower a schedule to a graph for this rank.

    Parameters
    ----------
    schedule
        What to run.
    traced
        The step that the schedule is of.
    groups
        Mesh and process groups of this rank.
    seed
        Key of random operators; a tensor of one int64 may change between steps.
    device
        Device that replaces the traced one in operators that make tensors.
    clock
        Times every instruction of the graph.

    Raises
    ------
    ScheduleError
        If the schedule is for another mesh, cannot be run or does not free its buffers at their last use.
    ReshardStepError
        If a step of a resharding path is not one collective.
    """
    check_schedule(schedule, groups.shape)
    return _Lowering(schedule, traced, groups, seed, device, clock).build()


class _Lowering:
    def __init__(
        self,
        schedule: Schedule,
        traced: TracedStep,
        groups: MeshGroups,
        seed: int | Tensor,
        device: torch.device,
        clock: InstructionClock | None,
    ) -> None:
        self._schedule = schedule
        self._traced = traced
        self._groups = groups
        self._seed = seed
        self._device = device
        self._clock = clock
        self._graph = Graph()
        instructions = schedule.instructions
        self._end = next((at for at, entry in enumerate(instructions) if isinstance(entry, Update)), len(instructions))
        self._buckets = {bucket.stop - 1: parts for bucket, parts in buckets(instructions).items()}
        """Parts of each bucket by the position of the last one, with which it starts."""
        self._bucketed = bucket_ends(instructions)
        self._flying: dict[int, tuple[Node, int]] = {}
        """By target of an overlapped collective under way: its node, and its source."""
        self._nodes: dict[int, Node] = {}
        self._host = HostCopies(device, arena_of(schedule, traced, device))
        # Handles of copies to wait for: by buffer that copies use, by buffer that a copy fills and none has read yet.
        self._copies: dict[int, tuple[Node, ...]] = {}
        self._arriving: dict[int, Node] = {}
        self._shared: dict[object, Callable[..., Any]] = {}

    def build(self) -> LoweredStep:
        graph, schedule = self._traced.graph, self._schedule
        self._take_inputs()
        alive = set(schedule.inputs)
        places = dict[str, int]()
        held = {self._nodes[buffer].name: buffer for buffer in schedule.inputs}
        for position, instruction in enumerate(schedule.instructions[: self._end]):
            before = len(self._graph.nodes)
            match instruction:
                case Compute():
                    self._compute(instruction)
                case Reshard() if position in self._bucketed:
                    if position in self._buckets:
                        self._start_bucket(self._buckets[position])
                case Reshard(overlapped=True):
                    self._start(instruction)
                case Reshard():
                    self._reshard(instruction)
                case Wait(buffer):
                    node, source = self._flying.pop(buffer)
                    kept = (self._nodes[source],) if source in alive else ()
                    self._nodes[buffer] = self._graph.call_function(_waited, (node, *kept))
                case Offload(source, target):
                    self._copy(self._host.offload, source, target, target)
                case Prefetch(source, target):
                    offloaded = self._copies[source][0]
                    self._arriving[target] = self._copy(self._host.prefetch, source, target, offloaded)
                case Free(buffers):
                    for buffer in buffers:
                        if buffer in self._copies:
                            self._wait(buffer, *self._copies[buffer])
                    alive.difference_update(buffers)
            alive.update(creates(instruction))
            made = islice(reversed(self._graph.nodes), len(self._graph.nodes) - before)
            places.update((node.name, position) for node in made)
            created = (buffer for buffer in creates(instruction) if buffer in self._nodes)
            held.update((self._nodes[buffer].name, buffer) for buffer in created)
            if self._clock is not None:
                self._graph.call_function(self._clock.tick, (position,))
        results = [
            (output, self._nodes[buffer])
            for output, buffer in zip(graph.outputs, schedule.results, strict=True)
            if output.role is not OutputRole.GRADIENT
        ]
        end = self._step_end(alive)
        carried = [self._flying[buffer][0] if buffer in self._flying else self._nodes[buffer] for buffer in end.carried]
        self._graph.output((tuple(node for _, node in results), carried))
        outputs = tuple(output for output, _ in results)
        names = tuple("" if output.of is None else graph.values[output.of].name for output in outputs)
        return LoweredStep(GraphModule({}, self._graph), outputs, names, end, places, held, self._host)

    def _step_end(self, alive: set[int]) -> StepEnd:
        """What follows after the graph, and the buffers that it takes over."""
        graph, schedule = self._traced.graph, self._schedule
        instructions = schedule.instructions[self._end :]
        functions: dict[int, Callable[..., Any]] = {}
        started: dict[int, tuple[Reshard, ...]] = {}
        for at, instruction in enumerate(instructions):
            if self._end + at in self._buckets:
                started[at] = self._buckets[self._end + at]
                functions[at] = self._bucket_function(started[at])
            elif isinstance(instruction, Reshard) and self._end + at not in self._bucketed:
                functions[at] = self._start_function(instruction) if instruction.overlapped else self._path(instruction)
            elif isinstance(instruction, Compute):
                if not graph.operators[instruction.operator].is_view:
                    where = f"instruction {self._end + at} ({instruction})"
                    raise ScheduleError(f"{where} comes after an update: updates come last")
                functions[at] = self._local_function(instruction)
        used = {buffer for entry in instructions for buffer in reads(entry)} - set(schedule.inputs)
        gradients = {
            graph.values[output.of].name: buffer
            for output, buffer in zip(graph.outputs, schedule.results, strict=True)
            if output.role is OutputRole.GRADIENT and output.of is not None
        }
        parameters = {
            buffer: graph.values[value].name for value, buffer in zip(graph.inputs, schedule.inputs, strict=True)
        }
        # A gradient of a parameter that is not updated is a result all the same.
        used |= set(gradients.values()) & alive
        tick = None if self._clock is None else self._clock.tick
        carried = tuple(sorted(used & alive))
        return StepEnd(instructions, self._end, carried, functions, started, parameters, gradients, tick)

    def _take_inputs(self) -> None:
        freed = {buffer for entry in self._schedule.instructions if isinstance(entry, Free) for buffer in entry.buffers}
        inputs = self._graph.placeholder("inputs")
        for position, buffer in enumerate(self._schedule.inputs):
            take = _take if buffer in freed else operator.getitem
            self._nodes[buffer] = self._graph.call_function(take, (inputs, position))

    def _compute(self, instruction: Compute) -> None:
        function = self._local_function(instruction)
        tensors = [self._read(buffer) for buffer in instruction.inputs]
        if isinstance(function, LocalOperator):
            args, kwargs = function.call.arguments(tensors, function.device)
            node = self._graph.call_function(function.call.target, args, kwargs)
        else:
            node = self._graph.call_function(function, tuple(tensors))
        call = self._traced.calls[instruction.operator]
        if call.returns_one_tensor:
            (output,) = instruction.outputs
            assert output is not None
            self._nodes[output] = node
            return
        for position, output in enumerate(instruction.outputs):
            if output is not None:
                self._nodes[output] = self._graph.call_function(operator.getitem, (node, position))

    def _local_function(self, instruction: Compute) -> Callable[..., Any]:
        """Function of an execution; executions of one operator under the same placements share it."""
        buffers, graph = self._schedule.buffers, self._traced.graph
        outputs = tuple(None if buffer is None else buffers[buffer].placement for buffer in instruction.outputs)
        inputs = tuple(buffers[buffer].placement for buffer in instruction.inputs)
        key = (instruction.operator, outputs, inputs)
        if key not in self._shared:
            described = graph.operators[instruction.operator]
            function = build_local(
                self._traced.calls[instruction.operator],
                described,
                graph,
                outputs,
                inputs,
                self._groups.shape,
                self._groups.coordinate,
                self._groups,
                self._seed,
                self._device,
            )
            if not isinstance(function, LocalOperator):
                function = _named(function, described.node_name)
            self._shared[key] = function
        return self._shared[key]

    def _reshard(self, instruction: Reshard) -> None:
        node = self._read(instruction.source)
        for step in self._steps(instruction):
            node = self._graph.call_function(step, (node,))
        self._nodes[instruction.target] = node

    def _steps(self, instruction: Reshard) -> Iterator[LocalFunction]:
        """Functions of the steps of a path."""
        for at, (before, after) in enumerate(pairwise(instruction.path)):
            key = (before, after, at > 0)
            if key not in self._shared:
                name = "_".join(("reshard", *before, "to", *after, *["in_place"] * (at > 0)))
                self._shared[key] = _named(reshard_step(before, after, self._groups, owned=at > 0), name)
            yield self._shared[key]

    def _path(self, instruction: Reshard) -> LocalFunction:
        """One function of all steps of a path."""
        steps = tuple(self._steps(instruction))

        def run(tensor: Tensor) -> Tensor:
            for step in steps:
                tensor = step(tensor)
            return tensor

        return run

    def _start(self, instruction: Reshard) -> None:
        """Start an overlapped collective."""
        node = self._graph.call_function(self._start_function(instruction), (self._read(instruction.source),))
        self._flying[instruction.target] = node, instruction.source

    def _start_function(self, instruction: Reshard) -> Callable[..., Any]:
        before, after = instruction.path
        key = ("start", before, after, instruction.in_place)
        if key not in self._shared:
            name = "_".join(("start", *before, "to", *after, *["in_place"] * instruction.in_place))
            start = start_step(before, after, self._groups.beside(), owned=instruction.in_place)
            self._shared[key] = _named(start, name)
        return self._shared[key]

    def _start_bucket(self, parts: Sequence[Reshard]) -> None:
        """Start the collective of a bucket."""
        sources = tuple(self._read(part.source) for part in parts)
        started = self._graph.call_function(self._bucket_function(parts), sources)
        for at, part in enumerate(parts):
            self._flying[part.target] = self._graph.call_function(operator.getitem, (started, at)), part.source

    def _bucket_function(self, parts: Sequence[Reshard]) -> Callable[..., Any]:
        paths = tuple((part.path[0], part.path[1]) for part in parts)
        key = ("bucket", paths)
        if key not in self._shared:
            self._shared[key] = _named(start_bucket(paths, self._groups.beside()), f"start_bucket_of_{len(parts)}")
        return self._shared[key]

    def _read(self, buffer: int) -> Node:
        """Node of a buffer on the device; its first reader waits for the copy that fills it."""
        if buffer in self._arriving:
            self._wait(buffer, self._arriving.pop(buffer))
        return self._nodes[buffer]

    def _copy(self, start: Callable[..., Any], source: int, target: int, more: Node | int) -> Node:
        """Start a copy; the node of its handle."""
        node = self._graph.call_function(start, (self._nodes[source], more))
        self._nodes[target] = self._graph.call_function(operator.getitem, (node, 0))
        done = self._graph.call_function(operator.getitem, (node, 1))
        for buffer in (source, target):
            self._copies[buffer] = (*self._copies.get(buffer, ()), done)
        return done

    def _wait(self, buffer: int, *copies: Node) -> None:
        """Wait for copies that use a buffer, and keep it until then."""
        self._graph.call_function(self._host.wait, (self._nodes[buffer], *copies))


def arena_of(schedule: Schedule, traced: TracedStep, device: torch.device) -> HostArena | None:
    """One block of pinned memory for what a schedule offloads; None off CUDA, where nothing is pinned."""
    if device.type != "cuda" or not any(isinstance(entry, Offload) for entry in schedule.instructions):
        return None
    return HostArena(plan_arena(host_lifetimes(traced.graph, schedule)), pinned=True)


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Give a function the name under which the generated code calls it."""
    function.__name__ = function.__qualname__ = name
    return function


def _waited(collective: InFlight | PartInFlight, source: Tensor | None = None) -> Tensor:
    """Wait for a collective whose source lives until then."""
    del source
    return collective.wait()


def _take(values: list[Tensor | None], position: int) -> Tensor | None:
    """Take an entry out of a list, so that the list no longer keeps it alive."""
    value, values[position] = values[position], None
    return value
