"""The layer plan: stage, devices and settings of every layer, as a document of its own.

A layer plan has no operators. Each layer is a module of the model, named by its path, with its degrees of data and
tensor parallelism and its memory settings; :mod:`runtime.layers.executor` translates it into torch's own engine. The
devices of a stage are one mesh of prime axes (:mod:`planner.layers.plan.check`), outermost replicas, then shards,
then tensor parallelism.
"""

from __future__ import annotations

import hashlib
import json
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from formulations.problem.files import write_text_atomically
from planner.common.plan_error import PlanError
from planner.common.units import format_seconds
from planner.graph.optimizers import OptimizerName
from planner.layers.plan.rendering import layer_plan_text
from planner.plan.decision import Fingerprint, Pin, PlannedModel, canonical_json

if TYPE_CHECKING:
    import pandas as pd

LAYER_PLAN_VERSION: Literal[1] = 1
"""Version of the document; one of another version is refused."""

Sharding = Literal["none", "zero2", "zero3"]
"""What data parallelism shards: nothing (DDP); gradients and optimizer state (ZeRO-2); parameters too (ZeRO-3).

Rajbhandari et al. 2020, section 5. FSDP2 shards the parameters between steps in both cases and differs in when it
gathers them: ZeRO-2 once, before the forward; ZeRO-3 again before the backward.
"""

