"""Types of a plan file, from which the published schema is generated.

A plan has a *decision*, which is the same for the same inputs byte for byte and which its digest covers, and a
*record* of how it was found (times, solvers, machine), which differs from run to run. Numbers are whole
nanoseconds and whole bytes.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from formulations.problem.solution import Proof, Status, relative_gap
from planner.common.units import format_bytes, format_gap, format_seconds
from planner.graph.operator_graph import ValueRole
from planner.graph.optimizers import OptimizerName, ReduceDtype
from planner.plan.rendering import html_table, text_table
from planner.replay.report import Category
from planner.replay.structure import communicating_steps

PLAN_VERSION: Literal[2] = 2
"""Version of the file format; a file of another version is refused."""

NANOSECONDS = 1e9

Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 in hexadecimal digits."""

AxisPlacement = Annotated[str, Field(pattern=r"^(R|S(0|[1-9][0-9]*)|P(sum|avg|max|min))$")]
"""How a tensor lies on one mesh axis."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class PlannedModel(_Part):
    """The planned training step; the fields of :class:`planner.models.references.ModelReference`."""

    source: str
    batch: PositiveInt
    sequence: PositiveInt
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
        return {name: value for name, value in written.items() if name != "reduce_dtype" or value is not None}


class PlanOptions(_Part):
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
    """

    cluster: str
    mesh: tuple[PositiveInt, ...]
    optimizer: OptimizerName
    grad_accum: PositiveInt = 1
    formulation: str
    memory_bytes: NonNegativeInt | None = None
    reserve_bytes: NonNegativeInt = 0
    host_memory_bytes: NonNegativeInt | None = None
    counter_based_random: bool = False
    device: Literal["cuda"] | None = None
    fused: bool | None = None

    @model_serializer(mode="wrap")
    def _without_absent_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What a plan of an earlier version does not have is not written, so that its digest stays."""
        written: dict[str, Any] = handler(self)
        return {name: value for name, value in written.items() if name not in ("device", "fused") or value is not None}

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


class Fingerprints(_Part):
    """SHA-256 of the inputs of a plan: traced graph, cluster, calibration (if any), sharding rules."""

    graph: Fingerprint
    cluster: Fingerprint
    calibration: Fingerprint | None = None
    rules: Fingerprint


class InputValue(_Part):
    """A tensor that the step is given: parameter, module buffer, input or tangent, by name."""

    role: Literal[ValueRole.PARAMETER, ValueRole.BUFFER, ValueRole.INPUT, ValueRole.TANGENT]
    name: str


class OutputValue(_Part):
    """Output ``output`` of an operator, by its position in the plan's list of operators."""

    operator: NonNegativeInt
    output: NonNegativeInt


class ComputeStep(_Part):
    """One execution of an operator; ``op`` is ``recompute`` for all but the first one."""

    op: Literal["compute", "recompute"]
    operator: NonNegativeInt
    inputs: tuple[NonNegativeInt, ...]
    outputs: tuple[NonNegativeInt | None, ...]


class ReshardStep(_Part):
    """Collectives from ``source`` to ``target``; the path is in positions of the plan's list of placements.

    ``start`` is a single collective that runs beside the computation until a :class:`WaitStep`, and ``join`` a part of
    that of the instruction before it.
    """

    op: Literal["reshard", "start", "join"]
    source: NonNegativeInt
    target: NonNegativeInt
    path: tuple[NonNegativeInt, ...]


class UpdateStep(_Part):
    """Optimizer step of one parameter."""

    op: Literal["update"]
    parameter: NonNegativeInt
    gradient: NonNegativeInt


class FreeStep(_Part):
    """Buffers that are dropped."""

    op: Literal["free"]
    buffers: tuple[NonNegativeInt, ...]


class WaitStep(_Part):
    """The wait for a resharding that was started."""

    op: Literal["wait"]
    buffer: NonNegativeInt


class TransferStep(_Part):
    """A copy between device and host."""

    op: Literal["offload", "prefetch"]
    source: NonNegativeInt
    target: NonNegativeInt


PlanInstruction = Annotated[
    ComputeStep | ReshardStep | WaitStep | UpdateStep | FreeStep | TransferStep, Field(discriminator="op")
]


