"""Decision of a plan: the types of its part of a plan file, which its digest covers.

It is the same for the same inputs byte for byte. Numbers are whole nanoseconds and whole bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from planner.graph.operator_graph import ValueRole
from planner.graph.optimizers import OptimizerName, ReduceDtype
from planner.replay.report import Category

NANOSECONDS = 1e9

Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 in hexadecimal digits."""

AxisPlacement = Annotated[str, Field(pattern=r"^(R|S(0|[1-9][0-9]*)|P(sum|avg|max|min))$")]
"""How a tensor lies on one mesh axis."""


HOLDINGS = ("keep", "recompute", "offload")
"""Ways in which an operator's outputs are held, as pins name them."""

ANY_PLACEMENT = "*"
"""Stands for any placement on one mesh axis, in pins."""

_ENTRY = r"(R|S(0|[1-9][0-9]*)|P(sum|avg|max|min)|\*)"
_SETTING = r"[a-z_]+=[A-Za-z0-9_]+"
_PINNED = rf"^({'|'.join(HOLDINGS)}|{_ENTRY}(,{_ENTRY})*|{_SETTING})$"


class Part(BaseModel):
    """A part of a plan file: nothing beside its fields, no conversion, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class PlannedModel(Part):
    """The planned training step; the fields of :class:`planner.models.references.ModelReference`.

    ``sequence`` is None, and not written, where the step has no such option.
    """

    source: str
    batch: PositiveInt
    sequence: PositiveInt | None = None
    dtype: str
    seed: NonNegativeInt
    layers: PositiveInt | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    loss_chunks: PositiveInt = 1
    reduce_dtype: ReduceDtype | None = None

    @property
    def dtypes(self) -> str:
        """Dtype of parameters and activations, and that of sums of gradients over devices where it differs."""
        return self.dtype + (f", gradients summed in {self.reduce_dtype}" if self.reduce_dtype == "float32" else "")

    @model_serializer(mode="wrap")
    def _without_absent_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What a plan of an earlier version does not have is not written, so that its digest stays."""
        written: dict[str, Any] = handler(self)
        optional = ("reduce_dtype", "sequence")
        return {name: value for name, value in written.items() if name not in optional or value is not None}

    def text(self, micro_batches: int = 1) -> str:
        """The step in words; a batch of several micro-batches is that of all of them."""
        batch = f"{self.batch * micro_batches} in {micro_batches} micro-batches" if micro_batches > 1 else self.batch
        sequence = "" if self.sequence is None else f", sequence {self.sequence}"
        return f"{self.source}, batch {batch}{sequence}, {self.dtypes}"


class Pin(Part):
    """A decision of the user about a part of the step.

    Parameters
    ----------
    target
        An operator, a module, a parameter or a pattern, see :func:`planner.graph.names.operators_named`.
    decision
        ``keep``, ``recompute``, ``offload``, or a placement with one entry per mesh axis such as ``S0`` or ``S0,*``;
        of layers a setting, such as ``tensor_parallel=2``.
    forbids
        Whether the plan must not do it; else it has to.
    """

    target: str
    decision: Annotated[str, Field(pattern=_PINNED)]
    forbids: bool = False

    def __str__(self) -> str:
        return f"{self.target} {'not ' if self.forbids else ''}{self.decision}"