PipelineSchedule = Literal["gpipe", "1f1b"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class LayerSettings(_Part):
    """Settings of one layer.

    Parameters
    ----------
    name
        Module path of a block, or ``embedding``, ``bridge`` (between an encoder and its decoder) or ``head`` for the
        modules around the blocks. A block may instead be given as modules inside it, each a layer of its own: by role
        (``transformer.h.3.attention``, ``.mlp``, ``.cross_attention``) or by module path (``transformer.h.3.attn``);
        the block's other modules (the norms) have the settings of the first of these.
    data_parallel
        Number of parts of the micro-batch.
    sharding
        State that data parallelism shards.
    shard_degree
        Devices that share one sharded copy; a divisor of `data_parallel`, and below it the copies are replicated
        (HSDP). None: all of them.
    tensor_parallel
        Number of devices that share every matrix product (Shoeybi et al. 2019).
    undivided
        Whether every device of the tensor-parallel group computes the whole layer, as where a vocabulary or a number of
        heads does not divide.
    sequence_parallel
        Whether the norms between the products are sharded along the sequence (Korthikanti et al. 2022).
    checkpoint
        Whether only the layer's input is kept and its forward runs again in backward.
    offload_hidden, offload_parameters, offload_optimizer
        State in host memory: tensors saved for backward; parameters (with gradients and optimizer state, which
        FSDP2 cannot separate from them); optimizer state alone.
    slices
        Pieces that each matrix product of the layer is computed in, one after the other, so that no more than one
        piece's parameters need be gathered at a time (operator splitting of OSDP, section 3.3).
    sharded_slices
        Number of slices that are sharded by `sharding`, the others being replicated. None: all of them.
    """

    name: Annotated[str, Field(min_length=1)]
    data_parallel: PositiveInt = 1
    sharding: Sharding = "none"
    shard_degree: PositiveInt | None = None
    tensor_parallel: PositiveInt = 1
    undivided: bool = False
    sequence_parallel: bool = False
    checkpoint: bool = False
    offload_hidden: bool = False
    offload_parameters: bool = False
    offload_optimizer: bool = False
    slices: PositiveInt = 1
    sharded_slices: NonNegativeInt | None = None

    @property
    def shares_products(self) -> bool:
        """Whether its matrix products are divided among devices."""
        return self.tensor_parallel > 1 and not self.undivided

    @property
    def shards(self) -> int:
        """Devices that share one copy of the parameters by data parallelism."""
        if self.sharding == "none":
            return 1
        return self.shard_degree or self.data_parallel

    @property
    def replicas(self) -> int:
        """Copies of the parameters that data parallelism makes."""
        return self.data_parallel // self.shards

    @property
    def devices(self) -> int:
        """Devices that run the layer."""
        return self.data_parallel * self.tensor_parallel


class StagePlan(_Part):
    """A stage of the pipeline: consecutive layers on the same devices.

    Parameters
    ----------
    layers
        The layers, in the order in which they run.
    devices
        How many devices; None where all stages have equally many.
    """

    layers: Annotated[tuple[LayerSettings, ...], Field(min_length=1)]
    devices: PositiveInt | None = None

    @model_serializer(mode="wrap")
    def _without_absent_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What a plan of an earlier version does not have is not written, so that its digest stays."""
        written: dict[str, Any] = handler(self)
        return {name: value for name, value in written.items() if name != "devices" or value is not None}


class EnginePeak(_Part):
    """Bytes on one device at one moment of a step, by purpose; see :mod:`planner.layers.plan.memory`.

    Parameters
    ----------
    moment
        Name of the moment, such as ``backward of head``.
    states
        Parameters and optimizer state as they are between steps, and samples.
    activations
        Tensors saved for backward.
    workspace
        Temporaries of the layer that runs, its output, and tensors recomputed for its backward.
    copies, gradients, reduction, pipeline
        Other memory of torch's engine: gathered parameters, unreduced gradients, buffers of their reduction, buffers
        of the pipeline.
    """

    moment: str
    states: NonNegativeInt
    activations: NonNegativeInt = 0
    workspace: NonNegativeInt = 0
    copies: NonNegativeInt = 0
    gradients: NonNegativeInt = 0
    reduction: NonNegativeInt = 0
    pipeline: NonNegativeInt = 0

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by purpose."""
        return self.model_dump(exclude={"moment"})

    @property
    def nbytes(self) -> int:
        """All of them."""
        return sum(self.parts.values())


class LayerRecord(_Part):
    """Record of how a plan was found, and of its prediction.

    Parameters
    ----------
    formulation, as_published, solver
        Formulation and solver; the paper's own search or an exact one.
    status, objective_seconds, bound_seconds, gap
        Predicted seconds of a step in the formulation's own estimate, an exact lower bound of it for all plans of the
        formulation (from a search in integers or fractions; None without one), and the distance between the two
        relative to the first.
    seconds
        Of the search.
    stage_peak_bytes
        Predicted bytes on one device of every stage, as the formulation counts them.
    engine_peaks
        The same with the other memory of torch's own engine; empty in plans made before this was predicted.
    tensor_bytes
        Limit of torch's tensors on one device, in bytes.
    reserve_bytes
        Bytes of the device beside that; 0 in plans made before it was written.
    notes
        Omissions and assumptions of the layers' profiles.
    choices
        Choices of the problem by name (:mod:`planner.layers.plan.choices`); empty in plans made before these had names.
    slips
        Slips of the paper that its own search kept.
    bound_bytes
        Exact lower bound on the fullest device's bytes, where that is the objective.
    pins
        Decisions of the user that the plan keeps; bounds are over the plans that do.
    """

    formulation: str
    as_published: bool
    solver: str
    status: str
    objective_seconds: NonNegativeFloat
    bound_seconds: NonNegativeFloat | None
    gap: NonNegativeFloat | None
    seconds: NonNegativeFloat
    stage_peak_bytes: tuple[NonNegativeInt, ...]
    engine_peaks: tuple[EnginePeak, ...] = ()
    tensor_bytes: NonNegativeInt
    reserve_bytes: NonNegativeInt = 0
    notes: tuple[str, ...] = ()
    choices: dict[str, str] = {}
    slips: tuple[str, ...] = ()
    bound_bytes: NonNegativeInt | None = None
    pins: tuple[Pin, ...] = ()


class PlannedMachine(_Part):
    """Machine that a plan is for.

    Parameters
    ----------
    cluster
        Name of the cluster.
    device
        Kind of its devices.
    calibration
        Fingerprint of the machine on which its costs were measured; None where they were not.
    """

    cluster: str
    device: Literal["cpu", "cuda"]
    calibration: Fingerprint | None = None


class LayerPlan(_Part):
    """A plan of layers: stage, devices and settings of every layer of a model.

    Parameters
    ----------
    version
        :data:`LAYER_PLAN_VERSION`.
    model
        Which training step.
    devices
        All devices; the stages have consecutive ones, equally many where they do not say how many.
    stages
        The layers by stage, in the order in which they run.
    micro_batches
        Parts of the batch that go through the stages one after the other; gradients are reduced once.
    schedule
        Order of the micro-batches: all forwards first (GPipe), or each backward as early as it can be (1F1B).
    optimizer
        A name of :data:`planner.graph.optimizers.OPTIMIZERS`.
    seed
        Key of random operators (dropout).
    machine
        What it was planned for; absent from plans written by hand and from those of earlier versions.
    record
        The prediction; None for a plan written by hand.
    """

    version: Literal[1] = LAYER_PLAN_VERSION
    model: PlannedModel
    devices: PositiveInt
    stages: Annotated[tuple[StagePlan, ...], Field(min_length=1)]
    micro_batches: PositiveInt = 1
    schedule: PipelineSchedule = "1f1b"
    optimizer: OptimizerName = "adamw"
    seed: NonNegativeInt = 0
    machine: PlannedMachine | None = None
    record: LayerRecord | None = None

    @model_serializer(mode="wrap")
    def _without_absent_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What a plan of an earlier version does not have is not written, so that its digest stays."""
        written: dict[str, Any] = handler(self)
        return {name: value for name, value in written.items() if name != "machine" or value is not None}

    @property
    def stage_sizes(self) -> tuple[int, ...]:
        """Devices of each stage."""
        return tuple(stage.devices or self.devices // len(self.stages) for stage in self.stages)

    @property
    def is_even(self) -> bool:
        """Whether all stages have equally many devices."""
        return len(set(self.stage_sizes)) == 1

    def stage_of(self, device: int) -> int:
        """Stage of a device, by its place among all."""
        return next(number for number, end in enumerate(accumulate(self.stage_sizes)) if device < end)

    @property
    def layers(self) -> tuple[LayerSettings, ...]:
        """The layers of all stages."""
        return tuple(layer for stage in self.stages for layer in stage.layers)

    @property
    def objective_seconds(self) -> float | None:
        """Predicted seconds of a step; None in a plan without predictions."""
        return None if self.record is None else self.record.objective_seconds

    @property
    def bound_seconds(self) -> float | None:
        """Proven lower bound of the objective, over all plans of the formulation."""
        return None if self.record is None else self.record.bound_seconds

    @property
    def gap(self) -> float | None:
        """Distance between the two relative to the first; None without a bound."""
        return None if self.record is None else self.record.gap

    @property
    def peak_bytes(self) -> int:
        """Predicted bytes on the fullest device, as the formulation counts them; 0 in a plan without predictions."""
        return 0 if self.record is None else max(self.record.stage_peak_bytes, default=0)

    @property
    def held_bytes(self) -> int:
        """Predicted bytes on the fullest device under torch's engine, or :attr:`peak_bytes` where that is not known."""
        peaks = () if self.record is None else self.record.engine_peaks
        return max((peak.nbytes for peak in peaks), default=self.peak_bytes)

    def settings_digest(self) -> str:
        """SHA-256 of the canonical JSON of all but the record."""
        return hashlib.sha256(canonical_json(self.model_copy(update={"record": None})).encode()).hexdigest()

    def summary(self) -> str:
        """Lines of text: the prediction, then the settings of every run of equal layers."""
        return layer_plan_text(self)

    def to_pandas(self) -> pd.DataFrame:
        """A row for every layer with its settings; needs pandas, which the extra ``notebooks`` installs."""
        import pandas as pd

        rows = [
            {"stage": number, **layer.model_dump()}
            for number, stage in enumerate(self.stages)
            for layer in stage.layers
        ]
        return pd.DataFrame(rows).set_index("name")

    def save(self, path: Path | str) -> None:
        """Write the plan; as :func:`save_layer_plan`."""
        save_layer_plan(self, Path(path))

    def __repr__(self) -> str:
        step = "" if self.objective_seconds is None else f": {format_seconds(self.objective_seconds)} per step"
        return f"<layer plan of {self.model.source} on {self.devices} devices, {len(self.stages)} stages{step}>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.summary())}</pre>"


def is_layer_plan(path: Path) -> bool:
    """Whether a file is a plan of layers; one that is no JSON is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "stages" in document


def save_layer_plan(plan: LayerPlan, path: Path) -> None:
    """Write a layer plan atomically; equal plans give equal files.

    Raises
    ------
    PlanError
        The file cannot be written.
    """
    try:
        write_text_atomically(path, canonical_json(plan) + "\n")
    except OSError as error:
        raise PlanError(f"layer plan {path} cannot be written: {error.strerror or error}") from error


def load_layer_plan(path: Path) -> LayerPlan:
    """Read a layer plan; nothing that it names is imported.

    Raises
    ------
    PlanError
        The file cannot be read, is no JSON, is of another version, or does not fit the schema.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"layer plan {path} cannot be read: {error}") from error
    return parse_layer_plan(text, str(path))


def parse_layer_plan(text: str, source: str) -> LayerPlan:
    """Layer plan of a JSON text; errors name `source` as its origin.

    Raises
    ------
    PlanError
        As :func:`load_layer_plan`.
    """
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"layer plan {source} is not JSON: {error}") from error
    version = document.get("version") if isinstance(document, dict) else None
    if version is True or version != LAYER_PLAN_VERSION:
        raise PlanError(
            f"layer plan {source} has version {json.dumps(version):.40}, this meshwright reads {LAYER_PLAN_VERSION}"
        )
    try:
        return LayerPlan.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise PlanError(f"layer plan {source}: {where}: {first['msg']}") from error