class PlanSchedule(_Part):
    """A :class:`.Schedule`; each buffer is (position of its value, position of its placement)."""

    mesh: tuple[PositiveInt, ...]
    placements: tuple[tuple[AxisPlacement, ...], ...]
    buffers: tuple[tuple[NonNegativeInt, NonNegativeInt], ...]
    inputs: tuple[NonNegativeInt, ...]
    instructions: tuple[PlanInstruction, ...]
    results: tuple[NonNegativeInt, ...]


class MemoryOverTime(_Part):
    """Bytes on one device at some instructions (-1: before the first), the peak among them, per category."""

    instructions: tuple[Annotated[int, Field(ge=-1)], ...]
    bytes: dict[Category, tuple[NonNegativeInt, ...]]


class PredictedHost(_Part):
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


class Predicted(_Part):
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


class Decision(_Part):
    """The decision of a plan, equal byte for byte for equal inputs."""

    created_by: str
    model: PlannedModel
    options: PlanOptions
    fingerprints: Fingerprints
    operators: tuple[str, ...]
    values: tuple[InputValue | OutputValue, ...]
    schedule: PlanSchedule
    predicted: Predicted

    @model_validator(mode="after")
    def _one_mesh(self) -> Decision:
        if self.schedule.mesh != self.options.mesh:
            raise ValueError(f"the schedule is for mesh {self.schedule.mesh}, the options say {self.options.mesh}")
        return self


class CrossCheck(_Part):
    """Bound, or in older plans the result, of another method on the same problem."""

    solver: str
    status: Status
    objective_ns: NonNegativeInt | None = None
    bound_ns: NonNegativeInt | None = None
    seconds: NonNegativeFloat = 0.0


class Certificate(_Part):
    """The solvers that found the plan and proved its bound.

    ``proof`` is how the bound is known; None in plans without a bound, and in those written before proofs had names.
    ``method`` is what an exact bound is an evaluation of, empty where that is not known.
    ``claimed_ns`` is a bound beyond it that one kind of solver, ``claimed_by``, claims.
    """

    solver: str
    status: Status
    seconds: NonNegativeFloat
    proof: Proof | None = None
    method: str = ""
    claimed_ns: NonNegativeInt | None = None
    claimed_by: str = ""
    cross_checks: tuple[CrossCheck, ...] = ()


class Record(_Part):
    """Record of how the plan was found; it differs from run to run.

    ``times`` is seconds per stage, ``hardware`` the machine of the planner, ``notes`` the omissions of the planner:
    operators without a rule, dimensions that an axis does not divide, and the time that these may cost.
    """

    certificate: Certificate
    notes: tuple[str, ...] = ()
    times: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    hardware: dict[str, str] = Field(default_factory=dict)


