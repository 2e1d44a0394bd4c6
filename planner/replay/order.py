"""Checks of instructions in their order: buffers that exist, operators that ran, updates, leftover buffers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from planner.common.root_name import shown
from planner.graph.operator_graph import OperatorGraph, OutputRole, ValueRole
from planner.replay.memory import Lifetimes, LocalBytes
from planner.replay.report import Violation, ViolationKind
from planner.replay.wording import Wording
from planner.schedule.instructions import (
    Compute,
    Free,
    Instruction,
    Offload,
    Prefetch,
    Reshard,
    Schedule,
    Update,
    Wait,
    buckets,
    sends_copy,
)

_KEPT_ROLES = (ValueRole.PARAMETER, ValueRole.BUFFER)


class OrderedReplay:
    """Walks through a schedule of sound shape, once, and records violations and lifetimes.

    After a violation it continues as if the instruction had been correct, so that one mistake is reported once where
    possible.

    Parameters
    ----------
    graph, schedule
        The graph and its schedule; all indices are in range.
    counter_based_random
        Whether random numbers depend on the element alone, so that a random operator may run again.
    """

    def __init__(self, graph: OperatorGraph, schedule: Schedule, *, counter_based_random: bool) -> None:
        self._graph = graph
        self._schedule = schedule
        self._counter_based_random = counter_based_random
        self._names = Wording(graph, schedule)
        self._local_bytes = LocalBytes(graph, schedule.mesh)
        self._end = len(schedule.instructions)
        self.violations: list[Violation] = []
        count = len(schedule.buffers)
        self._root = [-1] * count
        self._created = [-1] * count
        # -1: never created, ``_end``: alive, else the instruction that freed it.
        self._freed = [-1] * count
        self._on_host = [False] * count
        # Buffers that a non-view operator created.
        self._computed: set[int] = set()
        # Instruction and source of each offload, and the host buffers that a prefetch reads.
        self._offloads: list[tuple[int, int]] = []
        self._prefetched: set[int] = set()
        # By target of an overlapped resharding that nothing has waited for, the source that it reads; None for a copy.
        self._in_flight: dict[int, int | None] = {}
        parts = buckets(schedule.instructions)
        self._bucketed = {at for bucket in parts for at in bucket}
        # The target that a wait for one part of a bucket must follow directly, and that for the part before it.
        self._waits_behind = {
            after.target: before.target for joined in parts.values() for before, after in pairwise(joined)
        }
        self._executed: set[int] = set()
        self._latest = -1
        self._updates: dict[int, int] = {}
        self._updated_storages: dict[int, int] = {}
        self._reduced_storages: dict[int, int] = {}
        self._parameters = {
            buffer: value
            for value, buffer in zip(graph.inputs, schedule.inputs, strict=True)
            if graph.values[value].role is ValueRole.PARAMETER
        }
        # Buffer of the gradient by value of the parameter.
        self._gradients = {
            output.of: buffer
            for output, buffer in zip(graph.outputs, schedule.results, strict=True)
            if output.role is OutputRole.GRADIENT and output.of is not None
        }
        self._kept = {
            buffer
            for value, buffer in zip(graph.inputs, schedule.inputs, strict=True)
            if graph.values[value].role in _KEPT_ROLES
        }
        self._lasting = {
            buffer
            for output, buffer in zip(graph.outputs, schedule.results, strict=True)
            if output.role is not OutputRole.GRADIENT
        }

    def run(self) -> Lifetimes:
        """Walk through the schedule; violations are in :attr:`violations`."""
        for buffer in self._schedule.inputs:
            self._create(buffer, buffer, -1)
        for at, instruction in enumerate(self._schedule.instructions):
            match instruction:
                case Compute():
                    self._compute(at, instruction)
                case Reshard():
                    self._reshard(at, instruction)
                case Wait(buffer):
                    self._wait(at, buffer)
                case Update():
                    self._update(at, instruction)
                case Offload():
                    self._offload(at, instruction)
                case Prefetch():
                    self._prefetch(at, instruction)
                case Free(buffers):
                    for buffer in buffers:
                        self._free(at, buffer)
        self._finish()
        root, created, freed = (np.array(found, dtype=np.int64) for found in (self._root, self._created, self._freed))
        return Lifetimes(root, created, freed, np.array(self._on_host, dtype=bool))

    def _report(self, kind: ViolationKind, at: int | None, message: str) -> None:
        self.violations.append(Violation(kind, at, message))

    def _compute(self, at: int, instruction: Compute) -> None:
        for buffer in instruction.inputs:
            self._read(at, instruction, buffer)
        operator = self._graph.operators[instruction.operator]
        if operator.is_view:
            if instruction.recompute:
                message = f"{shown(operator.identity)} is a view: running it again is no recomputation"
                self._report(ViolationKind.RECOMPUTED_VIEW, at, message)
        elif instruction.recompute:
            if operator.is_random and not self._counter_based_random:
                message = f"{shown(operator.identity)} draws random numbers, which would differ the second time"
                self._report(ViolationKind.RECOMPUTED_RANDOM, at, message)
            if operator.index not in self._executed:
                message = f"{shown(operator.identity)} is recomputed before it has run"
                self._report(ViolationKind.RECOMPUTED_BEFORE_EXECUTED, at, message)
                self._executed.add(operator.index)
        else:
            self._first_execution(at, operator.index)
        root = self._root[instruction.inputs[0]] if operator.is_view else -1
        for output in instruction.outputs:
            if output is not None:
                self._create(output, output if root < 0 else root, at)
                if not operator.is_view:
                    self._computed.add(output)

    def _first_execution(self, at: int, operator: int) -> None:
        identity = self._names.operator(operator)
        if operator in self._executed:
            message = f"{identity} has run; running it again is recomputation"
            self._report(ViolationKind.EXECUTED_TWICE, at, message)
            return
        if operator < self._latest:
            message = f"{identity} comes before {self._names.operator(self._latest)} in the graph"
            self._report(ViolationKind.OUT_OF_ORDER, at, message)
        self._executed.add(operator)
        self._latest = max(self._latest, operator)

    def _reshard(self, at: int, instruction: Reshard) -> None:
        source, target, path = instruction.source, instruction.target, instruction.path
        self._read(at, instruction, source)
        self._create(target, self._reduced(at, instruction) if instruction.in_place else target, at)
        if instruction.overlapped and len(path) == 2:
            (before, after), shapes, _ = self._local_bytes.along(self._schedule.buffers[source].value, path)
            copied = at in self._bucketed or sends_copy(before, after, shapes[0])
            self._in_flight[target] = None if copied else source

    def _reduced(self, at: int, instruction: Reshard) -> int:
        """The storage that a reduction in place changes; reports where it may not."""
        source = instruction.source
        root, buffers = self._root[source], self._schedule.buffers
        if root < 0:
            return instruction.target
        sizes = {self._local_bytes(buffers[each].value, buffers[each].placement) for each in (source, root)}
        if root in self._schedule.inputs:
            problem = "an input of the step"
        elif self._on_host[root]:
            problem = "in host memory"
        elif len(sizes) > 1:
            problem = "only a part of its storage"
        elif root in {self._root[copied] for _, copied in self._offloads}:
            problem = "copied to host memory"
        elif root in {self._root[sent] for sent in self._sent()}:
            problem = "read by an overlapped resharding"
        else:
            self._reduced_storages[root] = at
            return root
        message = f"{self._names.buffer(source)} is reduced in place, but is {problem}"
        self._report(ViolationKind.IN_PLACE, at, message)
        return root

    def _wait(self, at: int, buffer: int) -> None:
        if buffer in self._in_flight:
            del self._in_flight[buffer]
            before = self._waits_behind.get(buffer)
            if before is not None and self._schedule.instructions[max(at - 1, 0)] != Wait(before):
                message = f"{self._names.buffer(buffer)} is not waited for directly behind {self._names.buffer(before)}"
                self._report(ViolationKind.BUCKET, at, f"{message}, the part of its bucket before it")
            return
        message = f"no overlapped resharding that makes {self._names.buffer(buffer)} is under way"
        self._report(ViolationKind.WAIT, at, message)

    def _read(self, at: int, instruction: Instruction, buffer: int) -> None:
        if self._freed[buffer] < 0:
            message = f"{self._names.instruction(instruction)} reads {self._names.buffer(buffer)}, not created yet"
            self._report(ViolationKind.USED_BEFORE_CREATED, at, message)
        elif self._freed[buffer] < self._end:
            message = (
                f"{self._names.instruction(instruction)} reads {self._names.buffer(buffer)}, "
                f"freed by instruction {self._freed[buffer]}"
            )
            self._report(ViolationKind.USED_AFTER_FREE, at, message)
        elif self._root[buffer] in self._updated_storages and not isinstance(instruction, Update):
            message = (
                f"{self._names.instruction(instruction)} reads {self._names.buffer(buffer)}, "
                f"changed by instruction {self._updated_storages[self._root[buffer]]}"
            )
            self._report(ViolationKind.READ_AFTER_UPDATE, at, message)
        elif self._created[buffer] < self._reduced_storages.get(self._root[buffer], -1):
            message = (
                f"{self._names.instruction(instruction)} reads {self._names.buffer(buffer)}, "
                f"reduced in place by instruction {self._reduced_storages[self._root[buffer]]}"
            )
            self._report(ViolationKind.IN_PLACE, at, message)
        elif buffer in self._in_flight:
            message = f"{self._names.instruction(instruction)} reads {self._names.buffer(buffer)} before its wait"
            self._report(ViolationKind.IN_FLIGHT, at, message)
        elif self._on_host[buffer] and not isinstance(instruction, Prefetch):
            message = f"{self._names.instruction(instruction)} reads {self._names.buffer(buffer)}, which is on the host"
            self._report(ViolationKind.HOST_READ, at, message)

    def _offload(self, at: int, instruction: Offload) -> None:
        source, target = instruction.source, instruction.target
        self._read(at, instruction, source)
        if self._freed[source] >= 0 and not self._on_host[source]:
            if source in self._computed:
                self._offloads.append((at, source))
            else:
                message = f"{self._names.buffer(source)} is not an output of an operator that owns its storage"
                self._report(ViolationKind.OFFLOAD_SOURCE, at, message)
        if self._freed[target] < 0:
            self._on_host[target] = True
        self._create(target, target, at)

    def _prefetch(self, at: int, instruction: Prefetch) -> None:
        source, target = instruction.source, instruction.target
        self._read(at, instruction, source)
        self._prefetched.add(source)
        if self._freed[source] >= 0 and not self._on_host[source]:
            message = f"{self._names.buffer(source)} was never offloaded"
            self._report(ViolationKind.PREFETCH_SOURCE, at, message)
        self._create(target, target, at)

    def _create(self, buffer: int, root: int, at: int) -> None:
        if self._freed[buffer] >= 0:
            where = None if at < 0 else at
            message = f"{self._names.buffer(buffer)} exists since instruction {self._created[buffer]}"
            self._report(ViolationKind.CREATED_TWICE, where, message)
            return
        self._root[buffer] = root
        self._created[buffer] = at
        self._freed[buffer] = self._end

    def _update(self, at: int, instruction: Update) -> None:
        parameter, gradient = instruction.parameter, instruction.gradient
        self._read(at, instruction, parameter)
        self._read(at, instruction, gradient)
        value = self._parameters.get(parameter)
        if value is None or value not in self._gradients:
            message = f"{self._names.buffer(parameter)} is no parameter of the module that has a gradient"
            self._report(ViolationKind.UPDATE_PARAMETER, at, message)
            return
        if gradient != self._gradients[value]:
            message = (
                f"{self._names.buffer(gradient)} is not the gradient of {self._names.value(value)}, "
                f"which is {self._names.buffer(self._gradients[value])}"
            )
            self._report(ViolationKind.UPDATE_GRADIENT, at, message)
        if value in self._updates:
            message = f"{self._names.value(value)} was updated by instruction {self._updates[value]}"
            self._report(ViolationKind.UPDATED_TWICE, at, message)
            return
        if self._root[parameter] in {self._root[source] for source in self._sent()}:
            message = f"{self._names.value(value)} is updated while an overlapped resharding reads it"
            self._report(ViolationKind.IN_FLIGHT, at, message)
        self._updates[value] = at
        self._updated_storages[self._root[parameter]] = at

    def _sent(self) -> set[int]:
        """Sources that overlapped reshardings under way read."""
        return {source for source in self._in_flight.values() if source is not None}

    def _free(self, at: int, buffer: int) -> None:
        name = self._names.buffer(buffer)
        if buffer in self._kept:
            self._report(ViolationKind.FREED_PARAMETER, at, f"{name} belongs to the module and stays")
        elif buffer in self._lasting:
            self._report(ViolationKind.FREED_RESULT, at, f"{name} is a result and stays")
        elif self._freed[buffer] < 0:
            self._report(ViolationKind.FREED_BEFORE_CREATED, at, f"{name} is freed before it is created")
        elif self._freed[buffer] < self._end:
            self._report(ViolationKind.FREED_TWICE, at, f"{name} was freed by instruction {self._freed[buffer]}")
        elif buffer in self._in_flight or buffer in self._sent():
            self._report(ViolationKind.IN_FLIGHT, at, f"{name} is freed while an overlapped resharding uses it")
            self._freed[buffer] = at
        else:
            self._freed[buffer] = at

    def _finish(self) -> None:
        stay = {*self._schedule.inputs, *self._lasting}
        self._finish_copies()
        for buffer in self._in_flight:
            message = f"nothing waits for the overlapped resharding that makes {self._names.buffer(buffer)}"
            self._report(ViolationKind.NEVER_WAITED, None, message)
        for buffer, freed in enumerate(self._freed):
            if freed < 0:
                self._report(ViolationKind.NEVER_CREATED, None, f"{self._names.buffer(buffer)} is never created")
            elif freed == self._end and buffer not in stay:
                self._report(ViolationKind.NEVER_FREED, None, f"{self._names.buffer(buffer)} is never freed")
        for operator in sorted(self._needed() - self._executed):
            message = f"{self._names.operator(operator)} never runs, but the step needs it"
            self._report(ViolationKind.NEVER_EXECUTED, None, message)
        for value in self._gradients:
            if self._graph.values[value].trainable and value not in self._updates:
                message = f"parameter {self._names.value(value)} is never updated"
                self._report(ViolationKind.NEVER_UPDATED, None, message)
        for buffer in sorted(self._lasting):
            if self._root[buffer] in self._updated_storages:
                message = f"result {self._names.buffer(buffer)} is changed by an update"
                self._report(ViolationKind.READ_AFTER_UPDATE, None, message)
            if self._created[buffer] < self._reduced_storages.get(self._root[buffer], -1):
                message = f"result {self._names.buffer(buffer)} is changed by a reduction in place"
                self._report(ViolationKind.IN_PLACE, None, message)

    def _finish_copies(self) -> None:
        """Report offloads of results of the step, host buffers without a reader, results in host memory."""
        returned = {self._root[buffer]: buffer for buffer in self._schedule.results}
        for at, source in self._offloads:
            if source in returned:
                message = f"{self._names.buffer(source)} holds result {self._names.buffer(returned[source])}"
                self._report(ViolationKind.OFFLOAD_SOURCE, at, message)
        for buffer, on_host in enumerate(self._on_host):
            if on_host and buffer in self._schedule.results:
                self._report(ViolationKind.HOST_READ, None, f"result {self._names.buffer(buffer)} is on the host")
            elif on_host and buffer not in self._prefetched:
                message = f"{self._names.buffer(buffer)} on the host is never prefetched"
                self._report(ViolationKind.NEVER_PREFETCHED, self._created[buffer], message)

    def _needed(self) -> set[int]:
        """Operators, views aside, without which an output of the graph cannot be had."""
        operators, values = self._graph.operators, self._graph.values
        pending = [values[output.value].producer for output in self._graph.outputs]
        needed: set[int] = set()
        while pending:
            index = pending.pop()
            if index is not None and index not in needed:
                needed.add(index)
                pending.extend(values[value].producer for value in operators[index].inputs)
        return {index for index in needed if not operators[index].is_view}