def is_placed(placement: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether a placement is one of those that a pin names."""
    return len(placement) == len(wanted) and all(
        want in (ANY_PLACEMENT, found) for found, want in zip(placement, wanted, strict=True)
    )


class PlanOptions(Part):
    """Options of the planner for this plan.

    Parameters
    ----------
    cluster
        Name of the cluster.
    mesh
        Size of each mesh axis.
    optimizer, grad_accum
        Optimizer, and micro-batches per optimizer step: each has the model's batch, and the schedule is that of one.
    formulation
        Name of the model that was solved.
    memory_model
        How a program of KIWI counted bytes while it searched; absent from plans of other formulations, which count as
        the engine, and from those of earlier versions.
    memory_bytes, reserve_bytes
        Memory of one device that was allowed (None: no limit), and how much of it torch's tensors cannot have.
    host_memory_bytes
        Pinned host memory that offloaded tensors of one device may take (None: no limit).
    counter_based_random
        Whether random operators draw numbers by element, so that they may be recomputed; the executor must
        then do so.
    device
        Kind of device that it was planned for, whose kernels' workspaces the peak holds; absent from plans for
        processes on a CPU, and from those of earlier versions.
    fused
        Whether AdamW is one kernel; absent from plans of earlier versions, in which it was so on CUDA alone.
    releases_sources
        Whether the predicted memory counts the source of a path of several steps no longer than the first of them,
        where nothing reads it later; absent from plans of earlier versions, which counted it to the end.
    pins
        Decisions of the user: the bound is over the plans that keep them.
    """

    cluster: str
    mesh: tuple[PositiveInt, ...]
    optimizer: OptimizerName
    grad_accum: PositiveInt = 1
    formulation: str
    memory_model: Literal["engine", "paper"] | None = None
    memory_bytes: NonNegativeInt | None = None
    reserve_bytes: NonNegativeInt = 0
    host_memory_bytes: NonNegativeInt | None = None
    counter_based_random: bool = False
    device: Literal["cuda"] | None = None
    fused: bool | None = None
    releases_sources: bool | None = None
    pins: tuple[Pin, ...] = ()

    @model_serializer(mode="wrap")
    def _without_absent_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What a plan of an earlier version does not have is not written, so that its digest stays."""
        written: dict[str, Any] = handler(self)
        added = ("memory_model", "device", "fused", "releases_sources", "pins")
        return {name: value for name, value in written.items() if name not in added or value not in (None, [], ())}

    @property
    def is_fused(self) -> bool:
        """Whether AdamW is run as one kernel."""
        return self.device == "cuda" if self.fused is None else self.fused

    @model_validator(mode="after")
    def _memory_beyond_the_reserve(self) -> PlanOptions:
        if self.memory_bytes is not None and self.reserve_bytes > self.memory_bytes:
            raise ValueError(f"reserve of {self.reserve_bytes} bytes exceeds the memory of {self.memory_bytes}")
        return self

    @property
    def limit_bytes(self) -> int | None:
        """Bytes that torch's tensors may have on one device."""
        return None if self.memory_bytes is None else self.memory_bytes - self.reserve_bytes


class Fingerprints(Part):
    """SHA-256 of the inputs of a plan: traced graph, cluster, calibration (if any), sharding rules."""

    graph: Fingerprint
    cluster: Fingerprint
    calibration: Fingerprint | None = None
    rules: Fingerprint


class InputValue(Part):
    """A tensor that the step is given: parameter, module buffer, input or tangent, by name."""

    role: Literal[ValueRole.PARAMETER, ValueRole.BUFFER, ValueRole.INPUT, ValueRole.TANGENT]
    name: str


class OutputValue(Part):
    """Output ``output`` of an operator, by its position in the plan's list of operators."""

    operator: NonNegativeInt
    output: NonNegativeInt


class ComputeStep(Part):
    """One execution of an operator; ``op`` is ``recompute`` for all but the first one."""

    op: Literal["compute", "recompute"]
    operator: NonNegativeInt
    inputs: tuple[NonNegativeInt, ...]
    outputs: tuple[NonNegativeInt | None, ...]


class ReshardStep(Part):
    """Collectives from ``source`` to ``target``; the path is in positions of the plan's list of placements.

    ``start`` is a single collective that runs beside the computation until a :class:`WaitStep`, ``start in place`` one
    whose result takes the storage of its source, and ``join`` a part of that of the instruction before it.
    """

    op: Literal["reshard", "start", "start in place", "join"]
    source: NonNegativeInt
    target: NonNegativeInt
    path: tuple[NonNegativeInt, ...]


class UpdateStep(Part):
    """Optimizer step of one parameter."""

    op: Literal["update"]
    parameter: NonNegativeInt
    gradient: NonNegativeInt


class FreeStep(Part):
    """Buffers that are dropped."""

    op: Literal["free"]
    buffers: tuple[NonNegativeInt, ...]


class WaitStep(Part):
    """The wait for a resharding that was started."""

    op: Literal["wait"]
    buffer: NonNegativeInt


class TransferStep(Part):
    """A copy between device and host."""

    op: Literal["offload", "prefetch"]
    source: NonNegativeInt
    target: NonNegativeInt


PlanInstruction = Annotated[
    ComputeStep | ReshardStep | WaitStep | UpdateStep | FreeStep | TransferStep, Field(discriminator="op")
]


class PlanSchedule(Part):
    """A :class:`.Schedule`; each buffer is (position of its value, position of its placement)."""

    mesh: tuple[PositiveInt, ...]
    placements: tuple[tuple[AxisPlacement, ...], ...]
    buffers: tuple[tuple[NonNegativeInt, NonNegativeInt], ...]
    inputs: tuple[NonNegativeInt, ...]
    instructions: tuple[PlanInstruction, ...]
    results: tuple[NonNegativeInt, ...]


class MemoryOverTime(Part):
    """Bytes on one device at some instructions (-1: before the first), the peak among them, per category."""

    instructions: tuple[Annotated[int, Field(ge=-1)], ...]
    bytes: dict[Category, tuple[NonNegativeInt, ...]]


class PredictedHost(Part):
    """Host memory of a step and the copies to and from it; all 0 where nothing is offloaded.

    Parameters
    ----------
    peak_bytes
        Largest number of bytes in pinned host memory for one device.
    offloaded_bytes, prefetched_bytes, hidden_bytes
        Bytes copied to the host and back, and the bytes of both without a stall.
    stall_ns
        Time for which the computation stalls on copies; the objective contains it.
    """

    peak_bytes: NonNegativeInt = 0
    offloaded_bytes: NonNegativeInt = 0
    prefetched_bytes: NonNegativeInt = 0
    hidden_bytes: NonNegativeInt = 0
    stall_ns: NonNegativeInt = 0


class Predicted(Part):
    """Prediction of the plan; a replay must give the same.

    Parameters
    ----------
    objective_ns, bound_ns
        Time of one optimizer step, and its proven lower bound over all plans of the formulation (None: no bound
        was proven).
    peak_bytes, peak_instruction
        Largest number of bytes on a device (the same on every rank) and the first instruction with it.
    memory
        Bytes over the step.
    host
        Host memory and copies.
    """

    objective_ns: NonNegativeInt
    bound_ns: NonNegativeInt | None
    peak_bytes: NonNegativeInt
    peak_instruction: Annotated[int, Field(ge=-1)]
    memory: MemoryOverTime
    host: PredictedHost = PredictedHost()


class Decision(Part):
    """The decision of a plan, equal byte for byte for equal inputs.

    ``random_targets`` are those of the step's operators that draw random numbers; empty, and not written, where none
    does, and in plans of earlier versions.
    """

    created_by: str
    model: PlannedModel
    options: PlanOptions
    fingerprints: Fingerprints
    operators: tuple[str, ...]
    values: tuple[InputValue | OutputValue, ...]
    schedule: PlanSchedule
    predicted: Predicted
    random_targets: tuple[str, ...] = ()

    @model_serializer(mode="wrap")
    def _without_absent_targets(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the field where nothing is random, so that the digest of such a plan stays."""
        written: dict[str, Any] = handler(self)
        return {name: value for name, value in written.items() if name != "random_targets" or value}

    @model_validator(mode="after")
    def _one_mesh(self) -> Decision:
        if self.schedule.mesh != self.options.mesh:
            raise ValueError(f"the schedule is for mesh {self.schedule.mesh}, the options say {self.options.mesh}")
        return self


def canonical_json(part: BaseModel) -> str:
    """JSON with sorted keys and no spaces: equal parts give equal bytes."""
    return json.dumps(
        part.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def decision_digest(decision: Decision) -> str:
    """SHA-256 of the canonical JSON of a decision."""
    return hashlib.sha256(canonical_json(decision).encode()).hexdigest()


def part_digests(decision: Decision) -> dict[str, str]:
    """SHA-256 of the canonical JSON of each field of a decision."""
    parts = decision.model_dump(mode="json")
    return {
        name: hashlib.sha256(
            json.dumps(part, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        ).hexdigest()
        for name, part in parts.items()
    }