class Plan(_Part):
    """A plan: the decision, the SHA-256 of its canonical JSON, and the record of how it was found.

    ``part_digests`` holds the same per field of the decision, so that an edit can be named.
    """

    version: Literal[2]
    decision: Decision
    digest: Fingerprint
    part_digests: dict[str, Fingerprint] = Field(default_factory=dict)
    record: Record

    @property
    def objective_seconds(self) -> float:
        """Predicted seconds of one optimizer step."""
        return self.decision.predicted.objective_ns * self.decision.options.grad_accum / NANOSECONDS

    @property
    def bound_seconds(self) -> float | None:
        """Proven lower bound of the objective."""
        bound = self.decision.predicted.bound_ns
        return None if bound is None else bound * self.decision.options.grad_accum / NANOSECONDS

    @property
    def gap(self) -> float | None:
        """``(objective - bound) / objective``; None without a bound."""
        return relative_gap(self.decision.predicted.objective_ns, self.decision.predicted.bound_ns)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of each device."""
        return self.decision.predicted.peak_bytes

    def rows(self) -> list[tuple[str, str]]:
        """Main figures of the plan, as (name, value)."""
        options, predicted = self.decision.options, self.decision.predicted
        model, certificate = self.decision.model, self.record.certificate
        bound, limit, parts = self.bound_seconds, options.limit_bytes, options.grad_accum
        batch = f"{model.batch * parts} in {parts} micro-batches" if parts > 1 else f"{model.batch}"
        return [
            ("model", f"{model.source}, batch {batch}, sequence {model.sequence}, {model.dtypes}"),
            ("mesh", f"{'x'.join(map(str, options.mesh))} on {options.cluster}"),
            ("formulation", f"{options.formulation}, {options.optimizer}"),
            ("status", str(certificate.status)),
            ("objective", f"{format_seconds(self.objective_seconds)} per step"),
            ("bound", "-" if bound is None else f"{format_seconds(bound)}{_known(certificate)}"),
            *_claim_row(certificate, parts),
            ("gap", format_gap(self.gap)),
            ("solver", f"{certificate.solver}, {format_seconds(certificate.seconds)}"),
            ("second bound", _second_bound(certificate, predicted.objective_ns, parts)),
            ("peak memory", format_bytes(predicted.peak_bytes)),
            ("memory limit", "-" if limit is None else _limit(limit, options.reserve_bytes)),
            *self._host_rows(),
            ("recomputed operators", str(self.recomputed)),
            ("collectives", str(self.collectives)),
            *(("note", note) for note in self.record.notes),
        ]

    def _host_rows(self) -> list[tuple[str, str]]:
        host, limit = self.decision.predicted.host, self.decision.options.host_memory_bytes
        if not host.offloaded_bytes:
            return []
        copied = host.offloaded_bytes + host.prefetched_bytes
        tensors = sum(instruction.op == "offload" for instruction in self.decision.schedule.instructions)
        return [
            ("offloaded tensors", f"{tensors}, {format_bytes(host.offloaded_bytes)} per step"),
            ("peak host memory", format_bytes(host.peak_bytes)),
            ("host memory limit", "-" if limit is None else format_bytes(limit)),
            ("copied to and from host", f"{format_bytes(copied)}, {host.hidden_bytes / copied:.0%} of it hidden"),
            ("waiting for copies", f"{format_seconds(host.stall_ns / NANOSECONDS)} per step"),
        ]

    @property
    def recomputed(self) -> int:
        """Further executions of operators that already ran."""
        return sum(step.op == "recompute" for step in self.decision.schedule.instructions)

    @property
    def collectives(self) -> int:
        """Collectives between operators, local slices not counted."""
        schedule = self.decision.schedule
        steps = (step for step in schedule.instructions if isinstance(step, ReshardStep))
        paths = (step.path for step in steps if step.op != "join")
        return sum(communicating_steps([schedule.placements[position] for position in path]) for path in paths)

    def summary(self) -> str:
        """Rows of text."""
        return text_table(self.rows())

    def __repr__(self) -> str:
        options = self.decision.options
        return (
            f"<plan of {self.decision.model.source} on {'x'.join(map(str, options.mesh))} of {options.cluster}: "
            f"{format_seconds(self.objective_seconds)} per step, gap {format_gap(self.gap)}, "
            f"peak {format_bytes(self.peak_bytes)}>"
        )

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return html_table(self.rows())


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


def plan_schema() -> dict[str, Any]:
    """JSON schema of a plan file."""
    schema = Plan.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Meshwright plan"}


def _known(certificate: Certificate) -> str:
    method = f" by {certificate.method}" if certificate.method else ""
    return "" if certificate.proof is None else f", {certificate.proof}{method}"


def _second_bound(certificate: Certificate, objective_ns: int, micro_batches: int) -> str:
    words = [
        f"{format_seconds(check.bound_ns * micro_batches / NANOSECONDS)} by {check.solver}, "
        f"gap {format_gap(relative_gap(objective_ns, check.bound_ns))}"
        for check in certificate.cross_checks
        if check.bound_ns is not None
    ]
    return ", ".join(words) or "none: the bound is from one method"


def _claim_row(certificate: Certificate, micro_batches: int) -> list[tuple[str, str]]:
    if certificate.claimed_ns is None:
        return []
    claimed = format_seconds(certificate.claimed_ns * micro_batches / NANOSECONDS)
    return [("claimed bound", f"{claimed} by {certificate.claimed_by}, not proven")]


def _limit(tensor_bytes: int, reserve_bytes: int) -> str:
    """The limit on tensors, and what is beside them on the device."""
    beside = f", beside a reserve of {format_bytes(reserve_bytes)}" if reserve_bytes else ""
    return f"{format_bytes(tensor_bytes)} for tensors{beside}"
