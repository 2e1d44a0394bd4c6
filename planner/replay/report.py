"""Result of a replay: typed violations, the memory over time and the tensors alive at its peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from planner.graph.placement import Placement


class ViolationKind(StrEnum):
    """Every way in which a schedule can be wrong."""

    MESH = "mesh"
    INVALID_INDEX = "invalid_index"
    INVALID_PLACEMENT = "invalid_placement"
    ARITY = "arity"
    WRONG_VALUE = "wrong_value"
    USED_BEFORE_CREATED = "used_before_created"
    USED_AFTER_FREE = "used_after_free"
    CREATED_TWICE = "created_twice"
    NEVER_CREATED = "never_created"
    FREED_BEFORE_CREATED = "freed_before_created"
    FREED_TWICE = "freed_twice"
    FREED_PARAMETER = "freed_parameter"
    FREED_RESULT = "freed_result"
    NEVER_FREED = "never_freed"
    EXECUTED_TWICE = "executed_twice"
    NEVER_EXECUTED = "never_executed"
    OUT_OF_ORDER = "out_of_order"
    RECOMPUTED_BEFORE_EXECUTED = "recomputed_before_executed"
    RECOMPUTED_RANDOM = "recomputed_random"
    RECOMPUTED_VIEW = "recomputed_view"
    STRATEGY = "strategy"
    RESHARD_PATH = "reshard_path"
    UPDATE_PARAMETER = "update_parameter"
    UPDATE_GRADIENT = "update_gradient"
    UPDATED_TWICE = "updated_twice"
    NEVER_UPDATED = "never_updated"
    READ_AFTER_UPDATE = "read_after_update"
    RESULT_PLACEMENT = "result_placement"
    OFFLOAD_SOURCE = "offload_source"
    TRANSFER_PLACEMENT = "transfer_placement"
    PREFETCH_SOURCE = "prefetch_source"
    HOST_READ = "host_read"
    NEVER_PREFETCHED = "never_prefetched"
    IN_FLIGHT = "in_flight"
    WAIT = "wait"
    NEVER_WAITED = "never_waited"
    BUCKET = "bucket"
    IN_PLACE = "in_place"
    OVER_LIMIT = "over_limit"
    OVER_HOST_LIMIT = "over_host_limit"
    UNPRICED = "unpriced"


@dataclass(frozen=True, slots=True)
class Violation:
    """A violation of one instruction, or of the schedule as a whole where ``instruction`` is None."""

    kind: ViolationKind
    instruction: int | None
    message: str

    def __str__(self) -> str:
        where = "schedule" if self.instruction is None else f"instruction {self.instruction}"
        return f"{where}: {self.kind}: {self.message}"


class Category(StrEnum):
    """Purpose of bytes in memory."""

    PARAMETERS = "parameters"
    MODULE_BUFFERS = "module_buffers"
    OPTIMIZER = "optimizer"
    INPUTS = "inputs"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    RESHARDED = "resharded"
    WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True)
class AliveTensor:
    """A storage alive at one moment: the value that it was created for, its placement and bytes on one device.

    ``buffer`` is the buffer that owns the storage; None for the optimizer's state of a parameter and for the
    workspace of an instruction (which has no placement).
    """

    name: str
    nbytes: int
    placement: Placement
    category: Category
    buffer: int | None


@dataclass(frozen=True, slots=True, eq=False)
class MemoryProfile:
    """Bytes on one device over the instructions.

    Parameters
    ----------
    at_start
        Bytes per category before the first instruction.
    after
        Per category an int64 array with one entry per instruction: bytes held when it has ended.
    transient
        Per category an int64 array: bytes held beyond ``after`` while the instruction runs.
    """

    at_start: Mapping[Category, int]
    after: Mapping[Category, NDArray[np.int64]]
    transient: Mapping[Category, NDArray[np.int64]]

    @property
    def total_during(self) -> NDArray[np.int64]:
        """Largest bytes of all categories while each instruction runs."""
        return _total(self.after) + _total(self.transient)

    def during(self, category: Category) -> NDArray[np.int64]:
        """Bytes of one category while each instruction runs."""
        return self.after[category] + self.transient[category]


@dataclass(frozen=True, slots=True, eq=False)
class HostUse:
    """Pinned host memory of a step, per device.

    Parameters
    ----------
    after
        int64 array with one entry per instruction: bytes of host buffers when it has ended.
    peak_bytes, peak_instruction
        Largest of these and the first instruction that reaches it (-1 without host buffers).
    offloaded_bytes, prefetched_bytes
        Bytes that a step copies to the host and back.
    """

    after: NDArray[np.int64]
    peak_bytes: int
    peak_instruction: int
    offloaded_bytes: int
    prefetched_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class ReplayReport:
    """Result of a replay; the numbers mean something only where ``violations`` is empty.

    Parameters
    ----------
    violations
        In order of the instructions; those of the schedule as a whole come last.
    peak_bytes
        Largest number of bytes that any device holds at any moment.
    peak_instruction
        First instruction during which the peak is reached; -1 before the first one.
    alive_at_peak
        Storages at the peak, largest first; the bytes add up to ``peak_bytes``.
    profile
        Bytes over the instructions.
    host
        Use of host memory.
    total_quanta
        Time of the step in the costs' integer quantum, the end of its last instruction
        (:mod:`planner.replay.clocks`). None without costs and where the schedule is no correct step.
    stall_quanta, hidden_bytes
        Time of stalls for copies to and from the host, and bytes of the copies without a stall; None where
        ``total_quanta`` is.
    overlapped_quanta, exposed_quanta
        Time that overlapped collectives take, and for which the computation waits for them; None where
        ``total_quanta`` is.
    recomputed
        Number of recomputing instructions.
    reshards, collectives
        Number of resharding instructions, and of their steps that communicate.
    """

    violations: tuple[Violation, ...]
    peak_bytes: int
    peak_instruction: int
    alive_at_peak: tuple[AliveTensor, ...]
    profile: MemoryProfile
    host: HostUse
    total_quanta: int | None
    stall_quanta: int | None
    hidden_bytes: int | None
    overlapped_quanta: int | None
    exposed_quanta: int | None
    recomputed: int
    reshards: int
    collectives: int
    kinds: frozenset[ViolationKind] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", frozenset(violation.kind for violation in self.violations))

    @property
    def ok(self) -> bool:
        """Whether there is no violation."""
        return not self.violations


def _total(bytes_by_category: Mapping[Category, NDArray[np.int64]]) -> NDArray[np.int64]:
    total: NDArray[np.int64] = np.stack(list(bytes_by_category.values())).sum(axis=0, dtype=np.int64)
    return total
